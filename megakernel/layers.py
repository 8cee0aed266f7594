"""The four sublayers of a decode step, each a sequence of phases. Every function returns the next tape block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megakernel.memory import COMMIT, COUNT, POSITION
from megakernel.phases import experts as experts_phase
from megakernel.phases import ffn, kda, mla, route
from megakernel.phases.linear import linear, rounded, whole_tiles
from megakernel.phases.mix import rms_norm
from megakernel.plan import Plan
from megakernel.program import kda_vectors
from megakernel.stream import Experts, LatentGroups, LatentPages, Ref, Scalar, Tape, Vectors, Window


@dataclasses.dataclass
class Step:
    """What every phase of one round sees: the plan, the buffers by name, the streams, and who is active."""

    plan: Plan
    refs: SimpleNamespace
    tape: Tape
    vectors: Vectors
    state: Window | None
    tails: Window | None
    pending: Window | None
    groups: LatentGroups | None
    pages: LatentPages | None
    experts: Experts | None
    number: Any = 0  # rounds since the launch began
    table: Any = 0  # vector tables since the launch began

    def current(self, name: int, sequence: Scalar | int) -> Scalar:
        return self.refs.current[name, sequence]

    def all_current(self, name: int) -> list[Scalar]:
        return [self.current(name, sequence) for sequence in range(self.plan.sequences)]

    def sequence_column(self, name: int) -> tuple[jax.Array, Scalar]:
        """One number a sequence as a column, and the largest.  # [sequences, 1] i32, [] i32"""
        values = self.all_current(name)
        largest = values[0]
        for value in values[1:]:
            largest = jnp.maximum(largest, value)
        return column(values, self.plan.sequences), largest

    def row_column(self, value: Callable[[int, int], Scalar], padding: int = 0) -> jax.Array:
        """`value(token, sequence)` of every live row as a column.  # [rows, 1] i32"""
        plan = self.plan
        values = [value(t, sequence) for t in range(plan.tokens) for sequence in range(plan.sequences)]
        return column(values, plan.rows, padding)

    def active(self) -> jax.Array:
        """[rows, 1] bool: rows that hold a token of a sequence that still decodes."""
        return self.row_column(lambda t, sequence: (t < self.current(COUNT, sequence)).astype(jnp.int32)) > 0

    def vector(self, name: str, width: int) -> jax.Array:
        return self.vectors.row(self.table, name, width)  # [1, width] f32

    def norm(self, x: jax.Array, name: str, eps: float | None = None) -> jax.Array:
        weight = self.vector(name, x.shape[1])
        return rounded(self.plan, rms_norm(x, weight, self.plan.config.rms_norm_eps if eps is None else eps))

    def linear(self, index: Scalar, x: jax.Array, name: str) -> tuple[Ref, Scalar]:
        """Streams matrix `name`; returns its output buffer and the next block."""
        out = getattr(self.refs, f"out_{name}")
        index = linear(self.plan, self.tape, index, x, self.plan.matrices[name], self.refs.operand, out)
        return out, index

    def take(self, out: Ref, matrix: str, column: str) -> jax.Array:
        """A named column range of a product's output, rounded to the activation format.  # [rows, width] f32"""
        found = self.plan.matrices[matrix]
        width = next(c.width for c in found.columns if c.name == column)
        start = found.offset(column)
        return rounded(self.plan, self.rows_of(out, start, width))

    def rows_of(self, out: Ref, start: int, width: int) -> jax.Array:
        """Lanes of a product's output; rows that it did not compute are zero.  # [rows, width] f32"""
        return whole_tiles([out[: self.plan.product_rows, start : start + width]], self.plan.rows)

    def has_written(self, layer: Scalar) -> Scalar:
        """Whether a cache window of this kind was written back earlier in the launch."""
        return (self.number > 0) | (layer > 0)


