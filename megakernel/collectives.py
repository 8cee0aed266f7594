"""Exchanges between cores inside the kernel: every core sends every other core one piece, by remote DMA.

One exchange is an all-to-all. Core `me` sends core p a piece `[rows, lanes]`, which lands in `inbox[half, me]` of core
p; its own piece it stores there itself. A gather sends everyone the same piece; a scatter sends core p the columns that
core p owns, and p adds up what arrives in the order of the senders, so that bits never depend on who came first.

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

_UNROLLED_PEERS = 8
"""Sends to at most this many peers are written out; more go through a loop."""
_EXPONENT_BIAS = 127  # of float32
_FLOAT8_BITS, _INT8_BITS = 7, 6  # a scaled row's peak lies in [2 ** bits, 2 ** (bits + 1))
_INT8_MAX = 127
_LARGEST_SHIFT = 120


def exchange_scratch(cores: int, rows: int, lanes: int, wire: Any) -> list[Any]:
    """Scratch of one `Exchange`, in the order of its constructor: outbox, inbox, sent, received, half."""
    return [
        pltpu.VMEM((cores, rows, lanes), wire),
        pltpu.VMEM((2, cores, rows, lanes), wire),
        pltpu.SemaphoreType.DMA((1,)),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SMEM((1,), jnp.int32),
    ]


class Exchange:
    """Exchanges over one mesh axis, one at a time: start, independent work, finish, read.

    Every core must take part in every exchange. With one core nothing is sent, but values still pass through the wire's
    format, so the numbers follow the same rules for every number of cores.

    Args:
      axis: name of the mesh's only axis, so that a core's place on it is its device id; cores: its size. Devices in
        chip-major order make farthest-first sends end with the sibling core.
      outbox: [cores, rows, lanes] in the wire's dtype.
      inbox: [2, cores, rows, lanes] in the wire's dtype. If `lanes` is a multiple of 128, pieces travel as whole tiles.
      sent, received: DMA semaphores, [1] and one per half of the inbox.
      half: [1] i32 in SMEM, the half of the latest exchange.
    """

    def __init__(self, axis: str, cores: int, outbox: Ref, inbox: Ref, sent: Ref, received: Ref, half: Ref):
        self.axis, self.cores = axis, cores
        self.outbox, self.inbox = outbox, inbox
        self.sent, self.received, self.half = sent, received, half
        self.rows, self.lanes = outbox.shape[1:]
        self.tile = 1 if self.lanes % LANES else LANES
        self.me = lax.axis_index(axis) if cores > 1 else jnp.int32(0)
        self._places: list[tuple[int, int]] = []
        """(first lane, width) of each value of the exchange in flight."""

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
          values: each [rows, width].
        """
        half = self._open([value.shape[-1] for value in values])
        for value, (first, width) in zip(values, self._places, strict=True):
            self.inbox[half, self.me, :, first : first + width] = value.astype(self.inbox.dtype)
        mine = self._piece(self.inbox.at[half, self.me])
        self._send(half, lambda peer: mine)

    def start_scatter(self, partial: jax.Array | Ref, width: int) -> None:
        """Core p gets lanes [p * width, (p + 1) * width) of everyone's partial; what lies beyond the array is zero.

        Args:
          partial: [rows, columns] with columns <= cores * width.
        """
        columns = partial.shape[-1]
        assert columns <= self.cores * width, f"{columns} columns are more than {self.cores} cores own"

        def columns_of(peer: int) -> jax.Array | None:
            first = peer * width
            return partial[:, first : min(first + width, columns)] if first < columns else None

        self.start_each(columns_of, width)

    def start_each(self, piece_of: Callable[[int], jax.Array | None], width: int) -> None:
        """Core p gets `piece_of(p)`.

        Args:
          piece_of: core -> [rows, at most width], or None for nothing; zeros follow up to `width`.
        """
        half = self._open([width])
        for peer in range(self.cores):
            piece = piece_of(peer)
            filled = 0
            if piece is not None:
                filled = piece.shape[-1]
                self.outbox[peer, :, :filled] = piece.astype(self.outbox.dtype)
            if filled < width:
                self.outbox[peer, :, filled:width] = jnp.zeros((self.rows, width - filled), self.outbox.dtype)
        self.inbox[half, self.me, :, :width] = self.outbox[self.me, :, :width]
        self._send(half, lambda peer: self._piece(self.outbox.at[peer]))

    def finish(self) -> tuple[Ref, ...]:
        """Waits for all pieces, and until the own ones have left.

        Returns:
          for each value of the exchange a Ref [cores, rows, width rounded up to whole tiles], to be read before the
          next start. What lies beyond `width` means nothing.
        """
        assert self._places, "finish without a start"
        half = self.half[0]
        if self.cores > 1:
            self._wait_received(half)
            self._wait_sent(half)
        places, self._places = self._places, []
        return tuple(self.inbox.at[half, :, :, pl.ds(first, round_up(width, self.tile))] for first, width in places)

    def finish_sum(self) -> jax.Array:
        """Waits as `finish` does; the sum over the senders, in their order.  # [rows, width] f32"""
        widths = [width for _, width in self._places]
        (pieces,), (width,) = self.finish(), widths
        total = pieces[0].astype(jnp.float32)
        for sender in range(1, self.cores):
            total = total + pieces[sender].astype(jnp.float32)
        return total[:, :width]

    def _open(self, widths: list[int]) -> Scalar:
        """Gives each value its place and turns to the other half."""
        assert not self._places, "start while an exchange is in flight"
        first = 0
        for width in widths:
            self._places.append((first, width))
            first += round_up(width, self.tile)
        assert 0 < first <= self.lanes, f"pieces of {first} lanes in a buffer of {self.lanes}"
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
        return first + round_up(width, self.tile)

    def _piece(self, ref: Ref) -> Ref:
        return ref.at[:, pl.ds(0, self._travelling)]

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
        pieces = self.inbox.at[half, pl.ds(0, self.cores - 1), :, pl.ds(0, self._travelling)]
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


