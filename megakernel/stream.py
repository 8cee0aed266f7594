"""The only code that starts a DMA or waits for one: tape, vectors, experts, caches, embedding rows.

Every copy has one start and one wait, and each buffer says when it may be overwritten. Copies that outlive the loop
over steps are waited for in `drain` methods.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from megakernel.control import when
from megakernel.limits import POSITION_GROUP
from megakernel.plan import Plan

Ref = Any
Scalar = jax.Array


def quotient(value: Scalar | int, divisor: int) -> Any:
    """`value // divisor` of a non-negative integer; on a traced one without the sign handling of `//`."""
    return value // divisor if isinstance(value, int) else lax.div(value, jnp.int32(divisor))


def tile_start(value: Scalar) -> Scalar:
    """First position of the tile that holds position (or embedding row) `value`."""
    return pl.multiple_of(quotient(value, POSITION_GROUP) * POSITION_GROUP, POSITION_GROUP)


def bring(hbm: Ref, window: Ref, done: Ref) -> None:
    """Copies a whole array, and waits for it."""
    copy = pltpu.make_async_copy(hbm, window, done.at[0])
    copy.start()
    copy.wait()


class Tape:
    """The trunk's weights, in the order of use, through a ring of VMEM slots.

    Block `i` of the endless tape (the tape repeats each step) lives in slot `i % depth`; its first use waits for its
    copy, giving it back starts the copy of block `i + depth`. A resident tape is copied once, before the first
    step, and never again.
    """

    def __init__(self, plan: Plan, hbm: Ref, ring: Ref, done: Ref):
        self.plan, self.hbm, self.ring, self.done = plan, hbm, ring, done

    def prime(self) -> None:
        if self.plan.tape_is_resident:
            copy = self._whole()
            copy.start()
            copy.wait()
            return
        for block in range(self.plan.ring_depth):
            self._copy(jnp.int32(block)).start()

    def wait(self, index: Scalar) -> None:
        """Waits for block `index`, counted since the launch began."""
        if not self.plan.tape_is_resident:
            self._copy(index).wait()

    def slot(self, index: Scalar) -> Ref:
        """Where block `index` is, once it has been waited for.  # [block_rows, block_lanes]"""
        return self.ring.at[lax.rem(index, self.plan.ring_depth)]

    def give_back(self, index: Scalar) -> None:
        """Block `index` has been read: its slot takes the block that follows a whole ring later."""
        if not self.plan.tape_is_resident:
            self._copy(index + self.plan.ring_depth).start()

    def drain(self, index: Scalar) -> None:
        """Waits for the copies in flight when the loop stops before block `index`."""
        if not self.plan.tape_is_resident:
            for ahead in range(self.plan.ring_depth):
                self._copy(index + ahead).wait()

    def _copy(self, index: Scalar) -> Any:
        slot = lax.rem(index, self.plan.ring_depth)
        block = lax.rem(index, self.plan.tape_blocks)
        return pltpu.make_async_copy(self.hbm.at[block], self.ring.at[slot], self.done.at[slot])

    def _whole(self) -> Any:
        return pltpu.make_async_copy(self.hbm, self.ring, self.done.at[0])


class Vectors:
    """Tables of small float32 vectors of each layer, fetched one layer ahead; two windows of each take turns.

    Args:
      hbm, windows, done: by name of the table, see `Plan.vector_tables`.
    """

    def __init__(self, plan: Plan, hbm: dict[str, Ref], windows: dict[str, Ref], done: dict[str, Ref]):
        self.plan, self.hbm, self.windows, self.done = plan, hbm, windows, done
        self.tables = plan.config.num_hidden_layers + 1

    def prime(self) -> None:
        for copy in self._copies(jnp.int32(0)):
            copy.start()

    def advance(self, index: Scalar) -> None:
        """Waits for tables `index` (counted since the launch began) and starts those after them."""
        self.drain(index)
        for copy in self._copies(index + 1):
            copy.start()

    def drain(self, index: Scalar) -> None:
        for copy in self._copies(index):
            copy.wait()

    def row(self, index: Scalar, name: str, lanes: Any) -> jax.Array:
        """Lanes of the vector `name` of layer table `index`.  # [1, lanes] f32"""
        table, row = self.plan.vector_places[name]
        return self.windows[table][lax.rem(index, 2), row : row + 1, lanes]

    def _copies(self, index: Scalar) -> list[Any]:
        slot, table = lax.rem(index, 2), lax.rem(index, self.tables)
        return [
            pltpu.make_async_copy(self.hbm[name].at[table], self.windows[name].at[slot], self.done[name].at[slot])
            for name in self.hbm
        ]


class Window:
    """Part of a cache that a layer reads at its start and writes back at its end.

    It is written from the buffer it was read into, or from another one. The write of one layer is waited for just
    before the next read; `has_written` says whether there is one.
    """

    def __init__(self, hbm: Ref, window: Ref, read_done: Ref, write_done: Ref, write_from: Ref = None):
        self.hbm, self.window, self.read_done, self.write_done = hbm, window, read_done.at[0], write_done.at[0]
        self.write_from = window if write_from is None else write_from

    def start_read(self, layer: Scalar, has_written: Scalar) -> None:
        @when(has_written)
        def wait_for_write() -> None:
            self._write(layer).wait()

        self._read(layer).start()

    def wait_read(self, layer: Scalar) -> None:
        self._read(layer).wait()

    def start_write(self, layer: Scalar) -> None:
        self._write(layer).start()

    def drain(self) -> None:
        self._write(jnp.int32(0)).wait()

    def _read(self, layer: Scalar) -> Any:
        return pltpu.make_async_copy(self.hbm.at[layer], self.window, self.read_done)

    def _write(self, layer: Scalar) -> Any:
        return pltpu.make_async_copy(self.write_from, self.hbm.at[layer], self.write_done)


