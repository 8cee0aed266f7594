"""One launch: rounds x layers x phases, and the `pallas_call` around them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from megakernel import layers, memory, stream
from megakernel.control import when, when_at
from megakernel.layers import Step
from megakernel.phases import sample
from megakernel.phases.mix import mix
from megakernel.plan import POSITION_GROUP, Plan
from megakernel.stream import Scalar

TOKEN, POSITION, ACTIVE = range(3)
"""Rows of the `current` buffer."""
START, GIVEN, WANTED = range(3)
"""Lanes of the `request` buffer."""
STEPS, NEW, REASON, BAD_LAYER = range(4)
"""Lanes of the `status` buffer."""
RUNNING, STOPPED, FULL, BROKEN = range(4)
"""Values of `status[REASON]`: still running, stop token, enough tokens, not finite."""
_ALL_FINITE = 1 << 20

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
    inputs = {"layer_table": layer_table(plan), **request, **weights}
    results, cached = memory.result_buffers(plan), memory.cache_buffers(plan)
    scratch = memory.vmem_buffers(plan) | memory.smem_scratch(plan)
    semaphores = memory.semaphore_counts(plan)
    names = (*inputs, *(f"{name}_before" for name in cached), *results, *cached, *scratch, *semaphores)
    outputs = pl.pallas_call(
        lambda *refs: decode_steps(plan, SimpleNamespace(**dict(zip(names, refs, strict=True)))),
        name="decode_launch",
        in_specs=[_space(name) for name in (*inputs, *cached)],
        out_specs=[_space(name) for name in (*results, *cached)],
        out_shape=[_shape(buffer) for buffer in (results | cached).values()],
        scratch_shapes=[
            *(pltpu.VMEM(b.shape, jnp.dtype(b.dtype)) for b in memory.vmem_buffers(plan).values()),
            *(pltpu.SMEM(b.shape, jnp.dtype(b.dtype)) for b in memory.smem_scratch(plan).values()),
            *(pltpu.SemaphoreType.DMA((count,)) for count in semaphores.values()),
        ],
        input_output_aliases={len(inputs) + i: len(results) + i for i in range(len(cached))},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=plan.target.vmem_bytes),
        interpret=interpret,
    )(*inputs.values(), *(caches[name] for name in cached))
    named = dict(zip((*results, *cached), outputs, strict=True))
    return {name: named[name] for name in results}, {name: named[name] for name in cached}


def decode_steps(plan: Plan, refs: SimpleNamespace) -> None:
    """The kernel: the whole generation."""
    step = _open_streams(plan, refs)
    step.tape.prime()
    step.vectors.prime()
    alive = _begin(plan, refs)

    def more(carry: tuple[Scalar, Scalar]) -> Scalar:
        number, alive = carry
        return (alive > 0) & (number < plan.launch_steps)

    def one_step(carry: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        number, _ = carry
        step.number = number
        embed(step)
        bad_layer = lax.fori_loop(0, plan.config.num_hidden_layers, functools.partial(layer, step), _ALL_FINITE)
        bad_layer = lm_head(step, bad_layer)
        return number + 1, next_tokens(step, bad_layer)

    steps, _ = lax.while_loop(more, one_step, (jnp.int32(0), alive))
    _drain(step, steps)


def embed(step: Step) -> None:
    """Prefix = embedding row of each sequence's token; rows past the sequences are zero."""
    plan, refs = step.plan, step.refs
    tokens = [step.current("token", sequence) for sequence in range(plan.sequences)]
    stream.EmbeddingRows(plan, refs.embedding, refs.embedding_rows, refs.embedding_done).fetch(tokens)
    refs.prefix[...] = jnp.zeros(refs.prefix.shape, jnp.float32)
    for sequence, token in enumerate(tokens):
        at = lax.broadcasted_iota(jnp.int32, (POSITION_GROUP, 1), 0)
        group = refs.embedding_rows[sequence].astype(jnp.float32)  # [POSITION_GROUP, hidden]
        row = jnp.where(at == lax.rem(token, POSITION_GROUP), group, 0.0)
        refs.prefix[sequence : sequence + 1] = jnp.sum(row, axis=0, keepdims=True)


