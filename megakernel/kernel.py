"""One launch: rounds x layers x phases, and the `pallas_call` around them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from megakernel import layers, memory, rounds, shared_rows, stream
from megakernel.control import when, when_at
from megakernel.cores import Cores, ManyCores, OneCore, Piece
from megakernel.layers import Step, Work
from megakernel.limits import POSITION_GROUP
from megakernel.messages import hops_of_sums
from megakernel.phases.linear import widened
from megakernel.phases.mix import mix_prefix, mix_snapshots, normalise_prefix
from megakernel.plan import Plan
from megakernel.stream import Scalar

Arrays = dict[str, jax.Array]


def launch(
    plan: Plan, weights: Mapping[str, jax.Array], caches: Arrays, request: Arrays, interpret: Any
) -> tuple[Arrays, Arrays]:
    """Runs one launch: every step until each sequence has stopped or `plan.launch_steps` have passed.

    Args:
      weights, caches, request: arrays by name, see `megakernel.memory`; caches are updated in place.
      interpret: False on a TPU, True for the plain interpreter, `pltpu.InterpretParams` for the simulator.
    Returns:
      (results by name, caches)
    """
    lockstep = interpret is True  # the plain interpreter runs all cores as one program
    inputs = {"layer_table": layer_table(plan), **request, **weights}
    results, cached = memory.result_buffers(plan), memory.cache_buffers(plan)
    scratch = memory.vmem_buffers(plan) | memory.smem_scratch(plan)
    semaphores = memory.semaphore_counts(plan)
    names = (*inputs, *(f"{name}_before" for name in cached), *results, *cached, *scratch, *semaphores)
    outputs = pl.pallas_call(
        lambda *refs: decode_rounds(plan, SimpleNamespace(**dict(zip(names, refs, strict=True))), lockstep),
        name="decode_launch",
        in_specs=[_space(name, request) for name in (*inputs, *cached)],
        out_specs=[_space(name, request) for name in (*results, *cached)],
        out_shape=[_shape(buffer) for buffer in (results | cached).values()],
        scratch_shapes=[
            *(pltpu.VMEM(b.shape, jnp.dtype(b.dtype)) for b in memory.vmem_buffers(plan).values()),
            *(pltpu.SMEM(b.shape, jnp.dtype(b.dtype)) for b in memory.smem_scratch(plan).values()),
            *(pltpu.SemaphoreType.DMA((count,)) for count in semaphores.values()),
        ],
        input_output_aliases={len(inputs) + i: len(results) + i for i in range(len(cached))},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=plan.target.vmem_bytes,
            collective_id=None if lockstep or plan.split.cores == 1 else 0,
        ),
        interpret=interpret,
    )(*inputs.values(), *(caches[name] for name in cached))
    named = dict(zip((*results, *cached), outputs, strict=True))
    return {name: named[name] for name in results}, {name: named[name] for name in cached}


def decode_rounds(plan: Plan, refs: SimpleNamespace, lockstep: bool) -> None:
    """The kernel: the whole generation."""
    step = _open_streams(plan, refs)
    if isinstance(step.cores, ManyCores):
        for number, exchange in enumerate((*step.cores.exchanges, shared_rows.logits_exchange(step))):
            exchange.begin(barrier=number == 0 and not lockstep)
    step.tape.prime()
    step.vectors.prime()
    alive = rounds.begin(step)
    _clear_padding(step)
    if plan.drafter:
        plan.drafter.begin(step)

    def more(carry: tuple[Scalar, Scalar]) -> Scalar:
        number, alive = carry
        return (alive > 0) & (number < plan.launch_steps)

    def one_round(carry: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        number, _ = carry
        step.number = number
        rounds.fill_window(step)
        embed(step)
        every_layer = functools.partial(layer, step)
        bad_layer = lax.fori_loop(0, plan.config.num_hidden_layers, every_layer, rounds.ALL_FINITE)
        lm_head(step)
        alive = rounds.accept(step, bad_layer)
        if plan.drafter:
            plan.drafter.propose(step, number * plan.tape_blocks + plan.draft_start)
        return number + 1, alive

    number, _ = lax.while_loop(more, one_round, (jnp.int32(0), alive))
    step.number = number

    @when(number > 0)
    def settle_all() -> None:
        settle(step)

    _drain(step)


def embed(step: Step) -> None:
    """Prefix = embedding row of each live row's token; padding rows are zero."""
    plan, refs = step.plan, step.refs
    tokens = [refs.window[row] for row in range(plan.live_rows)]
    stream.EmbeddingRows(plan, refs.embedding, refs.embedding_rows, refs.embedding_done).fetch(tokens)
    at = lax.broadcasted_iota(jnp.int32, (POSITION_GROUP, 1), 0)
    rows = []
    for row, token in enumerate(tokens):
        group = widened(refs.embedding_rows[row])  # [POSITION_GROUP, own hidden]
        rows.append(jnp.sum(jnp.where(at == lax.rem(token, POSITION_GROUP), group, 0.0), axis=0, keepdims=True))
    hidden = plan.config.hidden_size
    step.cores.start_gather([Piece(layers.whole_tiles(rows, plan.rows), hidden)])
    (prefix,) = step.cores.finish_gather()
    refs.stream[plan.config.num_snapshots] = prefix[:, :hidden]
    normalise_prefix(plan, refs.stream, refs.mixture)