class LatentGroups:
    """The positions, one or two tiles a sequence, into which this round's latents fall: read, merged, written back."""

    def __init__(self, plan: Plan, hbm: Ref, window: Ref, read_done: Ref, write_done: Ref):
        self.plan, self.hbm, self.window = plan, hbm, window
        self.read_done, self.write_done = read_done.at[0], write_done.at[0]

    def start_read(self, layer: Scalar, positions: list[Scalar], has_written: Scalar) -> None:
        @when(has_written)
        def wait_for_writes() -> None:
            self.drain()

        for sequence, position in enumerate(positions):
            pltpu.make_async_copy(*self._ends(layer, sequence, position), self.read_done).start()

    def wait_read(self, layer: Scalar, positions: list[Scalar]) -> None:
        for sequence, position in enumerate(positions):
            pltpu.make_async_copy(*self._ends(layer, sequence, position), self.read_done).wait()

    def start_write(self, layer: Scalar, positions: list[Scalar]) -> None:
        for sequence, position in enumerate(positions):
            group, window = self._ends(layer, sequence, position)
            pltpu.make_async_copy(window, group, self.write_done).start()

    def drain(self) -> None:
        for sequence in range(self.plan.sequences):
            group, window = self._ends(jnp.int32(0), sequence, jnp.int32(0))
            pltpu.make_async_copy(window, group, self.write_done).wait()

    def _ends(self, layer: Scalar, sequence: int, position: Scalar) -> tuple[Ref, Ref]:
        positions = pl.ds(tile_start(position), self.plan.group_positions)
        return self.hbm.at[layer, sequence, positions], self.window.at[sequence]


class LatentPages:
    """The past in one attention layer, page after page: the i-th page that is read there takes window `i % windows`."""

    def __init__(self, plan: Plan, hbm: Ref, windows: Ref, done: Ref):
        self.plan, self.hbm, self.windows, self.done = plan, hbm, windows, done
        self.in_flight: int = windows.shape[0]

    def start(self, order: Scalar, layer: Scalar, sequence: Scalar, page: Scalar) -> None:
        self._copy(order, layer, sequence, page).start()

    def take(self, order: Scalar, layer: Scalar, sequence: Scalar, page: Scalar) -> Ref:
        self._copy(order, layer, sequence, page).wait()
        return self.windows.at[lax.rem(order, self.in_flight)]

    def _copy(self, order: Scalar, layer: Scalar, sequence: Scalar, page: Scalar) -> Any:
        slot = lax.rem(order, self.in_flight)
        start = pl.multiple_of(page * self.plan.page, POSITION_GROUP)
        source = self.hbm.at[layer, sequence, pl.ds(start, self.plan.page)]
        return pltpu.make_async_copy(source, self.windows.at[slot], self.done.at[slot])


class Experts:
    """Routed experts from the bank into VMEM slots: the i-th distinct expert of a layer takes slot `i % slots`.

    The bank begins with expert `first`.
    """

    def __init__(
        self, plan: Plan, banks: tuple[Ref, Ref], slots: tuple[Ref, Ref], done: tuple[Ref, Ref], first: Scalar | int
    ):
        self.plan, self.banks, self.slots, self.done, self.first = plan, banks, slots, done, first

    def start(self, order: Scalar, moe_layer: Scalar, expert: Scalar) -> None:
        for copy in self._copies(order, moe_layer, expert):
            copy.start()

    def wait(self, order: Scalar, moe_layer: Scalar, expert: Scalar) -> None:
        for copy in self._copies(order, moe_layer, expert):
            copy.wait()

    def slot(self, order: Scalar) -> tuple[Ref, Ref]:
        """Where an expert is, once it has been waited for, until its slot takes another."""
        slot = lax.rem(order, self.plan.expert_slots)
        return self.slots[0].at[slot], self.slots[1].at[slot]

    def _copies(self, order: Scalar, moe_layer: Scalar, expert: Scalar) -> list[Any]:
        slot = lax.rem(order, self.plan.expert_slots)
        entry = moe_layer * self.plan.split.experts + (expert - self.first)
        return [
            pltpu.make_async_copy(bank.at[entry], window.at[slot], done.at[slot])
            for bank, window, done in zip(self.banks, self.slots, self.done, strict=True)
        ]


class EmbeddingRows:
    """The embedding row of each token of a round, inside the aligned tile of rows that a DMA can address."""

    def __init__(self, plan: Plan, hbm: Ref, window: Ref, done: Ref):
        self.plan, self.hbm, self.window, self.done = plan, hbm, window, done.at[0]

    def fetch(self, tokens: list[Scalar]) -> None:
        copies = [self._copy(row, token) for row, token in enumerate(tokens)]
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()

    def _copy(self, row: int, token: Scalar) -> Any:
        source = self.hbm.at[pl.ds(tile_start(token), POSITION_GROUP)]
        return pltpu.make_async_copy(source, self.window.at[row], self.done)


class Logits:
    """Writes one round's logits to HBM, for tests and teacher forcing."""

    def __init__(self, hbm: Ref, logits: Ref, done: Ref):
        self.hbm, self.logits, self.done = hbm, logits, done.at[0]

    def write(self, step: Scalar) -> None:
        copy = pltpu.make_async_copy(self.logits, self.hbm.at[step], self.done)
        copy.start()
        copy.wait()
