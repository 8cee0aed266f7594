"""What is in flight when: the work of consecutive rounds in order, and every copy with the work that it spans.

Order only, no durations: one unit of work is what one matrix has in one tape block, or one phase without a tape block.
The order is that of `layers` and `kernel.decode_rounds`; the copies follow the rules of `stream`. The first copies of a
launch's ring and vectors start before work 0. A drafter's own copies and what cores exchange are not shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from megakernel import program
from megakernel.plan import Plan
from megakernel.tiling import Tiling

Family = Literal[
    "KDA", "MLA", "dense FFN", "routing", "shared experts", "routed experts", "LM head", "drafter", "other"
]
FAMILIES: dict[str, Family] = {
    "kda": "KDA",
    "mla": "MLA",
    "dense": "dense FFN",
    "router": "routing",
    "shared": "shared experts",
    "routed": "routed experts",
    "head": "LM head",
}
"""Family of a matrix by the first word of its name."""
PHASE_FAMILIES: dict[str, Family] = {
    "replay": "KDA",
    "convolution": "KDA",
    "recurrence": "KDA",
    "attention": "MLA",
    "route": "routing",
    "experts": "routed experts",
    "draft": "drafter",
}


@dataclasses.dataclass(frozen=True)
class Work:
    """What matrix `name` has in a tape block, or a phase.

    Attributes:
      block: counts from the start of the launch; None for a phase that reads no tape block.
      first: the block is waited for here; last: it is given back after this work.
    """

    name: str
    family: Family
    round: int
    layer: int
    block: int | None = None
    first: bool = False
    last: bool = False


@dataclasses.dataclass(frozen=True)
class Copy:
    """In flight from before work `start` until `end`, where it is waited for: before work `end` (a fraction: inside).

    `lane` names the buffer, `slot` the place in it.
    """

    lane: str
    slot: int
    kind: Literal["read", "write"]
    start: float
    end: float
    label: str
    family: Family = "other"


def family_of(matrix: program.Matrix) -> Family:
    return FAMILIES.get(matrix.name.split("_")[0], "drafter")


def tape_sections(plan: Plan) -> Iterator[tuple[str, int, int]]:
    """(section, layer, first block) along the tape of one step; head and drafter count as a layer after the last."""
    block = 0
    for place, section in enumerate(program.section_order(plan.config)):
        yield section, place // 2, block
        block += plan.section_blocks(section)
    if "draft" in plan.sections:
        yield "draft", plan.config.num_hidden_layers, block


def work_of(plan: Plan, rounds: int = 1) -> list[Work]:
    """The work of `rounds` rounds from the start of a launch."""
    return [item for number in range(rounds) for item in _round_work(plan, number)]


def _round_work(plan: Plan, number: int) -> Iterator[Work]:
    def phase(name: str, layer: int) -> Work:
        return Work(name, PHASE_FAMILIES.get(name, "other"), number, layer)

    yield phase("embed", -1)
    for section, layer, start in tape_sections(plan):
        for matrix in plan.sections[section]:
            yield from (phase(name, layer) for name in _phases_before(plan, matrix.name))
            for block, first, last in _blocks_of(plan.tilings[matrix.name]):
                at = number * plan.tape_blocks + start + block
                yield Work(matrix.name, family_of(matrix), number, layer, at, first, last)
            yield from (phase(name, layer) for name in _phases_after(plan, matrix.name))
        if section == "head":
            yield phase("sample", layer)
    if plan.drafter:
        yield phase("draft", plan.config.num_hidden_layers)


def _blocks_of(tiling: Tiling) -> Iterator[tuple[int, bool, bool]]:
    """(block of the section, waited for, given back) for each block that holds some of a matrix."""
    cuts = [cut for panel in tiling.panels for cut in panel.cuts]
    for block in tiling.blocks:
        own = [cut for cut in cuts if cut.block == block]
        yield block, any(cut.first for cut in own), any(cut.last for cut in own)


def _phases_before(plan: Plan, matrix: str) -> tuple[str, ...]:
    return {"kda_out": ("recurrence",), "mla_value": ("attention",)}.get(matrix, ())


def _phases_after(plan: Plan, matrix: str) -> tuple[str, ...]:
    """What the last round left is replayed while low-rank vectors are gathered. Routing follows the first half of the
    shared experts, if there are any. The routed experts come before the second half if that fills the wait for their
    sum, else after it."""
    if matrix == "kda_in":
        return ("replay", "convolution") if plan.tokens > 1 else ("convolution",)
    names = [found.name for found in plan.sections.get("moe", ())]
    if matrix not in names:
        return ()
    logits_gathered = [name for name in names if name in ("router", "shared_in")][-1]
    beside_experts = "shared_out" in names and not plan.config.latent_experts
    shared_done = "shared_out" if beside_experts else logits_gathered
    phases = ("route",) if matrix == logits_gathered else ()
    return (*phases, "experts") if matrix == shared_done else phases


def copies_of(plan: Plan, work: Sequence[Work]) -> list[Copy]:
    """Every copy that is waited for within `work`, and those in flight at its end (which end with it)."""
    return [*_ring(plan, work), *_vectors(plan, work), *_windows(plan, work), *_fetches(plan, work)]


def layer_boundary(plan: Plan, work: Sequence[Work]) -> int:
    """Index of the work with which a layer begins: the first MLA layer after an MoE layer if there is one."""
    config = plan.config
    wanted = [layer for layer in config.mla_layers if layer and config.is_moe(layer - 1)]
    layer = wanted[0] if wanted else min(1, config.num_hidden_layers)
    return next(i for i, item in enumerate(work) if item.layer == layer)


def round_boundary(work: Sequence[Work]) -> int:
    """Index of the work with which the second round begins."""
    return next(i for i, item in enumerate(work) if item.round == 1)


def _ring(plan: Plan, work: Sequence[Work]) -> list[Copy]:
    """A block's slot takes the block that follows a whole ring later, after the last matrix that needs it."""
    if plan.tape_is_resident:
        return []
    waits = {item.block: i for i, item in enumerate(work) if item.first}
    given_back = {item.block: i + 1 for i, item in enumerate(work) if item.last}
    families = {item.block: item.family for item in work if item.first and item.round == 0}
    copies = []
    for block in range(len(waits) + plan.ring_depth):
        start = given_back[block - plan.ring_depth] if block >= plan.ring_depth else 0
        slot, family = block % plan.ring_depth, families[block % plan.tape_blocks]
        copies.append(Copy("ring", slot, "read", start, waits.get(block, len(work)), f"block {block}", family))
    return copies


