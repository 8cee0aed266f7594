"""The four sublayers of a decode step, each a sequence of phases.

Each takes what it reads, [rows, hidden] f32, and returns what it adds to the residual stream, the same. `section` is
the first tape block of its matrices; `meanwhile` does what needs nothing of it, while its last exchange is under way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from megakernel.cores import Cores, Piece
from megakernel.memory import COMMIT, COUNT, POSITION
from megakernel.phases import experts as experts_phase
from megakernel.phases import ffn, kda, mla, route
from megakernel.phases.linear import linear, rounded, whole_tiles
from megakernel.phases.mix import rms_norm
from megakernel.phases.visits import Counts, Visits
from megakernel.plan import Plan
from megakernel.program import LANES, kda_vectors, round_up
from megakernel.stream import Experts, LatentGroups, LatentPages, Ref, Scalar, Tape, Vectors, Window

Work = Callable[[], None]


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
    cores: Cores
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
        return self.vectors.row(self.table, name, slice(0, width))  # [1, width] f32

    def norm(self, x: jax.Array, name: str, eps: float | None = None) -> jax.Array:
        weight = self.vector(name, x.shape[1])
        return rounded(self.plan, rms_norm(x, weight, self.plan.config.rms_norm_eps if eps is None else eps))

    def linear(self, section: Scalar, x: jax.Array, name: str) -> Ref:
        """Streams matrix `name` of the section that begins with tape block `section`; returns its output buffer."""
        matrix = self.plan.matrices[name]
        out = getattr(self.refs, matrix.output_buffer)
        linear(self.plan, self.tape, section, x, matrix, self.refs.operand, out)
        return out

    def take(self, out: Ref, matrix: str, column: str) -> jax.Array:
        """A named column range of a product's output, rounded to the activation format.  # [rows, width] f32"""
        return rounded(self.plan, self.take_unrounded(out, matrix, column))

    def take_unrounded(self, out: Ref, matrix: str, column: str) -> jax.Array:
        found = self.plan.matrices[matrix]
        width = next(c.width for c in found.columns if c.name == column)
        return self.rows_of(out, found.offset(column), width)

    def rows_of(self, out: Ref, start: int, width: int) -> jax.Array:
        """Lanes of a product's output; rows that it did not compute are zero.  # [rows, width] f32"""
        first, rows = start // LANES * LANES, self.plan.product_rows
        if start == first:
            return whole_tiles([out[:rows, start : start + width]], self.plan.rows)
        # Lanes are loaded from whole tiles and moved to their front.
        tiles = whole_tiles([out[:rows, first : round_up(start + width, LANES)]], self.plan.rows)
        return pltpu.roll(tiles, tiles.shape[1] - (start - first), 1)[:, :width]

    def has_written(self, layer: Scalar) -> Scalar:
        """Whether a cache window of this kind was written back earlier in the launch."""
        return (self.number > 0) | (layer > 0)


def column(values: list[Scalar], rows: int, padding: int = 0) -> jax.Array:
    """Scalars below each other, then padding.  # [rows, 1] of their type"""
    row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    stacked = jnp.full((rows, 1), padding, values[0].dtype)
    for i, value in enumerate(values):
        stacked = jnp.where(row == i, value, stacked)
    return stacked


def kda_attention(step: Step, section: Scalar, layer: Scalar, x: jax.Array, meanwhile: Work) -> jax.Array:
    """Kimi Delta Attention of one layer; `layer` counts KDA layers."""
    plan, refs, config = step.plan, step.refs, step.plan.config
    assert step.state is not None
    assert step.tails is not None
    width = plan.split.kda_width
    windows = [window for window in (step.state, step.tails, step.pending) if window is not None]
    for window in windows:
        window.start_read(layer, step.has_written(layer))

    narrow = step.linear(section, x, "kda_narrow")
    lows = ["decay_low"] if config.use_full_rank_gate else ["decay_low", "gate_low"]
    step.cores.start_gather([Piece(step.take(narrow, "kda_narrow", low), config.kda_head_dim) for low in lows])
    beta = step.take(narrow, "kda_narrow", "beta")
    out = step.linear(section, x, "kda_in")
    projected = jnp.concatenate([step.take(out, "kda_in", name) for name in ("q", "k", "v")], axis=-1)
    for window in windows:
        window.wait_read(layer)
    if step.pending is not None:
        commit_pending(step)
        step.state.start_write(layer)
        step.tails.start_write(layer)
    convolved = kda.short_convolution(plan, projected, _conv_taps(step), refs.tails)

    decay_low, *gate_low = (low[:, : config.kda_head_dim] for low in step.cores.finish_gather())
    decay_out = step.linear(section, decay_low, "kda_decay")
    if config.use_full_rank_gate:
        gate = step.take(out, "kda_in", "gate")
    else:
        gate = step.take(step.linear(section, gate_low[0], "kda_gate"), "kda_gate", "gate")
    rate, bias = step.vector("decay_rate", width), step.vector("decay_bias", width)
    decay = kda.log_decay(plan, step.take(decay_out, "kda_decay", "decay"), rate, bias)
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
    out = step.linear(section, kda.gated_norm(plan, read, gate, step.vector("out_norm", width)), "kda_out")
    return _total(step, step.take_unrounded(out, "kda_out", "out"), meanwhile)


