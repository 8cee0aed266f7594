"""Several cores as one mesh axis `tp`: where each core's arrays lie, and one launch on all of them.

An array of a plan has one core's shape; its twin over the mesh holds the cores' arrays below each other along the first
axis. What the host asks for and what it reads is the same on every core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megakernel import kernel, memory
from megakernel.cores import AXIS
from megakernel.limits import PlanError
from megakernel.plan import Plan
from megakernel.report import plural

Arrays = dict[str, Any]
WHOLE, DIVIDED = PartitionSpec(), PartitionSpec(AXIS)


def core_mesh(cores: int, devices: list[Any] | None = None) -> Mesh:
    """The mesh of the first `cores` devices; of all hosts, if there are several.

    Raises:
      PlanError: there are fewer devices, or a host with none of the cores.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < cores:
        raise PlanError(
            f"cores = {cores}, and JAX sees {plural(len(devices), 'device')}; on a CPU, call "
            f"jax.config.update('jax_num_cpu_devices', {cores}) in a new process, before JAX is used"
        )
    chosen = devices[:cores]
    hosts = {device.process_index for device in chosen}
    if cores > 1 and len(hosts) < len({device.process_index for device in devices}):
        raise PlanError(
            f"cores = {cores} are all on {len(hosts)} of {jax.process_count()} hosts; JAX sees {len(devices)} devices: "
            f"use cores = {len(devices)}, or fewer hosts"
        )
    return Mesh(np.array(chosen), (AXIS,))


def on_mesh(plan: Plan, mesh: Mesh, interpret: Any) -> Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]:
    """`kernel.launch` on every core of the mesh, as a function of weights, caches and request."""

    def one_core(weights: Arrays, caches: Arrays, request: Arrays) -> tuple[Arrays, Arrays]:
        return kernel.launch(plan, weights, caches, request, interpret)

    if plan.split.cores == 1:
        return one_core
    results = dict.fromkeys(memory.result_buffers(plan), WHOLE)
    if plan.keep_logits:
        results["step_logits"] = PartitionSpec(None, None, AXIS)
    return jax.shard_map(
        one_core, mesh=mesh, in_specs=(DIVIDED, DIVIDED, WHOLE), out_specs=(results, DIVIDED), check_vma=False
    )


def divided(plan: Plan, mesh: Mesh, arrays_of: Callable[[int], Mapping[str, np.ndarray]]) -> Arrays:
    """Puts every core's arrays on its device; a host makes only those of its own devices.

    Args:
      arrays_of: core -> arrays by name.
    """
    if plan.split.cores == 1:
        return {name: jnp.asarray(array) for name, array in arrays_of(0).items()}
    pieces: dict[str, list[jax.Array]] = {}
    for core, device in enumerate(mesh.devices.flat):
        if device.process_index == jax.process_index():
            for name, array in arrays_of(core).items():
                pieces.setdefault(name, []).append(jax.device_put(array, device))
    sharding = NamedSharding(mesh, DIVIDED)
    return {
        name: jax.make_array_from_single_device_arrays(
            (plan.split.cores * parts[0].shape[0], *parts[0].shape[1:]), sharding, parts
        )
        for name, parts in pieces.items()
    }


def replicated(plan: Plan, mesh: Mesh, arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Puts the same arrays on every core; every host gives its own copy of them."""
    if plan.split.cores == 1:
        return {name: jnp.asarray(array) for name, array in arrays.items()}
    sharding = NamedSharding(mesh, WHOLE)
    return {
        name: jax.make_array_from_process_local_data(sharding, array, array.shape) for name, array in arrays.items()
    }


def fetched(arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Arrays as every host reads them; parts that lie on other hosts are gathered."""
    return {
        name: np.asarray(process_allgather(array, tiled=True) if _lies_elsewhere(array) else array)
        for name, array in arrays.items()
    }


def _lies_elsewhere(array: jax.Array) -> bool:
    return not (array.is_fully_addressable or array.is_fully_replicated)


def shapes(plan: Plan, mesh: Mesh) -> tuple[Arrays, Arrays, Arrays]:
    """Shapes of weights, caches and request over the mesh, as `on_mesh` takes them."""

    def over(buffers: Mapping[str, memory.Buffer], spec: PartitionSpec) -> Arrays:
        cores = plan.split.cores if spec == DIVIDED else 1
        sharding = NamedSharding(mesh, spec)
        return {
            name: jax.ShapeDtypeStruct((cores * b.shape[0], *b.shape[1:]), jnp.dtype(b.dtype), sharding=sharding)
            for name, b in buffers.items()
        }

    return (
        over(memory.weight_buffers(plan), DIVIDED),
        over(memory.cache_buffers(plan), DIVIDED),
        over(memory.request_buffers(plan), WHOLE),
    )
