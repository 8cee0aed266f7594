"""The order in which a model is packed: stages, each made of a few tensors that all cores take their parts of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from megakernel import program
from megakernel.memory import weight_buffers
from megakernel.plan import Plan

StageKind = Literal["tape", "vectors", "experts", "embedding", "draft"]
EXPERT_STAGE_BYTES = 256 << 20
"""Most bytes of expert tensors in one stage, as long as one expert of each group fits."""


@dataclasses.dataclass(frozen=True)
class Span:
    """Entries `first` to `first + count - 1` of an array, counted along its first axis."""

    array: str
    first: int
    count: int


@dataclasses.dataclass(frozen=True)
class Stage:
    """What is packed at a time, the same for every core.

    Attributes:
      layer: whose tensors are read; one past the last layer: the model's own (LM head, final norm, embedding).
      spans: entries that are filled.
      section: of the tape (kind "tape").
      experts: counted within each group of experts (kind "experts").
    """

    kind: StageKind
    layer: int
    spans: tuple[Span, ...]
    section: str = ""
    experts: range = range(0)


def stages(plan: Plan) -> Iterator[Stage]:
    """Layer by layer; together the spans cover every entry of `memory.weight_buffers(plan)` once."""
    layers, block = plan.config.num_hidden_layers, 0
    for i, section in enumerate(program.section_order(plan.config)):
        layer, blocks = i // 2, plan.section_blocks(section)
        yield Stage("tape", layer, (Span("tape", block, blocks),), section)
        block += blocks
        if i % 2 or layer == layers:
            yield Stage("vectors", layer, tuple(Span(f"{name}_tables", layer, 1) for name in plan.vector_tables))
            yield from _expert_stages(plan, layer)
    yield Stage("embedding", layers, (Span("embedding", 0, weight_buffers(plan)["embedding"].shape[0]),))
    if plan.drafter:
        arrays = plan.drafter.weights(plan)
        drafts = [Span(name, 0, buffer.shape[0]) for name, buffer in arrays.items()]
        if "draft" in plan.sections:
            drafts.append(Span("tape", plan.draft_start, plan.section_blocks("draft")))
        yield Stage("draft", layers, tuple(drafts), "draft")


def _expert_stages(plan: Plan, layer: int) -> Iterator[Stage]:
    config, split = plan.config, plan.split
    if layer == config.num_hidden_layers or not config.is_moe(layer):
        return
    before = sum(config.is_moe(earlier) for earlier in range(layer)) * split.experts
    most = _experts_together(plan)
    for first in range(0, split.experts, most):
        experts = range(first, min(first + most, split.experts))
        spans = tuple(Span(bank, before + first, len(experts)) for bank in ("bank_in", "bank_out"))
        yield Stage("experts", layer, spans, experts=experts)


def _experts_together(plan: Plan) -> int:
    config = plan.config
    bits = 16 if config.expert_format == "bf16" else 4 + 8 / 32
    weights = 3 * config.routed_expert_hidden_size * config.moe_intermediate_size
    return max(1, int(EXPERT_STAGE_BYTES / (plan.split.expert_groups * weights * bits / 8)))