def side_by_side(pieces: Ref, width: int, total: int, exponents: Ref | None = None) -> jax.Array:
    """Undoes the split of `total` columns into `width` per core: core c owns [c * width, min((c + 1) * width, total)).

    Args:
      pieces: [cores, rows, lanes] whose first `width` lanes count.
      width: on a TPU a multiple of 128, or a divisor of it.
      exponents: [cores, rows, lanes] if the pieces travelled as `scaled` ones.
    Returns:
      [rows, total rounded up to 128] f32, zero beyond `total`.
    """
    owners, padded = -(-total // width), round_up(total, LANES)

    def piece(core: int, lanes: int) -> jax.Array:
        values = pieces[core, :, :lanes].astype(jnp.float32)
        return values if exponents is None else unscaled(values, exponents[core])

    if LANES % width or pieces.shape[-1] < LANES:
        laid = jnp.concatenate([piece(core, width) for core in range(owners)], axis=1)
        missing = max(padded - owners * width, 0)
        laid = jnp.pad(laid, ((0, 0), (0, missing)))[:, :padded] if laid.shape[1] != padded else laid
    else:
        tile_pieces, tiles = LANES // width, []
        for first in range(0, owners, tile_pieces):
            there = range(first, min(first + tile_pieces, owners))
            tiles.append(one_tile([piece(core, LANES) for core in there], width))
        laid = jnp.concatenate(tiles, axis=1)
    column = lax.broadcasted_iota(jnp.int32, laid.shape, 1)
    return laid if total == padded else jnp.where(column < total, laid, 0.0)


def one_tile(pieces: list[jax.Array], width: int) -> jax.Array:
    """The first `width` lanes of each piece, one after the other.  # each [rows, 128] f32 -> [rows, 128] f32"""
    lane = lax.broadcasted_iota(jnp.int32, pieces[0].shape, 1)
    tile = pieces[0]
    for number, piece in enumerate(pieces[1:], start=1):
        tile = jnp.where(lane < number * width, tile, pltpu.roll(piece, number * width, 1))
    return tile


def split3(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Three float32 values of bfloat16 precision whose sum is `x` exactly, so that statistics survive a bfloat16 wire.

    Holds for zeros and 2**-103 <= |x| < infinity; what is not finite arrives as NaN or infinity. Bits are cut off, not
    rounded: a compiler that may keep excess precision would drop a conversion to bfloat16 and back.
    """
    high = _leading_bits(x)
    middle = _leading_bits(x - high)
    return high, middle, x - high - middle


def join3(high: jax.Array, middle: jax.Array, low: jax.Array) -> jax.Array:
    """What `split3` took apart."""
    return high.astype(jnp.float32) + (middle.astype(jnp.float32) + low.astype(jnp.float32))


def statistics(*columns: jax.Array) -> jax.Array:
    """Float32 numbers, one of each kind a row, for a bfloat16 wire: three lanes each, see `split3`.

    Args:
      columns: each [rows, 1] f32.
    Returns:
      [rows, 3 * columns] f32
    """
    lanes = [lane for column in columns for lane in split3(column)]
    at = lax.broadcasted_iota(jnp.int32, (columns[0].shape[0], len(lanes)), 1)
    laid = jnp.zeros(at.shape, jnp.float32)
    for number, lane in enumerate(lanes):
        laid = jnp.where(at == number, lane, laid)
    return laid


def statistic(piece: jax.Array, number: int) -> jax.Array:
    """Column `number` of what `statistics` made.  # piece [rows, lanes] -> [rows, 1] f32"""
    high, middle, low = (piece[:, 3 * number + part : 3 * number + part + 1] for part in range(3))
    return join3(high, middle, low)


def _leading_bits(x: jax.Array) -> jax.Array:
    """`x` cut to the eight significant bits of a bfloat16."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(bits, jnp.float32)


def scaled(x: jax.Array, wire: Any) -> tuple[jax.Array, jax.Array]:
    """`x` for a wire of eight bits: each row times a power of two that brings it into range, and the exponents.

    Gather both (`start_gather(*scaled(x, wire))`); `unscaled`, or `side_by_side`, undoes it.

    Args:
      x: [rows, width] f32, finite.
      wire: float8_e4m3fn or int8.
    Returns:
      values in the wire's range [rows, width] f32, whole numbers for int8; exponents [rows, 2] f32, small whole numbers
      that both wires hold exactly.
    """
    peak = jnp.max(jnp.abs(x), axis=1, keepdims=True)
    exponent = (lax.bitcast_convert_type(peak, jnp.int32) >> 23) - _EXPONENT_BIAS  # 2 ** exponent <= peak
    whole = jnp.issubdtype(wire, jnp.integer)
    shift = jnp.clip(exponent - (_INT8_BITS if whole else _FLOAT8_BITS), -_LARGEST_SHIFT, _LARGEST_SHIFT)
    values = x * _power_of_two(-shift)
    if whole:
        values = jnp.clip(jnp.round(values), -_INT8_MAX, _INT8_MAX)
    high = shift >> 4
    lane = lax.broadcasted_iota(jnp.int32, (x.shape[0], 2), 1)
    return values, jnp.where(lane == 0, high, shift - (high << 4)).astype(jnp.float32)


def unscaled(values: jax.Array, exponents: jax.Array) -> jax.Array:
    """What `scaled` scaled.  # values [rows, width], exponents [rows, lanes] -> [rows, width] f32"""
    high, low = (exponents[:, part : part + 1].astype(jnp.float32).astype(jnp.int32) for part in range(2))
    return values.astype(jnp.float32) * _power_of_two((high << 4) + low)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((exponent + _EXPONENT_BIAS) << 23, jnp.float32)