def layer(step: Step, number: Scalar, bad_layer: Scalar) -> Scalar:
    """Layer `number`: norm, attention, residual, mix; norm, FFN, residual, mix for who reads next."""
    plan, refs, config = step.plan, step.refs, step.plan.config
    table = refs.layer_table
    attention_block, ffn_block, kind_index, moe_index, snapshots = (table[number, i] for i in range(5))
    is_mla, is_moe, writes = (table[number, i] > 0 for i in (5, 6, 7))
    step_start, prefix = step.number * plan.tape_blocks, config.num_snapshots
    step.table = step.number * (config.num_hidden_layers + 1) + number
    step.vectors.advance(step.table)

    def add(sublayer: Callable[[Work], jax.Array], mix_name: str) -> None:
        """Adds what a sublayer gives to the prefix, and mixes the prefix with the snapshots for the next sublayer."""

        def meanwhile() -> None:
            start_mixture(step, snapshots + writes.astype(jnp.int32), mix_name)

        refs.stream[prefix] = layers.rounded(plan, refs.stream[prefix] + sublayer(meanwhile))
        finish_mixture(step, mix_name)

    x = read_mixture(step, "attn_norm")

    @when(writes)
    def snapshot() -> None:
        refs.stream[snapshots] = refs.stream[prefix]
        refs.stream[prefix] = jnp.zeros((plan.rows, config.hidden_size), jnp.float32)

    if config.kda_layers:

        @when_at(jnp.logical_not(is_mla), step_start + attention_block)
        def kda(block: Scalar) -> None:
            add(lambda meanwhile: layers.kda_attention(step, block, kind_index, x, meanwhile), "ffn_mix")

    if config.mla_layers:

        @when_at(is_mla, step_start + attention_block)
        def mla(block: Scalar) -> None:
            add(lambda meanwhile: layers.mla_attention(step, block, kind_index, x, meanwhile), "ffn_mix")

    x = read_mixture(step, "ffn_norm")

    if plan.moe_layers:

        @when_at(is_moe, step_start + ffn_block)
        def moe(block: Scalar) -> None:
            add(lambda meanwhile: layers.moe_ffn(step, block, moe_index, x, meanwhile), "next_mix")

    if plan.moe_layers < config.num_hidden_layers:

        @when_at(jnp.logical_not(is_moe), step_start + ffn_block)
        def dense(block: Scalar) -> None:
            add(lambda meanwhile: layers.dense_ffn(step, block, x, meanwhile), "next_mix")

    if plan.drafter and plan.drafter.taps:
        _keep_tap(step, number)
    return jnp.minimum(bad_layer, jnp.where(_finite(step, refs.stream[prefix]), rounds.ALL_FINITE, number))