def column(values: list[Scalar], rows: int, padding: int = 0) -> jax.Array:
    """Scalars below each other, then padding.  # [rows, 1] i32"""
    row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    stacked = jnp.full((rows, 1), padding, jnp.int32)
    for i, value in enumerate(values):
        stacked = jnp.where(row == i, value, stacked)
    return stacked


def kda_attention(step: Step, index: Scalar, layer: Scalar, x: jax.Array) -> jax.Array:
    """Kimi Delta Attention of one layer.  # x [rows, hidden] f32 -> [rows, hidden] f32; `layer` counts KDA layers"""
    plan, refs, config = step.plan, step.refs, step.plan.config
    assert step.state is not None
    assert step.tails is not None
    width = config.kda_width
    windows = [window for window in (step.state, step.tails, step.pending) if window is not None]
    for window in windows:
        window.start_read(layer, step.has_written(layer))

    out, index = step.linear(index, x, "kda_in")
    projected = jnp.concatenate([step.take(out, "kda_in", name) for name in ("q", "k", "v")], axis=-1)
    beta = step.take(out, "kda_in", "beta")
    decay_out, index = step.linear(index, step.take(out, "kda_in", "decay_low"), "kda_decay")
    gate = step.take(out, "kda_in", "gate") if config.use_full_rank_gate else None
    if gate is None:
        gate_out, index = step.linear(index, step.take(out, "kda_in", "gate_low"), "kda_gate")
        gate = step.take(gate_out, "kda_gate", "gate")
    rate, bias = step.vector("decay_rate", width), step.vector("decay_bias", width)
    decay = kda.log_decay(plan, step.take(decay_out, "kda_decay", "decay"), rate, bias)

    for window in windows:
        window.wait_read(layer)
    if step.pending is not None:
        commit_pending(step)
        step.state.start_write(layer)
        step.tails.start_write(layer)
    convolved = kda.short_convolution(plan, projected, _conv_taps(step), refs.tails)
    kda.store_rows(plan, projected, convolved, decay, beta, refs.kda_rows)
    count, most = step.sequence_column(COUNT)
    keep = step.pending is None
    kda.run_tokens(plan, refs.kda_rows, kda.Q, count, most, keep, refs.state, refs.trial_state, refs.kda_read)
    if step.pending is None:
        kda.move_tails(plan, refs.kda_rows, count, refs.tails)
        step.state.start_write(layer)
        step.tails.start_write(layer)
    else:
        step.pending.start_write(layer)

    read = kda.pad_rows(plan, refs.kda_read[...].reshape(plan.live_rows, width))
    out, _ = step.linear(index, kda.gated_norm(plan, read, gate, step.vector("out_norm", width)), "kda_out")
    return step.take(out, "kda_out", "out")


def commit_pending(step: Step) -> None:
    """Takes the state and the tails in the windows on by the rows accepted in the last round."""
    taken, most = step.sequence_column(COMMIT)
    refs = step.refs
    kda.run_tokens(step.plan, refs.pending, kda.K, taken, most, True, refs.state, refs.trial_state, refs.kda_read)
    kda.move_tails(step.plan, step.refs.pending, taken, step.refs.tails)


def _conv_taps(step: Step) -> jax.Array:
    """[taps, 3 * width] f32: taps of q, k and v side by side, as the projection lays them out."""
    config = step.plan.config
    names = kda_vectors(config)[: 3 * config.short_conv_kernel_size]
    rows = [step.vector(name, config.kda_width) for name in names]
    taps = config.short_conv_kernel_size
    streams = [jnp.concatenate(rows[i * taps : (i + 1) * taps], axis=0) for i in range(3)]
    return jnp.concatenate(streams, axis=-1)


