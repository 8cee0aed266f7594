"""Exchanges between cores inside the kernel: every core sends every other core one piece, by remote DMA.

One exchange is an all-to-all. Core `me` sends core p a piece `[rows, lanes]`, which lands in `inbox[half, me]` of core
p; its own piece it stores there itself. A gather sends everyone the same piece; a scatter sends core p the columns that
core p owns.

The two halves of the inbox take turns and nothing is acknowledged:

  Core p writes into half h of core q's inbox in exchange k and next in exchange k + 2. It starts k + 2 after it has
  finished k + 1, so after it has received q's piece of k + 1. That piece q sent after it had finished k and, as the
  caller promises, read what k brought. So q has read half h before anything of k + 2 can arrive. And a core is never
  more than one exchange ahead, so what a half's semaphore counts is of one exchange.

The proof needs a piece from everyone to everyone in each exchange. A core that owns nothing of a scatter therefore
receives pieces of zeros like the owners; without them it could run ahead into a half that others still read. (The plain
interpreter asks for the same: all cores take part in each copy.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from megakernel.program import LANES, round_up
from megakernel.stream import Ref, Scalar

_UNROLLED_PEERS = 32
"""Sends of at most this many cores are written out, 8 to 9 bundles each; in a loop a send waits for the look-up of its
peer, 12 to 15 (compiled, v7x)."""
_WORD_ROWS = 8
"""Rows of a tile of 32-bit numbers; narrower ones are packed in proportion."""


class Exchange:
    """Exchanges over one mesh axis, one at a time: start, independent work, finish, read.

    Every core must take part in every exchange. With one core nothing is sent, but values still pass through the wire's
    format, so the numbers follow the same rules for every number of cores.

    Args:
      axis: name of the mesh's only axis, so that a core's place on it is its device id; cores: its size. Devices in
        chip-major order make farthest-first sends end with the sibling core.
      inbox: [2, cores, rows, lanes] in the wire's dtype; lanes in whole tiles of 128.
      sent, received: DMA semaphores, [1] and one per half of the inbox.
      half: [1] i32 in SMEM, the half of the latest exchange.
      outbox: [cores, rows, lanes] in the wire's dtype; gathers do without.
    """

    def __init__(
        self, axis: str, cores: int, inbox: Ref, sent: Ref, received: Ref, half: Ref, outbox: Ref | None = None
    ):
        self.axis, self.cores = axis, cores
        self.inbox, self.outbox = inbox, outbox
        self.sent, self.received, self.half = sent, received, half
        self.rows, self.lanes = inbox.shape[2:]
        assert self.lanes % LANES == 0, f"{self.lanes} lanes are no whole tiles"
        self.me = lax.axis_index(axis) if cores > 1 else jnp.int32(0)
        self._places: list[tuple[int, int]] = []
        """(first lane, width) of each value of the exchange in flight."""
        self._tall = self.rows
        """Rows of the exchange in flight."""

    def begin(self, barrier: bool) -> None:
        """Once a launch, before the first exchange.

        Args:
          barrier: wait until every core has entered the kernel, whose compiler parameters then need a `collective_id`.
            Only the plain interpreter, which runs all cores in lockstep, may go without.
        """
        self.half[0] = 0
        if barrier and self.cores > 1:
            semaphore = pltpu.get_barrier_semaphore()
            self._for_each_peer(lambda peer: pl.semaphore_signal(semaphore, 1, device_id=peer))
            pl.semaphore_wait(semaphore, self.cores - 1)

    def start_gather(self, *values: jax.Array) -> None:
        """Everyone gets everyone's values; several small ones ride together, each from a tile of its own on.

        Args:
          values: each [rows, width]; a single one may have fewer rows than the inbox.
        """
        half = self._open([value.shape[-1] for value in values], len(values[0]))
        for value, (first, width) in zip(values, self._places, strict=True):
            self.inbox[half, self.me, : len(value), first : first + width] = value.astype(self.inbox.dtype)
        mine = self._piece(self.inbox.at[half, self.me])
        self._send(half, lambda peer: mine)

    def start_scatter(self, partial: jax.Array | Ref, width: int, *shared: jax.Array) -> None:
        """Core p gets lanes [p * width, (p + 1) * width) of everyone's partial; what lies beyond the array is zero.

        Args:
          partial: [rows, columns] with columns <= cores * width.
          shared: [rows, n] each, what everyone gets beside its own columns.
        """
        columns = partial.shape[-1]
        assert columns <= self.cores * width, f"{columns} columns are more than {self.cores} cores own"

        def columns_of(peer: int) -> jax.Array | None:
            first = peer * width
            return partial[:, first : min(first + width, columns)] if first < columns else None

        self.start_each(columns_of, width, *shared)

    def start_each(self, piece_of: Callable[[int], jax.Array | None], width: int, *shared: jax.Array) -> None:
        """Core p gets `piece_of(p)`.

        Args:
          piece_of: core -> [rows, at most width], or None for nothing; zeros follow up to `width`.
          shared: [rows, n] each, what everyone gets beside.
        """
        outbox = self.outbox
        assert outbox is not None, "an exchange without an outbox gathers only"
        half = self._open([width, *(value.shape[-1] for value in shared)], self.rows)
        for peer in range(self.cores):
            piece = piece_of(peer)
            filled = 0
            if piece is not None:
                filled = piece.shape[-1]
                outbox[peer, :, :filled] = piece.astype(outbox.dtype)
            if filled < width:
                outbox[peer, :, filled:width] = jnp.zeros((self.rows, width - filled), outbox.dtype)
            for value, (first, lanes) in zip(shared, self._places[1:], strict=True):
                outbox[peer, :, first : first + lanes] = value.astype(outbox.dtype)
        for first, lanes in self._places:
            self.inbox[half, self.me, :, first : first + lanes] = outbox[self.me, :, first : first + lanes]
        self._send(half, lambda peer: self._piece(outbox.at[peer]))

    def finish(self) -> tuple[Ref, ...]:
        """Waits for all pieces, and until the own ones have left.

        Returns:
          for each value of the exchange a Ref [cores, rows, width rounded up to whole tiles], to be read before the
          next start. What lies beyond `width`, or beyond the rows that were sent, means nothing.
        """
        assert self._places, "finish without a start"
        half = self.half[0]
        if self.cores > 1:
            self._wait_received(half)
            self._wait_sent(half)
        places, self._places = self._places, []
        return tuple(self.inbox.at[half, :, :, pl.ds(first, round_up(width, LANES))] for first, width in places)

    def _open(self, widths: list[int], rows: int) -> Scalar:
        """Gives each value its place and turns to the other half."""
        assert not self._places, "start while an exchange is in flight"
        first = 0
        for width in widths:
            self._places.append((first, width))
            first += round_up(width, LANES)
        assert 0 < first <= self.lanes, f"pieces of {first} lanes in a buffer of {self.lanes}"
        packed_rows = _WORD_ROWS * 4 // self.inbox.dtype.itemsize
        self._tall = min(round_up(rows, packed_rows), self.rows)
        half = self._other(self.half[0])
        self.half[0] = half
        return half

    @staticmethod
    def _other(half: Scalar) -> Scalar:
        return 1 - half

    @property
    def _travelling(self) -> int:
        """Lanes of a piece of the exchange in flight."""
        first, width = self._places[-1]
        return first + round_up(width, LANES)

    def _piece(self, ref: Ref) -> Ref:
        return ref.at[pl.ds(0, self._tall), pl.ds(0, self._travelling)]

    def _send(self, half: Scalar, piece_for: Callable[[Scalar], Ref]) -> None:
        landing = self._piece(self.inbox.at[half, self.me])

        def send(peer: Scalar) -> None:
            pltpu.make_async_remote_copy(
                piece_for(peer), landing, self.sent.at[0], self.received.at[half], device_id=peer
            ).start()

        self._for_each_peer(send)

    def _wait_received(self, half: Scalar) -> None:
        self._all_but_one(half, self.received.at[half]).wait()

    def _wait_sent(self, half: Scalar) -> None:
        self._all_but_one(half, self.sent.at[0]).wait()

    def _all_but_one(self, half: Scalar, done: Ref) -> Any:
        """A copy of as many bytes as come from, or go to, all other cores; only ever waited for."""
        pieces = self.inbox.at[half, pl.ds(0, self.cores - 1), pl.ds(0, self._tall), pl.ds(0, self._travelling)]
        return pltpu.make_async_copy(pieces, pieces, done)

    def _for_each_peer(self, visit: Callable[[Scalar], None]) -> None:
        """Farthest first; in each turn every core is visited by exactly one other."""

        def turn(number: Scalar, _: None) -> None:
            visit(self._peer(self.cores - 1 - number))

        lax.fori_loop(0, self.cores - 1, turn, None, unroll=self.cores <= _UNROLLED_PEERS)

    def _peer(self, distance: Scalar) -> Scalar:
        """With a power of two cores, pairs that visit each other: distance 1 is the sibling core of a chip."""
        if self.cores & (self.cores - 1) == 0:
            return self.me ^ distance
        return lax.rem(self.me + distance, jnp.int32(self.cores))
