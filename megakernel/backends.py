"""Ways to run a launch, and what each needs."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from megakernel.target import CPU, TARGETS, Target

_KINDS = {
    "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p",
    "TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU v7": "v7x", "TPU7x": "v7x",
}  # fmt: skip
_CLOCK_ENTRIES = 512
"""Of a vector clock: one for the core, the others shared out among copies. Of two copies that share one, the later
counts as after the earlier, so with few entries (JAX's default leaves one for all copies) most races go unseen."""
INSTALL_LIBTPU = 'pip install "one-launch[tpu]"'
NAMES = ("auto", "interpret", "simulate", "tpu", "reference")


@dataclasses.dataclass(frozen=True)
class Backend:
    """`interpret` is what `pallas_call` takes: False on a TPU, True or simulator parameters elsewhere."""

    name: str
    target: Target
    interpret: Any


def resolve_backend(name: str) -> Backend:
    """Turns a backend's name into a target and a way to run.

    "auto" is "tpu" where JAX's default device is a TPU, else "interpret". "simulate" runs the kernel in simulated TPU
    memories with race detection (slow). "reference" does not run the kernel at all.

    Raises:
      ValueError: the name is not known, or asks for a TPU that is not there, or for a simulator across hosts.
    """
    if name not in NAMES:
        raise ValueError(f"backend {name!r} is not known; known: {', '.join(NAMES)}")
    if name == "auto":
        name = "tpu" if jax.default_backend() == "tpu" else "interpret"
    if name == "tpu":
        return Backend(name, _attached_tpu(), False)
    if name == "simulate" and jax.process_count() > 1:
        raise ValueError(f"backend 'simulate' has one process; here are {jax.process_count()}: use 'interpret'")
    if name == "simulate":
        return Backend(name, CPU, simulator())
    return Backend(name, CPU, True)


def simulator(dma_execution_mode: str = "on_wait") -> pltpu.InterpretParams:
    """Simulated TPU memories: races told (`megakernel.races`), fresh memory full of NaN, reads out of bounds raise.

    Args:
      dma_execution_mode: "on_wait" (copies happen as late as allowed) or "eager" (as early as allowed).
    """
    known = {field.name for field in dataclasses.fields(pltpu.InterpretParams)}
    # JAX from 0.12 on would raise in the middle of a launch, and other cores would outlive it and spoil the next.
    going_on: dict[str, Any] = {"on_race": "warn"} if "on_race" in known else {}
    return pltpu.InterpretParams(
        dma_execution_mode=dma_execution_mode,  # type: ignore[arg-type]
        detect_races=True,
        uninitialized_memory="nan",
        out_of_bounds_reads="raise",
        vector_clock_size=_CLOCK_ENTRIES,
        **going_on,
    )


def _attached_tpu() -> Target:
    device = jax.devices()[0]
    if device.platform != "tpu":
        here = f"JAX's device here is {device.device_kind!r}"
        if importlib.util.find_spec("libtpu") is None:
            here += f", and libtpu is not installed (on a machine with a TPU: {INSTALL_LIBTPU})"
        raise ValueError(f"backend 'tpu' needs a TPU; {here}: use 'interpret'")
    if device.device_kind not in _KINDS:
        raise ValueError(f"TPU kind {device.device_kind!r} is not known; known: {', '.join(sorted(_KINDS))}")
    return TARGETS[_KINDS[device.device_kind]]
