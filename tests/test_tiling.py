"""How matrices lie on the tape: cuts inside their blocks, every weight once, and tails in the fewest rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from megakernel.program import LANES, Column, Matrix, round_up
from megakernel.tiling import Cut, Panel, Tiling, find_repeat, lay_out, part_rows, tail_folds

BLOCKS = [(128, 128), (256, 256), (384, 256), (1024, 512), (128, 512)]
SEEDS = range(40)


def random_section(seed: int, largest: int = 1500) -> tuple[Matrix, ...]:
    """One to six matrices; some are narrow, some block diagonal, and some sizes divide nothing."""
    rng, matrices = np.random.default_rng(seed), []
    for number in range(rng.integers(1, 7)):
        k = int(rng.choice([rng.integers(1, largest), 128 * rng.integers(1, largest // 128 + 1)]))
        width = int(rng.choice([rng.integers(1, 70), rng.integers(1, largest), 128 * rng.integers(1, 12)]))
        columns = [Column("first", width, "", lanes=width)]
        if rng.random() < 0.3:
            columns.append(Column("second", int(rng.integers(1, 200)), ""))
        groups = int(rng.choice([1, 1, 1, 2, 5]))
        if groups > 1:
            k = round_up(k, LANES)  # as an operand's groups are sliced
        matrices.append(Matrix(f"m{number}", k, tuple(columns), groups))
    return tuple(matrices)


def in_order(tilings: dict[str, Tiling]) -> Iterator[tuple[str, Panel, Cut]]:
    for name, tiling in tilings.items():
        for panel in tiling.panels:
            for cut in panel.cuts:
                yield name, panel, cut


@pytest.fixture(params=BLOCKS, ids=lambda block: f"{block[0]}x{block[1]}")
def block(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


# ---- where cuts are ----


def test_cuts_lie_in_their_blocks_one_below_the_other(block: tuple[int, int]) -> None:
    """In order down the section: none overlaps another, and no rows stay empty but fewer than 128 at a block's end."""
    for seed in SEEDS:
        block_rows, lanes = block
        tilings, blocks = lay_out(random_section(seed), block_rows, lanes)
        end = 0
        for _, _, cut in in_order(tilings):
            assert cut.rows > 0
            assert 0 <= cut.row < cut.row + cut.rows <= block_rows
            start = cut.block * block_rows + cut.row
            if start != end:
                assert cut.row == 0
                assert 0 < start - end < LANES
            end = start + cut.rows
        assert (blocks - 1) * block_rows < end <= blocks * block_rows


def test_every_block_is_waited_for_once_and_given_back_once(block: tuple[int, int]) -> None:
    """In the order of use, so that the ring's slots follow each other."""
    for seed in SEEDS:
        tilings, blocks = lay_out(random_section(seed), *block)
        held: list[int] = []
        waited: list[int] = []
        for _, _, cut in in_order(tilings):
            if cut.first:
                held.append(cut.block)
                waited.append(cut.block)
            assert held == [cut.block]
            if cut.last:
                held.remove(cut.block)
        assert held == []
        assert waited == list(range(blocks))


def test_panels_cover_every_output_and_every_input_once(block: tuple[int, int]) -> None:
    for seed in SEEDS:
        block_rows, lanes = block
        section = random_section(seed)
        tilings, _ = lay_out(section, block_rows, lanes)
        for matrix in section:
            tiling = tilings[matrix.name]
            seen = np.zeros((matrix.groups, round_up(matrix.k, 16), tiling.group_lanes), int)
            for panel in tiling.panels:
                part, width = sum(cut.rows for cut in panel.cuts), lanes // panel.fold
                assert [cut.k for cut in panel.cuts] == [0, *itertools.accumulate(cut.rows for cut in panel.cuts)][:-1]
                assert part * panel.fold >= round_up(matrix.k, 16)
                for i in range(panel.fold):
                    seen[panel.group, i * part : (i + 1) * part, panel.lane : panel.lane + width] += 1
            assert (seen[:, :, : matrix.n] == 1).all()
            assert seen.max() == 1
            assert tiling.k_padded == seen.shape[1]
            assert tiling.group_lanes % LANES == 0


def test_operands_are_sliced_at_whole_lanes(block: tuple[int, int]) -> None:
    """What a TPU can load: every cut and every part of a folded panel begins at a multiple of 128 inputs."""
    for seed in SEEDS:
        tilings, _ = lay_out(random_section(seed), *block)
        for _, panel, cut in in_order(tilings):
            assert cut.k % LANES == 0
            assert cut.row % 16 == cut.rows % 16 == 0
            if panel.fold > 1:
                assert sum(c.rows for c in panel.cuts) % LANES == 0


def test_blocks_are_shared_between_matrices() -> None:
    """Two matrices of 192 inputs and one panel each: the second begins in the first's block, at row 192 of 256."""
    section = [Matrix(name, 192, (Column("out", 256, ""),)) for name in ("above", "below")]
    tilings, blocks = lay_out(section, 256, 256)
    assert blocks == 2
    assert tilings["above"].panels[0].cuts == (Cut(0, 192, 0, 0, first=True, last=True),)  # 64 rows hold no whole tile
    assert tilings["below"].panels[0].cuts == (Cut(0, 192, 1, 0, first=True, last=True),)
    tilings, blocks = lay_out(section, 384, 256)
    assert blocks == 1
    assert tilings["above"].panels[0].cuts == (Cut(0, 192, 0, 0, first=True),)
    assert tilings["below"].panels[0].cuts == (Cut(0, 192, 0, 192, last=True),)
    tilings, blocks = lay_out(section, 320, 256)
    assert tilings["below"].panels[0].cuts == (
        Cut(0, 128, 0, 192, last=True),
        Cut(128, 64, 1, 0, first=True, last=True),
    )