def start_mixture(step: Step, snapshots: Scalar, name: str) -> None:
    """What the snapshots contribute to the mixture that is read next."""
    plan, refs = step.plan, step.refs
    if plan.config.attn_res_block_size:
        weight = step.vector(name, plan.config.hidden_size)
        mix_snapshots(plan, refs.stream, snapshots, weight, refs.mixture, refs.mixture_shares)


def finish_mixture(step: Step, name: str) -> None:
    """Leaves what the next sublayer reads in `mixture`; without attention residuals, the prefix."""
    plan, refs = step.plan, step.refs
    if plan.config.attn_res_block_size:
        weight = step.vector(name, plan.config.hidden_size)
        mix_prefix(plan, refs.stream, weight, refs.mixture, refs.mixture_shares)
    else:
        normalise_prefix(plan, refs.stream, refs.mixture)


def read_mixture(step: Step, norm: str) -> jax.Array:
    """What a sublayer, or the head, reads.  # [rows, hidden] f32"""
    return layers.rounded(step.plan, step.refs.mixture[...] * step.vector(norm, step.plan.config.hidden_size))


def _keep_tap(step: Step, number: Scalar) -> None:
    """Keeps the prefix after `number + 1` completed layers if the drafter looks at it."""
    plan, refs = step.plan, step.refs
    assert plan.drafter is not None
    tap = refs.layer_table[number, 8]

    @when(tap >= 0)
    def keep() -> None:
        refs.taps[jnp.maximum(tap, 0)] = refs.stream[plan.config.num_snapshots]


def lm_head(step: Step) -> None:
    """Final norm and the logits of the whole vocabulary, in `out_head`."""
    plan, refs, config = step.plan, step.refs, step.plan.config
    step.table = step.number * (config.num_hidden_layers + 1) + config.num_hidden_layers
    step.vectors.advance(step.table)
    first_block = step.number * plan.tape_blocks + plan.layer_starts[-1][0]
    logits = step.linear(first_block, read_mixture(step, "final_norm"), "head")
    if plan.keep_logits:
        stream.Logits(refs.step_logits, logits, refs.logits_done).write(step.number)


def settle(step: Step) -> None:
    """Brings the rows accepted in the last round into the states, so that a launch leaves nothing pending."""
    if step.pending is None:
        return
    windows = [window for window in (step.state, step.tails, step.pending) if window is not None]

    def one(layer: Scalar, _: None) -> None:
        for window in windows:
            window.start_read(layer, jnp.bool_(True))
        for window in windows:
            window.wait_read(layer)
        layers.commit_pending(step)
        for window in windows:
            window.start_write(layer)

    lax.fori_loop(0, len(step.plan.config.kda_layers), one, None)


def layer_table(plan: Plan) -> jax.Array:
    """Static numbers of each layer, as the rolled layer loop reads them.  # [layers, 9] i32"""
    taps = plan.drafter.taps if plan.drafter else ()
    config, rows, seen = plan.config, [], {"kda": 0, "mla": 0, "moe": 0, "snapshots": 0}
    for number in range(config.num_hidden_layers):
        kind, is_moe, writes = config.layer_kind(number), config.is_moe(number), config.writes_snapshot(number)
        starts = plan.layer_starts[number]
        tap = taps.index(number + 1) if number + 1 in taps else -1
        rows.append((*starts, seen[kind], seen["moe"], seen["snapshots"], kind == "mla", is_moe, writes, tap))
        seen[kind] += 1
        seen["moe"] += is_moe
        seen["snapshots"] += writes
    return jnp.array(rows, jnp.int32)


