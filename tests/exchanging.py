"""A kernel made of exchanges, its twin in NumPy, and its compilation for machines that are not there.

Each round scatters a partial sum, gathers what the owners hold together with a float32 statistic, adds up a gather, and
every other time sends each core a narrow piece of its own. What comes decides the next values, and when to stop.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megakernel.collectives import Exchange
from megakernel.control import when
from megakernel.messages import EIGHT_BITS
from megakernel.program import LANES, round_up
from megakernel.totals import in_order
from megakernel.wire import scaled, side_by_side, statistic, statistics, unscaled

AXIS = "tp"
CEILING = 40.0
"""The rounds end when an element of the gathered sums exceeds it."""


def exchange_scratch(cores: int, rows: int, lanes: int, wire: Any) -> list[Any]:
    """Scratch of one `Exchange`, in the order of its constructor: inbox, sent, received, half, outbox."""
    return [
        pltpu.VMEM((2, cores, rows, lanes), wire),
        pltpu.SemaphoreType.DMA((1,)),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.VMEM((cores, rows, lanes), wire),
    ]


@dataclasses.dataclass(frozen=True)
class Script:
    """Sizes of a run. Each of the first cores owns `width` of the `columns`, each core `narrow` of `narrow_total`."""

    cores: int
    columns: int
    width: int
    narrow: int
    narrow_total: int
    lanes: int
    rows: int = 16
    wire: str = "float32"
    rounds: int = 3

    def outcome_shapes(self) -> dict[str, Any]:
        rows, cores = self.rows, self.cores
        if self.wire in EIGHT_BITS:
            return {"state": jax.ShapeDtypeStruct((rows, round_up(self.columns, LANES)), jnp.float32)}
        return {
            "rounds": jax.ShapeDtypeStruct((1,), jnp.int32),
            "state": jax.ShapeDtypeStruct((rows, round_up(self.columns, LANES)), jnp.float32),
            "peaks": jax.ShapeDtypeStruct((cores, rows, 1), jnp.float32),
            "narrow": jax.ShapeDtypeStruct((rows, round_up(self.narrow_total, LANES)), jnp.float32),
            "added": jax.ShapeDtypeStruct((rows, self.width), jnp.float32),
            "partial": jax.ShapeDtypeStruct((rows, self.columns), jnp.float32),
        }

    def start(self) -> np.ndarray:
        """Every core's first partial.  # [cores, rows, columns] f32"""
        shape = (self.cores, self.rows, self.columns)
        return np.random.default_rng(self.cores).standard_normal(shape).astype(np.float32)


