"""How fast things are taken to go: the assumptions of the model of time, each with where it comes from.

None of them was measured by this project. "Published" means measured on v7x by others and published with
github.com/Inferact/tpu-megakernels; other generations take those figures too, where nothing else is known.
"""

from __future__ import annotations

import dataclasses

from megakernel.target import Target

HBM_REACHED = 3.05e12 / 3.7e12
"""Share of peak bandwidth that copies reach. Published: 2.9 to 3.2 TB/s of 3.7; the middle."""
EXCHANGE_SECONDS = 4.1e-6
"""One exchange between cores, from the first send to the last arrival, small pieces. Published: 3.5 to 4.7 us; the
middle."""
OFF_CHIP_BYTES_PER_S = 134e9
"""What one core sends to other chips. Published: 45 GB/s a core and direction over one link, 134 over three in
parallel; pieces for everyone leave over all links."""
SIBLING_BYTES_PER_S = 101e9
"""What one core sends to the other of its chip. Published: 101 GB/s for copies of 256 KiB, the smallest listed."""
TILE_SECONDS = 20e-9
"""To push a 256 x 256 tile of bfloat16 weights into one matrix unit. Published."""
TILE = 256 * 256
REGISTER = 8 * 128
"""Numbers of float32 in a vector register."""

# Bundles of vector work, as compiled for v7x (JAX 0.10.2) of kimi-k3 on 32 cores, tiles of 8 rows. Used where no
# schedule of the plan at hand is given.
MIX_BUNDLES = 2.2
"""A register of 1,024 float32 numbers of the residual entries: two reads, score and weighted sum."""
NORM_BUNDLES = 3.2
"""A register of what a sublayer reads: its norm's weight and rounding, and what else is done between sublayers."""
EXPERT_BUNDLES = {1: 0.34, 2: 0.36, 4: 0.47, 8: 0.48, 16: 0.74}
"""A visit of 1,024 MXFP4 weights to so many rows at most, second product beside the first of the next visit: unpacking,
pushing, scaling the sums."""
STATE_BUNDLES = 5.9
"""A register of KDA state and token: decay, read, update, read."""
TILE_BUNDLES = 30
"""A tile of a product whose panels both matrix units share, waits, loads and sums included: 25 to 38."""
SEND_BUNDLES = 9
"""One send to one core."""
PIECE_BUNDLES = 3.0
"""A register of what an exchange brings or takes: laying pieces out, adding them up."""
CHOICE_BUNDLES = 34
"""One of a row's chosen experts: maximum, first place, mask, for all rows at once."""
PAGE_BUNDLES = 160
"""One page of the MLA cache of one sequence."""
LOGIT_BUNDLES = 9.0
"""A register of a row's logits: layout, finiteness, maximum, log-probability."""

_PEAK_FLOPS = {"v5e": 197e12, "v5p": 230e12, "v6e": 920e12, "v7x": 1155e12}
"""Of one core, bfloat16 (`pltpu.get_tpu_info_for_chip`)."""
_UNITS = {"v5e": (4, 128), "v5p": (4, 128), "v6e": (2, 256), "v7x": (2, 256)}
"""Matrix units of one core and their width (the same source)."""
_PRODUCTS_A_CYCLE = {128: 1, 256: 2}
"""Of each multiplier of a unit. The peak of a unit of 256 would otherwise need a clock of 3.5 or 4.4 GHz, twice that of
its vector unit; with two, v7x pushes a tile in 44 cycles by the published 20 ns, and 32 bundles do it as compiled."""
_SIBLINGS = {"v7x": 2}
"""Cores (JAX devices) of one chip, where there are several."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Attributes:
    clock_hz: bundles a second. peak_bytes_per_s: of HBM; hbm_bytes_per_s: reached.
    siblings: cores of one chip.
    """

    clock_hz: float
    peak_bytes_per_s: float
    hbm_bytes_per_s: float
    siblings: int
    exchange_seconds: float = EXCHANGE_SECONDS
    off_chip_bytes_per_s: float = OFF_CHIP_BYTES_PER_S
    sibling_bytes_per_s: float = SIBLING_BYTES_PER_S
    tile_seconds: float = TILE_SECONDS

    def exchange(self, piece_bytes: float, cores: int) -> float:
        """Seconds of an exchange in which every core sends every other one a piece."""
        near = min(self.siblings, cores) - 1
        far = cores - 1 - near
        wires = max(piece_bytes * far / self.off_chip_bytes_per_s, piece_bytes * near / self.sibling_bytes_per_s)
        return self.exchange_seconds + wires


def rates_of(target: Target) -> Rates:
    """The assumptions for one kind of machine.

    Raises:
      ValueError: nothing is known of it.
    """
    if target.hbm_bytes_per_s is None or target.name not in _PEAK_FLOPS:
        raise ValueError(f"no model of time for target {target.name!r}; choose one of {', '.join(_PEAK_FLOPS)}")
    units, width = _UNITS[target.name]
    clock = _PEAK_FLOPS[target.name] / (2 * units * width * width * _PRODUCTS_A_CYCLE[width])
    return Rates(
        clock_hz=clock,
        peak_bytes_per_s=target.hbm_bytes_per_s,
        hbm_bytes_per_s=HBM_REACHED * target.hbm_bytes_per_s,
        siblings=_SIBLINGS.get(target.name, 1),
    )
