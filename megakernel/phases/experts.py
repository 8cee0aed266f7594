"""Routed experts: each distinct one is fetched once and visits the tiles of rows that chose it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from megakernel.bank import down_scales, mxfp4_rows
from megakernel.control import when
from megakernel.phases.ffn import activation
from megakernel.phases.linear import dot, rounded
from megakernel.phases.mxfp4 import mxfp4_dot
from megakernel.phases.sums import addend
from megakernel.phases.visits import Counts, Visits
from megakernel.plan import Plan
from megakernel.stream import Experts, Ref, Scalar


def run_experts(
    plan: Plan,
    counts: Counts,
    moe_layer: Scalar,
    weights: Ref,
    x: Ref,
    experts: Experts,
    visits: Visits,
    total: Ref,
) -> None:
    """Sums the chosen experts' outputs, in ascending order of expert, so that a row's sum ignores its neighbours.

    Args:
      weights: [rows, lanes] f32, zero where a row did not choose the expert.
      x: [rows, latent] f32, rounded to the activation format.
      total: [rows, latent lanes] f32, receives the weighted sum in the rows that experts were multiplied with, the
        rest zero.
    """
    total[...] = jnp.zeros(total.shape, jnp.float32)
    layer = _Layer(plan, counts, moe_layer, weights, x, experts, visits, total)
    if plan.experts_held > 1:
        layer.run_overlapped()
    else:
        layer.run_one_by_one()


@dataclasses.dataclass(frozen=True)
class _Layer:
    """What `run_experts` is given."""

    plan: Plan
    counts: Counts
    moe_layer: Scalar
    weights: Ref
    x: Ref
    experts: Experts
    visits: Visits
    total: Ref

    def run_one_by_one(self) -> None:
        def turn(visit: Scalar, _: None) -> None:
            self.meet(visit)
            self.add(visit, self.hidden(visit))

        lax.fori_loop(0, self.counts.visits, turn, None)

    def run_overlapped(self) -> None:
        """A turn has the second product of one visit and the first of the next: neither waits for the matrix unit."""

        def turn(visit: Scalar, hidden: jax.Array) -> jax.Array:
            self.meet(visit)
            self.add(visit - 1, hidden)
            return self.hidden(visit)

        @when(self.counts.visits > 0)
        def run() -> None:
            self.meet(jnp.int32(0))
            hidden = lax.fori_loop(1, self.counts.visits, turn, self.hidden(jnp.int32(0)))
            self.add(self.counts.visits - 1, hidden)

    def meet(self, visit: Scalar) -> None:
        """Waits for the expert of a visit, once. The expert before the one that may still be read has been read: its
        slot takes the one that comes a whole set of slots later, if there is one."""
        order = self.visits.order(visit)

        def meet_expert() -> None:
            if self.plan.max_distinct_experts > self.plan.expert_slots:
                self.start_ahead(order)
            self.experts.wait(order, self.moe_layer, self.visits.experts[order])

        if self.plan.expert_tiles == 1:
            meet_expert()
        else:
            when(self.visits.is_first(visit))(meet_expert)

    def start_ahead(self, order: Scalar) -> None:
        read = order - self.plan.experts_held
        ahead = read + self.plan.expert_slots

        @when((read >= 0) & (ahead < self.counts.experts))
        def start() -> None:
            self.experts.start(ahead, self.moe_layer, self.visits.experts[ahead])

    def hidden(self, visit: Scalar) -> jax.Array:
        """# [tile rows, inner] f32"""
        gate_up, _ = self.experts.slot(self.visits.order(visit))
        return expert_hidden(self.plan, self.x[self.visits.rows(visit)], gate_up[...])

    def add(self, visit: Scalar, hidden: jax.Array) -> None:
        """Adds the output of a visit, times the rows' weights, to their sums."""
        gate_up, down = self.experts.slot(self.visits.order(visit))
        y = expert_output(self.plan, hidden, gate_up[...], down[...])  # [tile rows, latent lanes]
        rows, expert = self.visits.rows(visit), self.visits.expert(visit)
        weights = self.weights[rows]
        lane = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
        share = jnp.sum(jnp.where(lane == expert, weights, 0.0), axis=-1, keepdims=True)  # [tile rows, 1]
        self.total[rows] += jnp.where(share > 0.0, addend(share, y), 0.0)


def expert_hidden(plan: Plan, x: jax.Array, gate_up: jax.Array) -> jax.Array:
    """`act(W1 x, W3 x)` of one expert.  # x [tile rows, latent] f32 -> [tile rows, inner] f32, rounded both"""
    inner = plan.split.expert_width
    if plan.config.expert_format == "bf16":
        both = dot(plan, x.astype(plan.activations), gate_up)
    else:
        code_rows, scale_rows = mxfp4_rows(plan.config.routed_expert_hidden_size)
        both = mxfp4_dot(plan, x, gate_up[:code_rows], gate_up[code_rows : code_rows + scale_rows])
    both = rounded(plan, both)  # [tile rows, gate and up and padding]
    return activation(plan, both[:, :inner], both[:, inner : 2 * inner])


def expert_output(plan: Plan, hidden: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """`W2 hidden` of one expert, whose scales lie below gate and up.

    # hidden [tile rows, inner] f32 -> [tile rows, latent lanes] f32, rounded both
    """
    if plan.config.expert_format == "bf16":
        return rounded(plan, dot(plan, hidden.astype(plan.activations), down))
    scales = jnp.concatenate([gate_up[rows, lanes] for rows, lanes in down_scales(plan.split)], axis=1)
    code_rows, _ = mxfp4_rows(plan.split.expert_width)
    return rounded(plan, mxfp4_dot(plan, hidden, down[:code_rows], scales))
