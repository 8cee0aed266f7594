"""What differs between machines: memory sizes, bandwidth, tile shapes, number formats of the matrix unit.

Hardware figures are public (`pltpu.get_tpu_info_for_chip`) and count one core, which is one JAX device.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Number = Literal["float32", "bfloat16"]
Fp4Form = Literal["float32", "float8_e4m3b11fnuz", "float8_e4m3fn"]
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Target:
    """One core of one kind of machine.

    Attributes:
      name: what a user writes to choose it.
      topology: the compiler's name of a small machine of this kind, or None where there is no such compiler.
      vmem_bytes, smem_bytes, hbm_bytes: capacities of one core.
      hbm_bytes_per_s: peak bandwidth of one core's memory; None where no such figure means anything.
      activations: number format in which activations are rounded between phases.
      weights: number format of the tape and the embedding table.
      min_row_tile: rows of the tile that everything but products computes on, at least.
      min_product_rows: fewest rows of a product; from there on a row's result does not depend on how many there are.
      sums_in_matrix_unit: whether a matrix unit adds products up itself; a sum is then made by one unit alone.
      multiplies_float32: whether the matrix unit takes float32; if not, float32 activations go through it in pieces.
      fp4_as: number format in which 4-bit weights are multiplied.
      lane_aligned: whether array slices must begin at multiples of 128 lanes.
    """

    name: str
    topology: str | None
    vmem_bytes: int
    smem_bytes: int
    hbm_bytes: int
    hbm_bytes_per_s: float | None
    activations: Number
    weights: Number
    min_row_tile: int
    min_product_rows: int
    sums_in_matrix_unit: bool
    multiplies_float32: bool
    fp4_as: Fp4Form
    lane_aligned: bool


def _tpu(name: str, topology: str, vmem_mib: int, hbm_gb: float, hbm_gb_per_s: float, fp4_as: Fp4Form) -> Target:
    return Target(
        name=name,
        topology=topology,
        vmem_bytes=vmem_mib * MIB,
        smem_bytes=MIB,
        hbm_bytes=int(hbm_gb * 1e9),
        hbm_bytes_per_s=hbm_gb_per_s * 1e9,
        activations="bfloat16",
        weights="bfloat16",
        min_row_tile=8,
        min_product_rows=8,
        sums_in_matrix_unit=name == "v7x",
        multiplies_float32=False,
        fp4_as=fp4_as,
        lane_aligned=True,
    )


# The interpreters have no tiles and no fast memory of their own. Float32 is the CPU's native matrix format; bfloat16
# weights are widened to it without loss as they are used. "VMEM" there is ordinary memory, bounded like the largest
# TPU's. The row tile holds the most rows that a step carries: XLA chooses the order of sums by an array's shape, so
# rows must never change it.
CPU = Target(
    name="cpu",
    topology=None,
    vmem_bytes=128 * MIB,
    smem_bytes=4 * MIB,
    hbm_bytes=1 << 40,
    hbm_bytes_per_s=None,
    activations="float32",
    weights="bfloat16",
    min_row_tile=16,
    min_product_rows=2,
    sums_in_matrix_unit=False,
    multiplies_float32=True,
    fp4_as="float32",
    lane_aligned=False,
)

TARGETS = {
    target.name: target
    for target in (
        CPU,
        _tpu("v5e", "v5e:1x1", vmem_mib=128, hbm_gb=17.2, hbm_gb_per_s=820, fp4_as="float8_e4m3b11fnuz"),
        _tpu("v5p", "v5p:1x1x1", vmem_mib=64, hbm_gb=51.5, hbm_gb_per_s=1230, fp4_as="float8_e4m3b11fnuz"),
        _tpu("v6e", "v6e:1x1", vmem_mib=128, hbm_gb=34.4, hbm_gb_per_s=1640, fp4_as="float8_e4m3b11fnuz"),
        _tpu("v7x", "tpu7x:1x1x1", vmem_mib=64, hbm_gb=103, hbm_gb_per_s=3700, fp4_as="float8_e4m3fn"),
    )
}


def find_target(name: str) -> Target:
    """Looks a target up by name.

    Raises:
      ValueError: the name is not known.
    """
    if name not in TARGETS:
        raise ValueError(f"target {name!r} is not known; known: {', '.join(TARGETS)}")
    return TARGETS[name]