def _open_streams(plan: Plan, refs: SimpleNamespace) -> Step:
    has_kda, has_mla = bool(plan.config.kda_layers), bool(plan.config.mla_layers)
    cores = _open_cores(plan, refs)
    return Step(
        plan=plan,
        refs=refs,
        tape=stream.Tape(plan, refs.tape, refs.ring, refs.ring_done),
        vectors=stream.Vectors(
            plan,
            {name: getattr(refs, f"{name}_tables") for name in plan.vector_tables},
            {name: getattr(refs, f"{name}_vectors") for name in plan.vector_tables},
            {name: getattr(refs, f"{name}_vectors_done") for name in plan.vector_tables},
        ),
        state=stream.Window(refs.states, refs.state, refs.state_in, refs.state_out) if has_kda else None,
        tails=stream.Window(refs.conv_tails, refs.tails, refs.tails_in, refs.tails_out) if has_kda else None,
        pending=_pending_window(refs) if has_kda and plan.tokens > 1 else None,
        groups=stream.LatentGroups(plan, refs.latents, refs.latent_group, refs.group_in, refs.group_out)
        if has_mla
        else None,
        pages=stream.LatentPages(plan, refs.latents, refs.page, refs.page_done) if has_mla else None,
        experts=stream.Experts(
            plan,
            (refs.bank_in, refs.bank_out),
            (refs.expert_in, refs.expert_out),
            (refs.expert_in_done, refs.expert_out_done),
            cores.first_expert,
        )
        if plan.moe_layers
        else None,
        cores=cores,
    )


def _open_cores(plan: Plan, refs: SimpleNamespace) -> Cores:
    if plan.split.cores == 1:
        return OneCore(plan)
    totals = {hops: shared_rows.exchange_of(plan, refs, memory.TOTALS[hops]) for hops in hops_of_sums(plan)}
    return ManyCores(plan, shared_rows.exchange_of(plan, refs, "pieces"), totals)


def _pending_window(refs: SimpleNamespace) -> stream.Window:
    """Rows of the last round, read for replay; this round's are written from where the phases put them."""
    kept = refs.kda_rows.at[: memory.KDA_KEPT_PLANES]
    return stream.Window(refs.pending_rows, refs.pending, refs.pending_in, refs.pending_out, write_from=kept)


def _clear_padding(step: Step) -> None:
    """What is read before it is written, or never written, must still be numbers."""
    refs = step.refs
    refs.stream[...] = jnp.zeros(refs.stream.shape, jnp.float32)
    if step.plan.config.kda_layers:
        refs.kda_read[...] = jnp.zeros(refs.kda_read.shape, jnp.float32)
    if step.plan.config.mla_layers:
        refs.contexts[...] = jnp.zeros(refs.contexts.shape, jnp.float32)


def _drain(step: Step) -> None:
    """Waits for every copy still in flight, so that a launch ends with quiet DMA engines."""
    step.tape.drain(step.number * step.plan.tape_blocks)
    step.vectors.drain(step.number * step.vectors.tables)

    @when(step.number > 0)
    def drain_windows() -> None:
        for window in (step.state, step.tails, step.pending, step.groups):
            if window is not None:
                window.drain()


def _finite(step: Step, x: jax.Array) -> Scalar:
    """Whether every active row of `x` is finite.  # x [rows, n] f32"""
    bad = jnp.where((jnp.abs(x) < jnp.inf) | jnp.logical_not(step.active()), 0.0, 1.0)
    return jnp.sum(bad) == 0.0


def _space(name: str, vmem_inputs: Container[str]) -> pl.BlockSpec:
    if name in ("layer_table", *memory.SMEM_REQUEST, *memory.SMEM_RESULT):
        return pl.BlockSpec(memory_space=pltpu.SMEM)
    if name in vmem_inputs and name not in memory.HBM_REQUEST:
        return pl.BlockSpec(memory_space=pltpu.VMEM)
    return pl.BlockSpec(memory_space=pl.ANY)


def _shape(buffer: memory.Buffer) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(buffer.shape, jnp.dtype(buffer.dtype))
