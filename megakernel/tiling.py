"""How matrices lie on the tape: panels of inputs x lanes below each other, cut where a block ends.

A matrix is cut along its outputs into panels as wide as a block; panels follow each other down the tape, so nothing but
the end of a section is padded. What is left of the outputs, if it is narrow, becomes *folded* panels, each as wide as a
power of two and half as wide as the one before it or less: the inputs of one are split in up to `fold` equal parts that
lie side by side, and the partial products are added up across lanes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import cached_property

from megakernel.program import LANES, Matrix, power_of_two, round_up

ROWS = 16
"""Rows of a packed tile: every cut is a multiple of it."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """Inputs `k` to `k + rows` of a panel, in block `block` of the section from its row `row` on.

    `first`: no earlier cut of the section reads the block; `last`: no later one does.
    """

    k: int
    rows: int
    block: int
    row: int
    first: bool = False
    last: bool = False


@dataclasses.dataclass(frozen=True)
class Panel:
    """Outputs from lane `lane` on of group `group`; folded, its cuts cover the inputs of one part."""

    group: int
    lane: int
    fold: int
    cuts: tuple[Cut, ...]


@dataclasses.dataclass(frozen=True)
class Tiling:
    """One matrix on the tape.

    Attributes:
      k_padded: inputs of a group, in whole tiles.
      group_lanes: lanes between the outputs of two groups.
    """

    k_padded: int
    group_lanes: int
    panels: tuple[Panel, ...]

    @cached_property
    def blocks(self) -> range:
        """Blocks of the section that hold some of it."""
        return range(self.panels[0].cuts[0].block, self.panels[-1].cuts[-1].block + 1)

    @cached_property
    def cuts(self) -> int:
        return sum(len(panel.cuts) for panel in self.panels)


def lay_out(matrices: Sequence[Matrix], block_rows: int, lanes: int) -> tuple[dict[str, Tiling], int]:
    """Tilings of a section's matrices in order of use, and the number of blocks they fill."""
    row, uncut = 0, {}
    for matrix in matrices:
        panels = []
        for group, lane, fold in _panels_of(matrix, lanes):
            cuts, row = _cut(row, part_rows(matrix, fold), block_rows)
            panels.append(Panel(group, lane, fold, cuts))
        uncut[matrix.name] = Tiling(round_up(matrix.k, ROWS), _group_lanes(matrix, lanes), tuple(panels))
    return _mark_ends(uncut), -(-row // block_rows)


def _panels_of(matrix: Matrix, lanes: int) -> list[tuple[int, int, int]]:
    """(group, lane, fold) of each panel, in the order of the tape."""
    folds = _folds(matrix, lanes)
    ends = list(itertools.accumulate(lanes // fold for fold in folds))
    places = list(zip([0, *ends], folds, strict=False))
    return [(group, lane, fold) for group in range(matrix.groups) for lane, fold in places]


def _folds(matrix: Matrix, lanes: int) -> tuple[int, ...]:
    """Of the panels of one group; all but the last of them are filled."""
    whole, left = divmod(matrix.n, lanes)
    return (1,) * whole + (tail_folds(matrix, lanes, left) if left else ())


def tail_folds(matrix: Matrix, lanes: int, left: int) -> tuple[int, ...]:
    """Parts into which the inputs are folded for the last `left` outputs, which fill no whole panel: panel by panel.

    Either one panel is padded, or the largest power of two fills one and the rest goes on: whatever has fewer rows, and
    of as many rows fewer panels.
    """
    padded = (_padded_fold(matrix, lanes, left),)
    if left == 1:
        return padded
    filled = power_of_two(left) // 2
    divided = (lanes // filled, *tail_folds(matrix, lanes, left - filled))
    return min(padded, divided, key=lambda folds: sum(part_rows(matrix, fold) for fold in folds))


def _padded_fold(matrix: Matrix, lanes: int, left: int) -> int:
    """Parts of a panel of its own for `left` outputs; 1: they take a whole one."""
    fold = 1
    while 2 * fold * power_of_two(left) <= lanes and part_rows(matrix, 2 * fold) < part_rows(matrix, fold):
        fold *= 2
    return fold


def part_rows(matrix: Matrix, fold: int) -> int:
    """Inputs of one of `fold` parts, as they can be sliced out of an operand's lanes; the last parts may be empty."""
    return round_up(matrix.k, ROWS) if fold == 1 else round_up(-(-matrix.k // fold), LANES)


def _group_lanes(matrix: Matrix, lanes: int) -> int:
    return round_up(sum(lanes // fold for fold in _folds(matrix, lanes)), LANES)


def _cut(row: int, rows: int, block_rows: int) -> tuple[tuple[Cut, ...], int]:
    """Cuts of a panel of `rows` inputs that begins at tape row `row`, and the row after it.

    An operand is sliced at multiples of 128 lanes only, so a few rows before the end of a block may stay empty.
    """
    cuts, k = [], 0
    while k < rows:
        block, at = divmod(row, block_rows)
        room = block_rows - at
        take = rows - k if rows - k <= room else room // LANES * LANES
        if take:
            cuts.append(Cut(k, take, block, at))
        k += take
        row = row + take if k == rows else (block + 1) * block_rows
    return tuple(cuts), row


def _mark_ends(tilings: dict[str, Tiling]) -> dict[str, Tiling]:
    order = [
        (name, p, c) for name, t in tilings.items() for p, panel in enumerate(t.panels) for c in range(len(panel.cuts))
    ]
    users: dict[int, list[tuple[str, int, int]]] = {}
    for name, p, c in order:
        users.setdefault(tilings[name].panels[p].cuts[c].block, []).append((name, p, c))
    firsts, lasts = {found[0] for found in users.values()}, {found[-1] for found in users.values()}

    def marked(name: str, p: int, panel: Panel) -> Panel:
        cuts = (
            dataclasses.replace(cut, first=(name, p, c) in firsts, last=(name, p, c) in lasts)
            for c, cut in enumerate(panel.cuts)
        )
        return dataclasses.replace(panel, cuts=tuple(cuts))

    return {
        name: dataclasses.replace(t, panels=tuple(marked(name, p, panel) for p, panel in enumerate(t.panels)))
        for name, t in tilings.items()
    }


# ---- repetition: so that long products are loops ----


@dataclasses.dataclass(frozen=True)
class Repeat:
    """Panels `start` to `start + turns * period`: every turn is like the first, with everything moved on by a step."""

    start: int
    period: int
    turns: int
    blocks: int
    group: int
    lane: int


def find_repeat(tiling: Tiling) -> Repeat | None:
    """The repetition that leaves the fewest cuts to write out, or None where nothing repeats."""
    best: tuple[int, Repeat] | None = None
    panels = tiling.panels
    for start in range(min(4, len(panels))):
        for period in range(1, (len(panels) - start) // 2 + 1):
            turns = _turns(panels, start, period)
            if turns < 2:
                continue
            a, b = panels[start], panels[start + period]
            step = (b.cuts[0].block - a.cuts[0].block, b.group - a.group, b.lane - a.lane)
            written = sum(len(panel.cuts) for panel in panels[start : start + period])
            left = tiling.cuts - (turns - 1) * written
            if best is None or left < best[0]:
                best = left, Repeat(start, period, turns, *step)
    return best[1] if best else None


def _turns(panels: tuple[Panel, ...], start: int, period: int) -> int:
    def moved(i: int) -> tuple[int, int, int]:
        a, b = panels[i], panels[i + period]
        return b.cuts[0].block - a.cuts[0].block, b.group - a.group, b.lane - a.lane

    def alike(i: int) -> bool:
        a, b = panels[i], panels[i + period]
        blocks = b.cuts[0].block - a.cuts[0].block
        return a.fold == b.fold and tuple(dataclasses.replace(c, block=c.block + blocks) for c in a.cuts) == b.cuts

    same = 0
    while start + same + period < len(panels) and alike(start + same) and moved(start + same) == moved(start):
        same += 1
    return 1 + same // period