def _vectors(plan: Plan, work: Sequence[Work]) -> list[Copy]:
    starts = [i for i, item in enumerate(work) if item.layer >= 0 and work[i - 1].layer != item.layer]
    copies = [Copy("vectors", 0, "read", 0, starts[0], "table 0")]
    for table, start in enumerate(starts):
        end = starts[table + 1] if table + 1 < len(starts) else len(work)
        copies.append(Copy("vectors", (table + 1) % 2, "read", start, end, f"table {table + 1}"))
    return copies


def _windows(plan: Plan, work: Sequence[Work]) -> list[Copy]:
    """Cache windows: read from a layer's start to the phase that needs them, written until the next such layer."""
    # lane, family, phase that waits for the read (1: at its end), phase after which the write starts
    windows: list[tuple[str, Family, str, int, str]] = []
    reader, writer = ("replay", "replay") if plan.tokens > 1 else ("convolution", "recurrence")
    for lane in ("KDA state", "conv tails"):
        windows.append((lane, "KDA", reader, 0, writer))
    if plan.tokens > 1:
        windows.append(("replay rows", "KDA", "replay", 0, "recurrence"))
    windows.append(("MLA tile", "MLA", "attention", 1, "attention"))

    copies: list[Copy] = []
    for lane, family, reader, lateness, writer in windows:
        reads = [i for i, item in enumerate(work) if item.name == reader]
        writes = [i + 1 for i, item in enumerate(work) if item.name == writer]
        begins = [_begin_of(work, i, family) for i in reads]
        for i, (begin, read, write) in enumerate(zip(begins, reads, writes, strict=True)):
            end = begins[i + 1] if i + 1 < len(begins) else len(work)
            label = f"layer {work[read].layer}"
            copies.append(Copy(lane, 0, "read", begin, read + lateness, label, family))
            copies.append(Copy(lane, 0, "write", write, end, label, family))
    return copies


def _fetches(plan: Plan, work: Sequence[Work]) -> list[Copy]:
    """Copies of which only the kernel knows what they fetch: experts, cache pages, embedding rows."""
    copies: list[Copy] = []
    for i, item in enumerate(work):
        if item.name == "experts":
            routed = max(j for j in range(i) if work[j].name == "route") + 1
            copies += [_expert(plan, order, routed, i, item.layer) for order in range(plan.max_distinct_experts)]
        elif item.name == "attention":
            begin = _begin_of(work, i, "MLA")
            copies.append(Copy("MLA pages", 0, "read", begin, i + 1, f"layer {item.layer}", "MLA"))
        elif item.name == "embed":
            copies.append(Copy("embedding", 0, "read", i, i + 1, f"round {item.round}"))
    return copies


def _expert(plan: Plan, order: int, routed: int, at: int, layer: int) -> Copy:
    """The `order`-th distinct expert, of as many as there can be: the first ones start after routing, each other one
    when its slot is free."""
    share = 1 / plan.max_distinct_experts
    start = routed if order < plan.expert_slots else at + (order - plan.expert_slots + plan.experts_held) * share
    slot = order % plan.expert_slots
    return Copy("experts", slot, "read", start, at + order * share, f"layer {layer}", "routed experts")


def _begin_of(work: Sequence[Work], index: int, family: Family) -> int:
    """First work of the sublayer that work `index` belongs to."""
    while index and work[index - 1].family == family and work[index - 1].layer == work[index].layer:
        index -= 1
    return index