@pytest.mark.parametrize(
    ("k", "n", "lanes", "folds"),
    [
        (7168, 8, 256, [32]),
        (7168, 256, 256, [1]),  # a whole panel
        (7168, 129, 256, [2, 64]),  # 128 + 1
        (256, 129, 256, [1]),  # as many rows
        (7168, 128, 256, [2]),
        (7168, 300, 256, [1, 8, 32, 64]),  # 44 lanes are left: 32 + 8 + 4
        (7168, 112, 256, [4, 8, 16]),  # 64 + 32 + 16
        (7168, 72, 256, [4, 32]),  # 64 + 8
        (7168, 96, 128, [2, 4]),  # in narrower blocks
        (7168, 127, 256, [2]),  # 64 + 32 + 16 + 8 + 4 + 2 + 1 have more rows than 128
        (768, 112, 256, [2]),  # 384 rows, where 256 + 128 + 128 are more
        (512, 96, 256, [2]),  # as many rows in one panel
        (300, 8, 256, [4]),  # three parts of 128 inputs, the fourth stays empty
        (128, 8, 256, [1]),  # nothing to fold
        (256, 8, 256, [2]),
    ],
)
def test_narrow_tails_are_folded(k: int, n: int, lanes: int, folds: list[int]) -> None:
    panels = lay_out([outputs(k, n)], 512, lanes)[0]["m"].panels
    assert [panel.fold for panel in panels] == folds
    ends = list(itertools.accumulate(lanes // fold for fold in folds))
    assert [panel.lane for panel in panels] == [0, *ends[:-1]]
    for panel in panels:
        rows = k if panel.fold == 1 else round_up(-(-k // panel.fold), LANES)
        assert sum(cut.rows for cut in panel.cuts) == rows


def outputs(k: int, n: int, groups: int = 1) -> Matrix:
    return Matrix("m", k, (Column("out", n, "", lanes=n),), groups)


@pytest.mark.parametrize(
    ("n", "rows"),
    [
        (128, 7168 // 2),
        (112, 7168 // 4 + 7168 // 8 + 512),  # 7168 / 16 = 448, in whole tiles of inputs
        (72, 7168 // 4 + 256),  # 7168 / 32 = 224
        (32, 7168 // 8),
        (28, 7168 // 8),
    ],
)
def test_narrow_pieces_of_kimi_k3_take_their_rows(n: int, rows: int) -> None:
    """Of blocks of 256 lanes; with no padding they would be 28 n."""
    tiling = lay_out([outputs(7168, n)], 512, 256)[0]["m"]
    assert sum(cut.rows for panel in tiling.panels for cut in panel.cuts) == rows >= 28 * n


@pytest.mark.parametrize("seed", SEEDS)
def test_tails_have_the_fewest_rows_of_all_panels_that_descend(seed: int) -> None:
    """Against every choice of filled panels before the last; where one panel has as many rows, it is one."""
    rng = np.random.default_rng(seed)
    k, lanes = int(rng.integers(1, 8000)), int(rng.choice([128, 256, 512]))
    left = int(rng.integers(1, lanes))
    powers = [lanes >> i for i in range(lanes.bit_length())]
    found = {}
    choices = (tuple(p for p in powers if p & bits) for bits in range(left))
    for filled, last in itertools.product(choices, powers):
        if left - sum(filled) <= last and all(p > last for p in filled):
            folds = [lanes // width for width in (*filled, last)]
            found[tuple(folds)] = sum(part_rows(outputs(k, left), fold) for fold in folds)
    folds = tail_folds(outputs(k, left), lanes, left)
    rows = sum(part_rows(outputs(k, left), fold) for fold in folds)
    assert rows == min(found.values())
    assert len(folds) == min(len(others) for others, needed in found.items() if needed == rows)


# ---- loops ----


def unrolled(tiling: Tiling) -> list[Panel]:
    """The panels as the loop over `find_repeat` meets them."""
    repeat = find_repeat(tiling)
    if repeat is None:
        return list(tiling.panels)
    panels = list(tiling.panels[: repeat.start])
    for turn in range(repeat.turns):
        for panel in tiling.panels[repeat.start : repeat.start + repeat.period]:
            cuts = tuple(dataclasses.replace(cut, block=cut.block + turn * repeat.blocks) for cut in panel.cuts)
            group, lane = panel.group + turn * repeat.group, panel.lane + turn * repeat.lane
            panels.append(dataclasses.replace(panel, group=group, lane=lane, cuts=cuts))
    return [*panels, *tiling.panels[repeat.start + repeat.period * repeat.turns :]]


def test_the_loop_meets_the_panels_of_the_list(block: tuple[int, int]) -> None:
    for seed in SEEDS:
        tilings, _ = lay_out(random_section(seed, largest=6000), *block)
        for tiling in tilings.values():
            assert unrolled(tiling) == list(tiling.panels)


def test_a_long_product_is_a_short_loop() -> None:
    """The LM head of Kimi K3 on one of 32 cores: 20 panels of 7,168 rows through blocks of 1,024."""
    tilings, _ = lay_out([Matrix("head", 7168, (Column("logits", 5120, ""),))], 1024, 256)
    repeat = find_repeat(tilings["head"])
    assert repeat is not None
    assert (repeat.start, repeat.period, repeat.turns, repeat.blocks, repeat.lane) == (0, 1, 20, 7, 256)