def mla_attention(step: Step, index: Scalar, layer: Scalar, x: jax.Array) -> jax.Array:
    """Latent attention of one layer.  # x [rows, hidden] f32 -> [rows, hidden] f32; `layer` counts MLA layers"""
    plan, refs, config = step.plan, step.refs, step.plan.config
    assert step.groups is not None
    assert step.pages is not None
    positions, counts = step.all_current(POSITION), step.all_current(COUNT)
    step.groups.start_read(layer, positions, step.has_written(layer))

    out, index = step.linear(index, x, "mla_in")
    latent, extra = step.take(out, "mla_in", "latent"), step.take(out, "mla_in", "extra")
    mla.store_fresh_latents(plan, latent, extra, step.vector("kv_norm", config.kv_lora_rank), refs.fresh)
    if config.q_lora_rank is None:
        queries, matrix = out, "mla_in"
    else:
        query_low = step.norm(step.take(out, "mla_in", "query_low"), "query_norm", config.mla_latent_norm_eps)
        queries, index = step.linear(index, query_low, "mla_query")
        matrix = "mla_query"
    absorbed, index = step.linear(index, step.take(queries, matrix, "nope"), "mla_absorb")
    mla.store_queries(plan, absorbed, queries, refs.queries)

    mla.attend(plan, layer, refs.current, refs.queries, refs.fresh, step.pages, refs.contexts)
    step.groups.wait_read(layer, positions)
    mla.merge_into_groups(plan, refs.fresh, positions, counts, refs.latent_group)
    step.groups.start_write(layer, positions)

    contexts = jnp.concatenate([refs.contexts[:, head] for head in range(config.num_attention_heads)], axis=-1)
    values, index = step.linear(index, contexts, "mla_value")
    gate = step.take(out, "mla_in", "gate") if config.mla_use_output_gate else None
    out, _ = step.linear(index, mla.attention_output(plan, values, gate), "mla_out")
    return step.take(out, "mla_out", "out")


def dense_ffn(step: Step, index: Scalar, x: jax.Array) -> jax.Array:
    """[rows, hidden] f32 -> [rows, hidden] f32"""
    return _gated_ffn(step, index, x, "dense")[0]


def moe_ffn(step: Step, index: Scalar, moe_layer: Scalar, x: jax.Array) -> jax.Array:
    """Routed experts (their copies run while the shared experts compute) plus shared experts.

    [rows, hidden] f32 -> [rows, hidden] f32; `moe_layer` counts MoE layers.
    """
    plan, refs, config = step.plan, step.refs, step.plan.config
    assert step.experts is not None
    routed, index = step.linear(index, x, "route")
    router = step.plan.matrices["route"].columns[0].padded
    bias = step.vector("router_bias", config.num_experts)
    logits = step.rows_of(routed, 0, router)
    refs.expert_weights[...] = route.expert_weights(plan, logits, bias, step.active())
    count = route.start_experts(plan, refs.expert_weights[...], moe_layer, step.experts, refs.chosen_experts)
    latent = step.take(routed, "route", "latent") if config.latent_experts else x
    refs.expert_input[...] = latent.astype(plan.activations)

    shared: jax.Array | None = None
    if config.num_shared_experts:
        shared, index = _gated_ffn(step, index, x, "shared")
    experts_phase.run_experts(
        plan,
        count,
        moe_layer,
        refs.expert_weights,
        refs.expert_input,
        step.experts,
        refs.chosen_experts,
        refs.expert_sum,
    )
    total = refs.expert_sum[:, : config.routed_expert_hidden_size] + route.poison(plan, logits, bias)
    total = rounded(plan, total)
    if config.latent_moe_use_norm:
        total = step.norm(total, "latent_norm")
    if config.latent_experts:
        up, index = step.linear(index, total, "routed_up")
        total = step.take(up, "routed_up", "out")
    return total if shared is None else rounded(plan, total + shared)


def _gated_ffn(step: Step, index: Scalar, x: jax.Array, name: str) -> tuple[jax.Array, Scalar]:
    out, index = step.linear(index, x, f"{name}_in")
    gate, up = step.take(out, f"{name}_in", "gate"), step.take(out, f"{name}_in", "up")
    out, index = step.linear(index, ffn.activation(step.plan, gate, up), f"{name}_out")
    return step.take(out, f"{name}_out", "out"), index