def _total(step: Step, partial: jax.Array, meanwhile: Work) -> jax.Array:
    """The sum over cores.  # [rows, width] f32 -> the same, rounded"""
    step.cores.start_total(partial)
    meanwhile()
    return step.cores.finish_total()


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
    rows = [step.vector(name, step.plan.split.kda_width) for name in names]
    taps = config.short_conv_kernel_size
    streams = [jnp.concatenate(rows[i * taps : (i + 1) * taps], axis=0) for i in range(3)]
    return jnp.concatenate(streams, axis=-1)


def mla_attention(step: Step, section: Scalar, layer: Scalar, x: jax.Array, meanwhile: Work) -> jax.Array:
    """Latent attention of one layer; `layer` counts MLA layers."""
    plan, refs, config = step.plan, step.refs, step.plan.config
    assert step.groups is not None
    assert step.pages is not None
    positions, counts = step.all_current(POSITION), step.all_current(COUNT)
    step.groups.start_read(layer, positions, step.has_written(layer))
    ahead = mla.start_pages(plan, layer, refs.current, step.pages)

    low = step.take(step.linear(section, x, "mla_low"), "mla_low", "low")
    step.cores.start_gather([Piece(low, plan.split.low_width)])
    own = step.linear(section, x, "mla_in") if "mla_in" in plan.matrices else None
    (low,) = step.cores.finish_gather()
    at = plan.split.low_offsets
    latent, extra = low[:, : config.kv_lora_rank], low[:, at["extra"] : at["extra"] + config.qk_rope_head_dim]
    mla.store_fresh_latents(plan, latent, extra, step.vector("kv_norm", config.kv_lora_rank), refs.fresh)
    if config.q_lora_rank is None:
        queries, matrix = own, "mla_in"
    else:
        query_low = low[:, at["query"] : at["query"] + config.q_lora_rank]
        queries = step.linear(section, step.norm(query_low, "query_norm", config.mla_latent_norm_eps), "mla_query")
        matrix = "mla_query"
    absorbed = step.linear(section, step.take(queries, matrix, "nope"), "mla_absorb")
    mla.store_queries(plan, absorbed, queries, refs.queries)

    mla.attend(plan, layer, refs.current, refs.queries, refs.fresh, step.pages, ahead, refs.contexts)
    step.groups.wait_read(layer, positions)
    mla.merge_into_groups(plan, refs.fresh, positions, counts, refs.latent_group)
    step.groups.start_write(layer, positions)

    contexts = jnp.concatenate([refs.contexts[:, head] for head in range(plan.split.heads)], axis=-1)
    values = step.linear(section, contexts, "mla_value")
    gate = step.take(own, "mla_in", "gate") if config.mla_use_output_gate else None
    out = step.linear(section, mla.attention_output(plan, values, gate), "mla_out")
    return _total(step, step.take_unrounded(out, "mla_out", "out"), meanwhile)


def dense_ffn(step: Step, section: Scalar, x: jax.Array, meanwhile: Work) -> jax.Array:
    out = step.linear(section, _gated(step, section, x, "dense"), "dense_out")
    return _total(step, step.take_unrounded(out, "dense_out", "out"), meanwhile)


def moe_ffn(step: Step, section: Scalar, moe_layer: Scalar, x: jax.Array, meanwhile: Work) -> jax.Array:
    """Routed experts plus shared experts; `moe_layer` counts MoE layers."""
    if step.plan.config.latent_experts:
        return _latent_moe(step, section, moe_layer, x, meanwhile)
    return _full_width_moe(step, section, moe_layer, x, meanwhile)