def kernel(script: Script, barrier: bool, *refs: Any) -> None:
    limit, first, rounds, state, peaks, narrow, added, partial, *scratch = refs
    exchange = Exchange(AXIS, script.cores, *scratch)
    exchange.begin(barrier)
    partial[...] = first[...]

    def more(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        number, highest = carry
        return (number < limit[0]) & (highest < CEILING)

    def one_round(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, _ = carry
        exchange.start_scatter(partial, script.width)
        halved = 0.5 * partial[...]  # while the pieces travel
        owned = total_of(script, exchange)

        exchange.start_gather(owned, statistics(jnp.max(jnp.abs(owned), axis=1, keepdims=True)))
        partial[...] = halved
        pieces, numbers = exchange.finish()
        state[...] = side_by_side(pieces, script.width, script.columns)
        for core in range(script.cores):
            peaks[core] = statistic(numbers[core], 0)
        partial[...] += 0.25 * state[:, : script.columns]

        exchange.start_gather(partial[:, : script.width])
        added[...] = total_of(script, exchange)

        @when(lax.rem(number, 2) == 0)
        def every_other_round() -> None:
            exchange.start_each(lambda peer: partial[:, : script.narrow] + float(peer), script.narrow)
            (pieces,) = exchange.finish()
            narrow[...] = side_by_side(pieces, script.narrow, script.narrow_total)

        return number + 1, jnp.max(peaks[...])

    rounds[0], _ = lax.while_loop(more, one_round, (jnp.int32(0), jnp.float32(0)))


def total_of(script: Script, exchange: Exchange) -> jax.Array:
    """# [rows, width] f32"""
    (pieces,) = exchange.finish()
    return in_order(pieces[core].astype(jnp.float32) for core in range(script.cores))[:, : script.width]


def scaled_kernel(script: Script, barrier: bool, *refs: Any) -> None:
    """Gathers each core's own columns of its partial over a wire of eight bits, `limit` times."""
    limit, first, state, *scratch = refs
    exchange = Exchange(AXIS, script.cores, *scratch)
    exchange.begin(barrier)

    state[...] = jnp.zeros(state.shape, jnp.float32)

    def one_round(_: jax.Array, carry: None) -> None:
        exchange.start_gather(*scaled(first[:, : script.width], script.wire))
        pieces, exponents = exchange.finish()
        for core in range(-(-script.columns // script.width)):
            at = core * script.width
            own = unscaled(pieces[core], exponents[core])[:, : min(script.width, script.columns - at)]
            state[:, at : at + own.shape[1]] = own

    lax.fori_loop(0, limit[0], one_round, None)


def program(script: Script, interpret: Any) -> Any:
    """The kernel for one core of a mesh: (limit [1] i32, first partial) -> outcomes."""
    lockstep, outcomes = interpret is True, script.outcome_shapes()
    body = scaled_kernel if script.wire in EIGHT_BITS else kernel
    vmem, smem = (pl.BlockSpec(memory_space=space) for space in (pltpu.VMEM, pltpu.SMEM))
    return pl.pallas_call(
        functools.partial(body, script, not lockstep),
        name="exchanges",
        in_specs=[smem, vmem],
        out_specs=[smem if name == "rounds" else vmem for name in outcomes],
        out_shape=list(outcomes.values()),
        scratch_shapes=exchange_scratch(script.cores, script.rows, script.lanes, jnp.dtype(script.wire)),
        compiler_params=pltpu.CompilerParams(collective_id=None if lockstep or script.cores == 1 else 0),
        interpret=interpret,
    )


def on_mesh(script: Script, devices: Any, interpret: Any) -> tuple[Any, tuple[Any, Any]]:
    """The jitted launch on all cores and the shapes of its arguments."""
    mesh = Mesh(np.array(devices), (AXIS,))
    split, whole = PartitionSpec(AXIS), PartitionSpec()

    def one_core(limit: jax.Array, first: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(value[None] for value in program(script, interpret)(limit, first[0]))

    launch = jax.shard_map(one_core, mesh=mesh, in_specs=(whole, split), out_specs=split, check_vma=False)
    shapes = (
        jax.ShapeDtypeStruct((1,), jnp.int32, sharding=NamedSharding(mesh, whole)),
        jax.ShapeDtypeStruct(script.start().shape, jnp.float32, sharding=NamedSharding(mesh, split)),
    )
    return jax.jit(launch), shapes


def run(script: Script, interpret: Any) -> dict[str, np.ndarray]:
    """Outcomes by name, each with a leading axis over cores."""
    launch, _ = on_mesh(script, jax.devices()[: script.cores], interpret)
    found = launch(jnp.array([script.rounds], jnp.int32), jnp.asarray(script.start()))
    return {name: np.asarray(value) for name, value in zip(script.outcome_shapes(), found, strict=True)}


def expected(script: Script) -> dict[str, np.ndarray]:
    """The same in NumPy."""
    wire = np.dtype(getattr(ml_dtypes, script.wire, script.wire))
    cores, width = script.cores, script.width
    partial = script.start()
    found: dict[str, np.ndarray] = {}
    number, highest = 0, 0.0

    def sent(values: np.ndarray) -> np.ndarray:
        return values.astype(wire).astype(np.float32)

    def padded(values: np.ndarray) -> np.ndarray:
        return np.pad(values, ((0, 0), (0, round_up(values.shape[1], LANES) - values.shape[1])))

    def in_order(values: np.ndarray) -> np.ndarray:
        return functools.reduce(np.add, sent(values))

    while number < script.rounds and highest < CEILING:
        total = np.pad(in_order(partial), ((0, 0), (0, cores * width - script.columns)))
        owned = np.split(total, cores, axis=1)
        found["peaks"] = np.stack([np.abs(piece).max(axis=1, keepdims=True) for piece in owned])
        found["state"] = padded(sent(total)[:, : script.columns])
        partial = np.float32(0.5) * partial + np.float32(0.25) * found["state"][:, : script.columns]
        if number % 2 == 0:
            for_peer = [sent(partial[:, :, : script.narrow] + np.float32(peer)) for peer in range(cores)]
            found["narrow"] = np.stack([padded(np.hstack(list(p))[:, : script.narrow_total]) for p in for_peer])
        found["added"] = in_order(partial[:, :, :width])
        number, highest = number + 1, found["peaks"].max()
    found["rounds"], found["partial"] = np.array([number], np.int32), partial
    return {
        name: value if name in ("narrow", "partial") else np.stack([value] * cores) for name, value in found.items()
    }


def compile_for(topology: str, script: Script) -> dict[str, float]:
    """Seconds that the TPU compiler takes, for all devices of `topology`; needs a process of its own."""
    hosts = {"chips_per_host_bounds": [1, 1, 1]} if topology.endswith(":1x1x1") else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, **hosts).devices
    script = dataclasses.replace(script, cores=len(devices))
    launch, shapes = on_mesh(script, devices, False)
    started = time.perf_counter()
    lowered = launch.lower(*shapes)
    lowered_at = time.perf_counter()
    lowered.compile()
    return {
        "cores": script.cores,
        "lower_seconds": lowered_at - started,
        "compile_seconds": time.perf_counter() - lowered_at,
    }


if __name__ == "__main__":
    print(json.dumps(compile_for(sys.argv[1], Script(**json.loads(sys.argv[2])))))