def layer(step: Step, number: Scalar, bad_layer: Scalar) -> Scalar:
    """Layer `number`: mix, norm, attention, residual; mix, norm, FFN, residual."""
    plan, refs, config = step.plan, step.refs, step.plan.config
    table = refs.layer_table
    attention_block, ffn_block, kind_index, moe_index, snapshots = (table[number, i] for i in range(5))
    is_mla, is_moe, writes = (table[number, i] > 0 for i in (5, 6, 7))
    step_start = step.number * plan.tape_blocks
    step.table = step.number * (config.num_hidden_layers + 1) + number
    step.vectors.advance(step.table)

    def read(count: Scalar, mix_name: str, norm_name: str) -> jax.Array:
        mixture = mix(plan, refs.snapshots, count, refs.prefix[...], step.vector(mix_name, config.hidden_size))
        return step.norm(mixture, norm_name)  # [rows, hidden] f32

    def add_to_prefix(value: jax.Array) -> None:
        refs.prefix[...] = layers.rounded(plan, refs.prefix[...] + value)

    x = read(snapshots, "attn_mix", "attn_norm")

    @when(writes)
    def snapshot() -> None:
        refs.snapshots[snapshots] = refs.prefix[...]
        refs.prefix[...] = jnp.zeros(refs.prefix.shape, jnp.float32)

    if config.kda_layers:

        @when_at(jnp.logical_not(is_mla), step_start + attention_block)
        def kda(block: Scalar) -> None:
            add_to_prefix(layers.kda_attention(step, block, kind_index, x))

    if config.mla_layers:

        @when_at(is_mla, step_start + attention_block)
        def mla(block: Scalar) -> None:
            add_to_prefix(layers.mla_attention(step, block, kind_index, x))

    x = read(snapshots + writes.astype(jnp.int32), "ffn_mix", "ffn_norm")

    if plan.moe_layers:

        @when_at(is_moe, step_start + ffn_block)
        def moe(block: Scalar) -> None:
            add_to_prefix(layers.moe_ffn(step, block, moe_index, x))

    if plan.moe_layers < config.num_hidden_layers:

        @when_at(jnp.logical_not(is_moe), step_start + ffn_block)
        def dense(block: Scalar) -> None:
            add_to_prefix(layers.dense_ffn(step, block, x))

    return jnp.minimum(bad_layer, jnp.where(_finite(step, refs.prefix[...]), _ALL_FINITE, number))


def lm_head(step: Step, bad_layer: Scalar) -> Scalar:
    """Output mix, final norm and the logits of the whole vocabulary, in `out_head`."""
    plan, refs, config = step.plan, step.refs, step.plan.config
    step.table = step.number * (config.num_hidden_layers + 1) + config.num_hidden_layers
    step.vectors.advance(step.table)
    snapshots = jnp.int32(config.num_snapshots)
    mixture = mix(plan, refs.snapshots, snapshots, refs.prefix[...], step.vector("final_mix", config.hidden_size))
    first_block = step.number * plan.tape_blocks + plan.layer_starts[-1][0]
    logits, _ = step.linear(first_block, step.norm(mixture, "final_norm"), "head")
    if plan.keep_logits:
        stream.Logits(refs.step_logits, logits, refs.logits_done).write(step.number)
    finite = _finite(step, logits[:, : config.vocab_size])
    return jnp.minimum(bad_layer, jnp.where(finite, _ALL_FINITE, config.num_hidden_layers))


def next_tokens(step: Step, bad_layer: Scalar) -> Scalar:
    """Samples, records, and decides which sequences go on; returns how many do."""
    plan, refs = step.plan, step.refs
    fed = step.number + 1
    position = step.column("position", jnp.int32(0)) + 1
    sampled = sample.choose_tokens(
        plan, refs.out_head, refs.scaled_logits, refs.sampling_floats[...], refs.sampling_ints[...], position
    )
    tokens = sampled
    row = lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0)
    for sequence in range(plan.sequences):
        given = refs.tokens[sequence, jnp.minimum(fed, plan.launch_steps - 1)]
        tokens = jnp.where((row == sequence) & (fed < refs.request[sequence, GIVEN]), given, tokens)
    logprobs = sample.log_probability(plan, refs.out_head, tokens)

    def commit(sequence: Scalar, alive: Scalar) -> Scalar:
        token = jnp.max(jnp.where(row == sequence, tokens, -1))
        logprob = jnp.max(jnp.where(row == sequence, logprobs, -jnp.inf))
        return alive + _commit(step, sequence, token, logprob, bad_layer)

    return lax.fori_loop(0, plan.sequences, commit, jnp.int32(0))


def _commit(step: Step, sequence: Scalar, token: Scalar, logprob: Scalar, bad_layer: Scalar) -> Scalar:
    """Takes one sequence on by one token; returns 1 while it goes on."""
    refs, fed = step.refs, step.number + 1
    active = refs.current[ACTIVE, sequence]
    refs.new_tokens[sequence, step.number] = token
    refs.logprobs[sequence, step.number] = logprob
    is_new = (active > 0) & (fed >= refs.request[sequence, GIVEN])
    new = refs.status[sequence, NEW] + is_new.astype(jnp.int32)

    stops = jnp.bool_(False)
    for i in range(memory.MAX_STOP_TOKENS):
        stops |= token == refs.stop_tokens[i]
    full = new >= refs.request[sequence, WANTED]
    reason = jnp.where(is_new & full, FULL, RUNNING)
    reason = jnp.where(is_new & stops, STOPPED, reason)
    reason = jnp.where((active > 0) & (bad_layer < _ALL_FINITE), BROKEN, reason)
    goes_on = active * (reason == RUNNING).astype(jnp.int32)

    refs.current[TOKEN, sequence] = token
    refs.current[POSITION, sequence] = refs.current[POSITION, sequence] + active
    refs.current[ACTIVE, sequence] = goes_on
    refs.status[sequence, STEPS] = refs.status[sequence, STEPS] + active
    refs.status[sequence, NEW] = new
    refs.status[sequence, REASON] = jnp.where(active > 0, reason, refs.status[sequence, REASON])
    refs.status[sequence, BAD_LAYER] = jnp.where(reason == BROKEN, bad_layer, refs.status[sequence, BAD_LAYER])
    return goes_on


