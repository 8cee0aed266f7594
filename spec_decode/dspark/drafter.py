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
from megakernel.memory import DRAFTS, Buffer, head_output
from megakernel.plan import POSITION_GROUP, Plan, PlanError
from megakernel.program import LANES, Column, Matrix, round_up
from megakernel.stream import bring
from model.config import ModelConfig
from spec_decode.dspark import block, context, markov
from spec_decode.dspark.config import DSparkConfig


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

    def matrices(self) -> tuple[Matrix, ...]:
        own = self.config
        taps = len(own.tap_layers) * own.target_hidden_size
        kv = own.num_kv_heads * own.head_dim
        keys_values = [
            Column(f"{part}{layer}", kv, f"layers.{layer}.self_attn.{part}_proj.weight")
            for layer in range(own.num_layers)
            for part in ("k", "v")
        ]
        head = "target.lm_head" if own.shares_embeddings else "lm_head.weight"
        return (
            Matrix("draft_fc", taps, (Column("features", own.hidden_size, "fc.weight"),)),
            Matrix("draft_context", own.hidden_size, tuple(keys_values)),
            *(matrix for layer in range(own.num_layers) for matrix in self._layer_matrices(layer)),
            Matrix("draft_head", own.hidden_size, (Column("logits", own.vocab_size, head),)),
        )

    def _layer_matrices(self, layer: int) -> tuple[Matrix, ...]:
        own = self.config
        attention, mlp, name = f"layers.{layer}.self_attn", f"layers.{layer}.mlp", f"draft{layer}"
        queries, kv = own.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
        return (
            Matrix(
                f"{name}_in",
                own.hidden_size,
                tuple(
                    Column(part, width, f"{attention}.{part}_proj.weight")
                    for part, width in (("q", queries), ("k", kv), ("v", kv))
                ),
            ),
            Matrix(f"{name}_out", queries, (Column("out", own.hidden_size, f"{attention}.o_proj.weight"),)),
            Matrix(
                f"{name}_gate_up",
                own.hidden_size,
                tuple(Column(p, own.intermediate_size, f"{mlp}.{p}_proj.weight") for p in ("gate", "up")),
            ),
            Matrix(f"{name}_down", own.intermediate_size, (Column("out", own.hidden_size, f"{mlp}.down_proj.weight"),)),
        )

    def vmem(self, plan: Plan) -> dict[str, Buffer]:
        own, rows = self.config, plan.rows
        lanes = context.cache_lanes(own)
        return {
            "draft_vectors": Buffer(self._vector_table(), "float32"),
            "draft_markov_out": Buffer((own.markov_rank, self._vocabulary(plan)), plan.storage),
            "draft_markov_rows": Buffer((plan.sequences, POSITION_GROUP, self._rank()), plan.storage),
            "draft_embedding_rows": Buffer((plan.sequences + 1, POSITION_GROUP, own.hidden_size), plan.storage),
            "draft_stream": Buffer((rows, own.hidden_size), "float32"),
            "draft_fresh": Buffer((rows, lanes), "float32"),
            "draft_block": Buffer((rows, lanes), "float32"),
            "draft_queries": Buffer((rows, own.num_heads, own.head_dim), "float32"),
            "draft_read": Buffer((rows, own.num_heads, own.head_dim), "float32"),
            "draft_page": Buffer((2, plan.page, lanes), plan.activations),
            "draft_group": Buffer((plan.sequences, plan.group_positions, lanes), plan.activations),
            "out_draft_head": head_output(plan, "draft_head"),
        }

    def weights(self, plan: Plan) -> dict[str, Buffer]:
        own = self.config
        rows = round_up(own.vocab_size, POSITION_GROUP)
        return {
            "draft_vector_table": Buffer(self._vector_table(), "float32"),
            "draft_markov_w2": Buffer((own.markov_rank, self._vocabulary(plan)), plan.storage),
            "draft_markov_w1": Buffer((rows, self._rank()), plan.storage),
            "draft_embedding": Buffer((rows, own.hidden_size), plan.storage),
        }

    def caches(self, plan: Plan) -> dict[str, Buffer]:
        shape = (self.config.num_layers, plan.sequences, plan.cache_positions, context.cache_lanes(self.config))
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
        context.store_context(self.config, step, section)
        block.run_block(self.config, step, section)
        markov.draft_left_to_right(self.config, step)
        for sequence in range(step.plan.sequences):
            step.refs.current[DRAFTS, sequence] = jnp.int32(step.plan.tokens - 1)

    def pack(self, plan: Plan, weights: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray]) -> None:
        own = self.config
        for name, row in context.vector_rows(own).items():
            vector = context.vector_of(own, weights, name)
            arrays["draft_vector_table"][row, : len(vector)] = vector
        arrays["draft_markov_w2"][:, : own.vocab_size] = weights["markov_head.markov_w2.weight"].T
        arrays["draft_markov_w1"][: own.vocab_size, : own.markov_rank] = weights["markov_head.markov_w1.weight"]
        embedding = weights["target.embed_tokens" if own.shares_embeddings else "embed_tokens.weight"]
        arrays["draft_embedding"][: own.vocab_size] = embedding

    def _vector_table(self) -> tuple[int, int]:
        widest = max(self.config.hidden_size, self.config.head_dim)
        return round_up(len(context.vector_rows(self.config)), 8), round_up(widest, LANES)

    def _rank(self) -> int:
        return round_up(self.config.markov_rank, LANES)

    def _vocabulary(self, plan: Plan) -> int:
        return plan.output_width(plan.matrices["draft_head"])
