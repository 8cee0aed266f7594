"""What a step is predicted to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from megakernel.pipeline import Kind, Span
from megakernel.plan import Plan
from megakernel.rates import Rates


@dataclasses.dataclass(frozen=True)
class PhaseCost:
    """One phase over all layers of a step, on one core.

    Attributes:
      hbm_bytes: from and to HBM; the tape's copies count where they are started.
      bundles: of the schedule, or estimated.
      exchanges: how many; sent_bytes: by this core, to all others.
      seconds: by kind.
    """

    name: str
    hbm_bytes: float
    bundles: float
    exchanges: int
    sent_bytes: float
    seconds: Mapping[Kind, float]

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a step is predicted to take.

    Attributes:
      compiled: whether bundles are the compiler's; if not, they are estimated.
      estimated: phases whose bundles are estimated all the same.
      seconds: of a step in the middle of a launch.
      spans, flights: what the core did in that step and the exchanges in it, times from its begin.
    """

    plan: Plan
    rates: Rates
    position: int
    compiled: bool
    seconds: float
    phases: tuple[PhaseCost, ...]
    spans: tuple[Span, ...]
    flights: tuple[Span, ...]
    estimated: tuple[str, ...] = ()

    @property
    def hbm_bytes(self) -> float:
        return sum(phase.hbm_bytes for phase in self.phases)

    @property
    def floor_seconds(self) -> float:
        """The step's bytes over the memory's peak bandwidth."""
        return self.hbm_bytes / self.rates.peak_bytes_per_s

    @property
    def alone(self) -> dict[str, float]:
        """Seconds of a step if one thing alone took time."""
        return {
            "HBM": self.hbm_bytes / self.rates.hbm_bytes_per_s,
            "computing": sum(phase.bundles for phase in self.phases) / self.rates.clock_hz,
            "exchanges": sum(flight.end - flight.begin for flight in self.flights),
        }

    @property
    def bound(self) -> str:
        """What would take longest alone."""
        return max(self.alone, key=lambda name: self.alone[name])

    def by_kind(self, kind: Kind) -> float:
        return sum(phase.seconds[kind] for phase in self.phases)