def layer_table(plan: Plan) -> jax.Array:
    """Static numbers of each layer, as the rolled layer loop reads them.  # [layers, 8] i32"""
    config, rows, seen = plan.config, [], {"kda": 0, "mla": 0, "moe": 0, "snapshots": 0}
    for number in range(config.num_hidden_layers):
        kind, is_moe, writes = config.layer_kind(number), config.is_moe(number), config.writes_snapshot(number)
        starts = plan.layer_starts[number]
        rows.append((*starts, seen[kind], seen["moe"], seen["snapshots"], kind == "mla", is_moe, writes))
        seen[kind] += 1
        seen["moe"] += is_moe
        seen["snapshots"] += writes
    return jnp.array(rows, jnp.int32)


def _open_streams(plan: Plan, refs: SimpleNamespace) -> Step:
    has_kda, has_mla = bool(plan.config.kda_layers), bool(plan.config.mla_layers)
    return Step(
        plan=plan,
        refs=refs,
        tape=stream.Tape(plan, refs.tape, refs.ring, refs.ring_done),
        vectors=stream.Vectors(plan, refs.vector_tables, refs.vectors, refs.vectors_done),
        state=stream.Window(refs.states, refs.state, refs.state_in, refs.state_out) if has_kda else None,
        tails=stream.Window(refs.conv_tails, refs.tails, refs.tails_in, refs.tails_out) if has_kda else None,
        groups=stream.LatentGroups(plan, refs.latents, refs.latent_group, refs.group_in, refs.group_out)
        if has_mla
        else None,
        pages=stream.LatentPages(plan, refs.latents, refs.page, refs.page_done) if has_mla else None,
        experts=stream.Experts(
            plan,
            (refs.bank_in, refs.bank_out),
            (refs.expert_in, refs.expert_out),
            (refs.expert_in_done, refs.expert_out_done),
        )
        if plan.moe_layers
        else None,
    )


def _begin(plan: Plan, refs: SimpleNamespace) -> Scalar:
    """First tokens and an empty status; returns how many sequences there are."""
    alive = jnp.int32(0)
    for sequence in range(plan.sequences):
        present = (refs.request[sequence, GIVEN] > 0).astype(jnp.int32)
        refs.current[TOKEN, sequence] = refs.tokens[sequence, 0]
        refs.current[POSITION, sequence] = refs.request[sequence, START]
        refs.current[ACTIVE, sequence] = present
        for lane, value in ((STEPS, 0), (NEW, 0), (REASON, RUNNING), (BAD_LAYER, -1)):
            refs.status[sequence, lane] = jnp.int32(value)
        alive += present
    if plan.config.kda_layers:
        refs.kda_read[...] = jnp.zeros(refs.kda_read.shape, jnp.float32)
    if plan.config.mla_layers:
        refs.contexts[...] = jnp.zeros(refs.contexts.shape, jnp.float32)
    return alive


def _drain(step: Step, steps: Scalar) -> None:
    """Waits for every copy still in flight, so that a launch ends with quiet DMA engines."""
    step.tape.drain(steps * step.plan.tape_blocks)
    step.vectors.drain(steps * step.vectors.tables)

    @when(steps > 0)
    def drain_windows() -> None:
        for window in (step.state, step.tails, step.groups):
            if window is not None:
                window.drain()


def _finite(step: Step, x: jax.Array) -> Scalar:
    """Whether every active row of `x` is finite.  # x [rows, n] f32"""
    bad = jnp.where((jnp.abs(x) < jnp.inf) | jnp.logical_not(step.active()), 0.0, 1.0)
    return jnp.sum(bad) == 0.0


def _space(name: str) -> pl.BlockSpec:
    if name in ("layer_table", *memory.SMEM_REQUEST, *memory.SMEM_RESULT):
        return pl.BlockSpec(memory_space=pltpu.SMEM)
    if name in ("sampling_floats", "sampling_ints"):
        return pl.BlockSpec(memory_space=pltpu.VMEM)
    return pl.BlockSpec(memory_space=pl.ANY)


def _shape(buffer: memory.Buffer) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(buffer.shape, jnp.dtype(buffer.dtype))
