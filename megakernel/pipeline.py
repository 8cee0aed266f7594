"""A core's clock, its memory and its network, as the model of time sees them: three things that run side by side.

Copies from HBM follow each other in the order in which they were started, at the bandwidth reached; their own latency
is not counted. The core computes, or waits for a copy or an exchange.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from typing import Literal

from megakernel.rates import Rates

Kind = Literal["computing", "waiting for HBM", "waiting for an exchange"]
KINDS: tuple[Kind, ...] = ("computing", "waiting for HBM", "waiting for an exchange")


@dataclasses.dataclass(frozen=True)
class Span:
    """What the core did from `begin` to `end`, in seconds."""

    phase: str
    kind: Kind
    name: str
    begin: float
    end: float


class Pipeline:
    """Attributes:
    now: seconds. spent: seconds by (phase, kind). moved: bytes from and to HBM by phase.
    sent: bytes by phase that the core sent; exchanges: how many by phase.
    spans: what the core did, in order, without what took no time. flights: exchanges, as spans.
    """

    def __init__(self, rates: Rates, ring_blocks: int = 0, block_bytes: int = 0):
        self.rates, self.block_bytes = rates, block_bytes
        self.now = self._memory_free = 0.0
        self.phase = ""
        self.spent: defaultdict[tuple[str, Kind], float] = defaultdict(float)
        self.moved: defaultdict[str, float] = defaultdict(float)
        self.sent: defaultdict[str, float] = defaultdict(float)
        self.exchanges: defaultdict[str, int] = defaultdict(int)
        self.spans: list[Span] = []
        self.flights: list[Span] = []
        self._reads: dict[str, float] = {}
        self._exchange: tuple[str, float] | None = None
        self._ring = deque(self._copy(block_bytes) for _ in range(ring_blocks))

    def start_over(self) -> float:
        """Forgets what was counted, but not what is in flight; the time."""
        for counted in (self.spent, self.moved, self.sent, self.exchanges):
            counted.clear()
        self.spans.clear()
        self.flights.clear()
        return self.now

    def compute(self, seconds: float, name: str) -> None:
        self._pass(self.now + seconds, "computing", name)

    def block(self, seconds: float, name: str) -> None:
        """Takes the next block of the tape, computes with it and starts the copy that follows a whole ring later."""
        if self._ring:
            self._pass(self._ring.popleft(), "waiting for HBM", name)
        self.compute(seconds, name)
        if self.block_bytes:
            self._ring.append(self._copy(self.block_bytes))

    def read(self, name: str, size: float) -> None:
        """Starts a copy from HBM; `wait` waits for it."""
        self._reads[name] = self._copy(size)

    def wait(self, name: str) -> None:
        self._pass(self._reads.pop(name, self.now), "waiting for HBM", name)

    def write(self, size: float) -> None:
        self._copy(size)

    def start_exchange(self, name: str, piece_bytes: float, cores: int) -> None:
        """Every core sends every other one a piece; `finish_exchange` waits for them."""
        assert self._exchange is None, "one exchange at a time"
        if cores == 1:
            return
        done = self.now + self.rates.exchange(piece_bytes, cores)
        self._exchange = (name, done)
        self.sent[self.phase] += piece_bytes * (cores - 1)
        self.exchanges[self.phase] += 1
        self.flights.append(Span(self.phase, "waiting for an exchange", name, self.now, done))

    def finish_exchange(self) -> None:
        if self._exchange is not None:
            name, done = self._exchange
            self._exchange = None
            self._pass(done, "waiting for an exchange", name)

    def _copy(self, size: float) -> float:
        self.moved[self.phase] += size
        self._memory_free = max(self._memory_free, self.now) + size / self.rates.hbm_bytes_per_s
        return self._memory_free

    def _pass(self, until: float, kind: Kind, name: str) -> None:
        if until > self.now:
            self.spent[self.phase, kind] += until - self.now
            self.spans.append(Span(self.phase, kind, name, self.now, until))
            self.now = until