def _latent_moe(step: Step, section: Scalar, moe_layer: Scalar, x: jax.Array, meanwhile: Work) -> jax.Array:
    """Experts work on latents, and every core has them whole, and the shared experts' inner vector too: so each makes
    its own piece of the output, complete. What the shared experts do fills the waits of the routed ones."""
    plan, config = step.plan, step.plan.config
    latent = config.routed_expert_hidden_size
    routing = step.linear(section, x, "router")
    logits, down = _router_logits(step, routing), step.take(routing, "router", "latent")
    step.cores.start_gather([Piece(logits, config.num_experts, exact=True), Piece(down, latent)])
    inner = _gated(step, section, x, "shared") if config.num_shared_experts else None
    logits, down = step.cores.finish_gather()

    if inner is not None:
        step.cores.start_gather([Piece(inner, config.shared_intermediate_size)])
    counts = _route(step, moe_layer, logits, down[:, :latent])
    routed = _run_experts(step, moe_layer, counts, logits)
    hidden = step.cores.finish_gather()[0] if inner is not None else None
    step.cores.start_total(routed)
    shared = None if hidden is None else _shared_out(step, section, hidden[:, : config.shared_intermediate_size])
    total = step.cores.finish_total()
    normed = step.norm(total, "latent_norm") if config.latent_moe_use_norm else total
    own = step.take(step.linear(section, normed, "routed_up"), "routed_up", "out")
    if shared is not None:
        own = rounded(plan, own + rounded(plan, shared))
    step.cores.start_gather([Piece(own, config.hidden_size)])
    meanwhile()
    (whole,) = step.cores.finish_gather()
    return whole[:, : config.hidden_size]


def _full_width_moe(step: Step, section: Scalar, moe_layer: Scalar, x: jax.Array, meanwhile: Work) -> jax.Array:
    """Routed and shared experts both give partial sums, which travel together."""
    plan, config = step.plan, step.plan.config
    logits = _router_logits(step, step.linear(section, x, "router"))
    step.cores.start_gather([Piece(logits, config.num_experts, exact=True)])
    hidden = _gated(step, section, x, "shared") if config.num_shared_experts else None
    (logits,) = step.cores.finish_gather()

    counts = _route(step, moe_layer, logits, x)
    shared = None if hidden is None else _shared_out(step, section, hidden)
    routed = _run_experts(step, moe_layer, counts, logits)
    if shared is None:
        return _total(step, routed, meanwhile)
    both = _total(step, jnp.concatenate([routed, shared], axis=1), meanwhile)
    return rounded(plan, both[:, : config.hidden_size] + both[:, config.hidden_size :])


def _router_logits(step: Step, out: Ref) -> jax.Array:
    """The last column of the router's product, with its padding, unrounded.  # [rows, own experts] f32"""
    matrix = step.plan.matrices["router"]
    start = matrix.offset("router")
    return step.rows_of(out, start, matrix.n - start)


def _route(step: Step, moe_layer: Scalar, logits: jax.Array, expert_input: jax.Array) -> Counts:
    """Chooses experts and starts to fetch them; returns how many this core has to do with."""
    plan, refs = step.plan, step.refs
    assert step.experts is not None
    bias = step.vector("router_bias", plan.config.num_experts)
    refs.expert_weights[...] = route.expert_weights(plan, logits, bias, step.active())
    refs.expert_input[...] = rounded(plan, expert_input)
    first = step.cores.first_expert
    return route.start_experts(plan, refs.expert_weights[...], moe_layer, first, step.experts, _visits(step))


def _run_experts(step: Step, moe_layer: Scalar, counts: Counts, logits: jax.Array) -> jax.Array:
    """What this core's parts of the chosen experts give.  # [rows, expert width in and out] f32"""
    plan, refs, experts = step.plan, step.refs, step.experts
    assert experts is not None
    experts_phase.run_experts(
        plan, counts, moe_layer, refs.expert_weights, refs.expert_input, experts, _visits(step), refs.expert_sum
    )
    bias = step.vector("router_bias", plan.config.num_experts)
    return refs.expert_sum[:, : plan.config.routed_expert_hidden_size] + route.poison(plan, logits, bias)


def _visits(step: Step) -> Visits:
    return Visits(step.plan, step.refs.chosen_experts, step.refs.expert_visits)


def _shared_out(step: Step, section: Scalar, hidden: jax.Array) -> jax.Array:
    """Down projection of the shared experts.  # -> [rows, width] f32"""
    return step.take_unrounded(step.linear(section, hidden, "shared_out"), "shared_out", "out")


def _gated(step: Step, section: Scalar, x: jax.Array, name: str) -> jax.Array:
    """Gate and up projections of a feed-forward network and its activation.  # -> [rows, own width] f32"""
    out = step.linear(section, x, f"{name}_in")
    gate, up = step.take(out, f"{name}_in", "gate"), step.take(out, f"{name}_in", "up")
    return ffn.activation(step.plan, gate, up)
