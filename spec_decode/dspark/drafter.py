"""A DSpark drafter inside the launch: context features, one block pass, a Markov chain, all behind the target's head.

Everything is more of what the target already has: its products are tape behind the LM head, its context keys and values
a cache with pages, its small vectors and the Markov output matrix stay in VMEM for the whole launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from megakernel.layers import Step
from megakernel.limits import POSITION_GROUP, PlanError
from megakernel.memory import DRAFTS, Buffer, head_output
from megakernel.plan import Plan
from megakernel.program import LANES, Matrix, round_up
from megakernel.split import Split
from megakernel.step_model import StepModel
from megakernel.stream import bring
from megakernel.target import Target
from model.config import ModelConfig
from spec_decode.dspark import block, context, markov
from spec_decode.dspark.config import DSparkConfig
from spec_decode.dspark.share import Share, matrices
from spec_decode.dspark.walk import walk_proposal


@dataclasses.dataclass(frozen=True)
class DSparkDrafter:
    """See `spec_decode.dspark.config`. Drafts up to `block_size` tokens a round in one parallel pass."""

    config: DSparkConfig

    @property
    def name(self) -> str:
        return "dspark"

    @property
    def max_drafts(self) -> int:
        return self.config.block_size

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.tap_layers

    def check(self, config: ModelConfig) -> None:
        """Raises `PlanError` with the two numbers that do not fit together."""
        own = self.config
        for what, mine, target in (
            ("vocabulary", own.vocab_size, config.vocab_size),
            ("target hidden size", own.target_hidden_size, config.hidden_size),
        ):
            if mine != target:
                raise PlanError(f"drafter {own.name!r} was made for a {what} of {mine}; {config.name} has {target}")
        if not 0 <= own.mask_token_id < own.vocab_size:
            raise PlanError(
                f"drafter {own.name!r} has mask token {own.mask_token_id}, outside its {own.vocab_size} tokens"
            )
        if own.shares_embeddings and own.hidden_size != config.hidden_size:
            raise PlanError(
                f"drafter {own.name!r} shares the target's embeddings with hidden size {own.hidden_size}; "
                f"{config.name} has {config.hidden_size}"
            )
        if not own.tap_layers or max(own.tap_layers) > config.num_hidden_layers or min(own.tap_layers) < 1:
            raise PlanError(
                f"drafter {own.name!r} looks at the target after {own.tap_layers} completed layers; "
                f"{config.name} has {config.num_hidden_layers}"
            )

    def check_split(self, split: Split, target: Target) -> None:
        """Raises `PlanError` with the width that cores cannot share or lanes cannot hold."""
        own = self.config
        if split.cores > 1 and own.hidden_size % LANES:
            raise PlanError(
                f"drafter {own.name!r} has hidden_size = {own.hidden_size}, no multiple of {LANES}: "
                f"{split.cores} cores cannot share it; use one core"
            )
        if not target.lane_aligned:
            return
        for key, size, fits in (
            ("hidden_size", own.hidden_size, own.hidden_size % LANES == 0),
            ("head_dim", own.head_dim, own.head_dim % LANES == 0 or LANES % own.head_dim == 0),
        ):
            if not fits:
                raise PlanError(
                    f"drafter {own.name!r} has {key} = {size}, which does not fill the {LANES} lanes of {target.name} "
                    "evenly; such a drafter runs on target 'cpu' only"
                )

    def matrices(self, split: Split) -> tuple[Matrix, ...]:
        return matrices(Share(self.config, split))

    def exchange_lanes(self, split: Split) -> int:
        share = Share(self.config, split)
        return max(round_up(share.features, LANES), share.hidden)

    @property
    def sum_widths(self) -> tuple[int, ...]:
        return (self.config.hidden_size,)

    def vmem(self, plan: Plan) -> dict[str, Buffer]:
        own, share, rows = self.config, Share(self.config, plan.split), plan.rows
        lanes, heads = share.cache_lanes, (share.heads, share.head_lanes)
        return {
            "draft_vectors": Buffer(self._vector_table(), "float32"),
            "draft_markov_out": Buffer((own.markov_rank, self._vocabulary(plan)), _bias_storage(plan)),
            "draft_markov_rows": Buffer((plan.sequences, POSITION_GROUP, self._rank()), plan.storage),
            "draft_embedding_rows": Buffer((plan.sequences + 1, POSITION_GROUP, share.hidden), plan.storage),
            "draft_stream": Buffer((rows, own.hidden_size), "float32"),
            "draft_fresh": Buffer((rows, lanes), "float32"),
            "draft_block": Buffer((rows, lanes), "float32"),
            "draft_queries": Buffer((rows, *heads), "float32"),
            "draft_read": Buffer((rows, *heads), "float32"),
            "draft_page": Buffer((2, plan.page, lanes), plan.activations),
            "draft_group": Buffer((plan.sequences, plan.group_positions, lanes), plan.activations),
            "out_draft_head": head_output(plan, "draft_head"),
        }

    def weights(self, plan: Plan) -> dict[str, Buffer]:
        own, share = self.config, Share(self.config, plan.split)
        rows = round_up(own.vocab_size, POSITION_GROUP)
        return {
            "draft_vector_table": Buffer(self._vector_table(), "float32"),
            "draft_markov_w2": Buffer((own.markov_rank, self._vocabulary(plan)), _bias_storage(plan)),
            "draft_markov_w1": Buffer((rows, self._rank()), plan.storage),
            "draft_embedding": Buffer((rows, share.hidden), plan.storage),
        }

    def caches(self, plan: Plan) -> dict[str, Buffer]:
        lanes = Share(self.config, plan.split).cache_lanes
        shape = (self.config.num_layers, plan.sequences, plan.cache_positions, lanes)
        return {"draft_keys_values": Buffer(shape, plan.activations)}

    def request(self, plan: Plan) -> dict[str, Buffer]:
        return {}

    def fill_request(self, plan: Plan, slot: int, known: list[int], arrays: Mapping[str, np.ndarray]) -> None:
        """Needs nothing from the host: what it knows of a sequence is in its cache."""

    def semaphores(self, plan: Plan) -> dict[str, int]:
        return {"draft_done": 1, "draft_page_done": 2, "draft_group_in": 1, "draft_group_out": 1}

    def begin(self, step: Step) -> None:
        """Brings what stays in VMEM for the whole launch."""
        refs = step.refs
        for source, target in (
            (refs.draft_vector_table, refs.draft_vectors),
            (refs.draft_markov_w2, refs.draft_markov_out),
        ):
            bring(source, target, refs.draft_done)
        refs.draft_read[...] = jnp.zeros(refs.draft_read.shape, jnp.float32)
        refs.draft_block[...] = jnp.zeros(refs.draft_block.shape, jnp.float32)

    def propose(self, step: Step, section: Any) -> None:
        share = Share(self.config, step.plan.split)
        context.store_context(share, step, section)
        block.run_block(share, step, section)
        markov.draft_left_to_right(self.config, step)
        for sequence in range(step.plan.sequences):
            step.refs.current[DRAFTS, sequence] = jnp.int32(step.plan.tokens - 1)

    def walk_proposal(self, model: StepModel) -> None:
        walk_proposal(Share(self.config, model.plan.split), model)

    def pack(self, plan: Plan, weights: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray], core: int) -> None:
        own = self.config
        for name, row in context.vector_rows(own).items():
            vector = context.vector_of(own, weights, name)
            arrays["draft_vector_table"][row, : len(vector)] = vector
        entries, columns = plan.split.vocabulary, Share(own, plan.split).hidden
        biases = weights["markov_head.markov_w2.weight"][core * entries : (core + 1) * entries]
        arrays["draft_markov_w2"][:, : len(biases)] = biases.T
        arrays["draft_markov_w1"][: own.vocab_size, : own.markov_rank] = weights["markov_head.markov_w1.weight"]
        embedding = weights["target.embed_tokens" if own.shares_embeddings else "embed_tokens.weight"]
        embedding = embedding[:, core * columns : (core + 1) * columns]
        arrays["draft_embedding"][: own.vocab_size, : embedding.shape[1]] = embedding

    def _vector_table(self) -> tuple[int, int]:
        widest = max(self.config.hidden_size, self.config.head_dim)
        return round_up(len(context.vector_rows(self.config)), 8), round_up(widest, LANES)

    def _rank(self) -> int:
        return round_up(self.config.markov_rank, LANES)

    def _vocabulary(self, plan: Plan) -> int:
        return plan.output_width(plan.matrices["draft_head"])


def _bias_storage(plan: Plan) -> str:
    """Element type of the Markov head's output matrix: it meets every slot of every round, so where products are in
    float32 it is widened once, when it is packed."""
    return "float32" if plan.target.multiplies_float32 else plan.storage
