"""The streamed product: packed weights are met again, block by block, and sums are those of the plain product."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_tiling import BLOCKS, outputs, random_section

from megakernel import find_target, make_plan
from megakernel.pack import lay_matrix
from megakernel.phases import linear
from megakernel.program import LANES, Column, Matrix, round_up
from megakernel.tiling import lay_out
from megakernel.timeline import work_of
from model.config import ModelConfig

ROWS = 3
TARGETS = {
    "whole": find_target("cpu"),
    "in halves": dataclasses.replace(find_target("cpu"), sums_in_matrix_unit=True),  # with the CPU's number formats
}


@pytest.fixture(params=BLOCKS, ids=lambda block: f"{block[0]}x{block[1]}")
def block(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


class Tape:
    """A section as the kernel takes it: only a block that was waited for and not given back may be read."""

    def __init__(self, blocks: np.ndarray):
        self.blocks, self.held, self.log = blocks, set[int](), list[tuple[str, int]]()

    def wait(self, index: int) -> None:
        self.log.append(("wait", int(index)))
        self.held.add(int(index))

    def slot(self, index: int) -> np.ndarray:
        assert int(index) in self.held
        return self.blocks[int(index)]

    def give_back(self, index: int) -> None:
        self.log.append(("give back", int(index)))
        self.held.remove(int(index))


def plain_loops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Loops of `linear` run in Python; the lengths of those that ran are noted."""
    lengths: list[int] = []

    def loop(start: int, stop: int, body: Any, carry: Any) -> Any:
        lengths.append(stop - start)
        for i in range(start, stop):
            carry = body(i, carry)
        return carry

    monkeypatch.setattr(linear.lax, "fori_loop", loop)
    monkeypatch.setattr(linear.pltpu, "roll", jnp.roll)
    return lengths


@dataclasses.dataclass
class Section:
    """As much of a plan as a product looks at, for one section of matrices of its own."""

    matrices: Sequence[Matrix]
    block_rows: int
    block_lanes: int
    product_rows: int = ROWS
    rows: int = ROWS
    activations: str = "float32"
    target: Any = dataclasses.field(default_factory=lambda: find_target("cpu"))

    def __post_init__(self) -> None:
        self.tilings, self.blocks = lay_out(self.matrices, self.block_rows, self.block_lanes)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("seed", range(12))
def test_the_product_of_a_packed_section(
    seed: int, target: str, block: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights laid on the tape, with an operand that is NaN outside its inputs: every product gives x @ W."""
    plain_loops(monkeypatch)
    section = Section(random_section(seed, largest=700), *block, target=TARGETS[target])
    rng = np.random.default_rng(seed)
    rows = np.zeros((section.blocks * section.block_rows, section.block_lanes), np.float32)
    dense = {m.name: rng.standard_normal((m.groups, m.k, m.n)).astype(np.float32) for m in section.matrices}
    for matrix in section.matrices:
        lay_matrix(section, matrix, dense[matrix.name], rows)  # type: ignore[arg-type]
    tape = Tape(rows.reshape(section.blocks, section.block_rows, section.block_lanes))
    for matrix in section.matrices:
        tiling, weights = section.tilings[matrix.name], dense[matrix.name]
        x = rng.standard_normal((ROWS, matrix.groups * matrix.k)).astype(np.float32)
        operand = np.full((ROWS, matrix.groups * tiling.k_padded), np.nan, np.float32)
        out = np.full((ROWS, matrix.groups * tiling.group_lanes), np.nan, np.float32)
        linear.linear(section, tape, 0, jnp.asarray(x), matrix, operand, out)  # type: ignore[arg-type]
        for group in range(matrix.groups):
            own = x[:, group * matrix.k : (group + 1) * matrix.k].astype(np.float64)
            found = out[:, group * tiling.group_lanes :][:, : matrix.n]
            np.testing.assert_allclose(found, own @ weights[group], rtol=1e-4, atol=1e-3)
    assert [block for kind, block in tape.log if kind == "wait"] == list(range(section.blocks))
    assert [block for kind, block in tape.log if kind == "give back"] == list(range(section.blocks))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("n", "folds"), [(112, [4, 8, 16]), (72, [4, 32]), (368, [1, 4, 8, 16]), (232, [2, 4, 8, 32])])
def test_the_panels_of_a_tail_share_a_tile(
    n: int, folds: list[int], groups: int, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whole numbers, of which sums are exact: the product to the bit, in an output of which nothing was set."""
    plain_loops(monkeypatch)
    matrix = outputs(4096, n, groups)
    section = Section((matrix,), 512, 256, target=TARGETS[target])
    assert [panel.fold for panel in section.tilings["m"].panels] == folds * groups
    rng = np.random.default_rng(n)
    x = rng.integers(-9, 9, (ROWS, groups * 4096)).astype(np.float32)
    dense = rng.integers(-9, 9, (groups, 4096, n)).astype(np.float32)
    rows = np.zeros((section.blocks * 512, 256), np.float32)
    lay_matrix(section, matrix, dense, rows)  # type: ignore[arg-type]
    operand = np.full((ROWS, groups * 4096), np.nan, np.float32)
    stride = section.tilings["m"].group_lanes
    assert stride == round_up(n, LANES)
    out = np.full((ROWS, groups * stride), np.nan, np.float32)
    linear.linear(section, Tape(rows.reshape(-1, 512, 256)), 0, jnp.asarray(x), matrix, operand, out)  # type: ignore[arg-type]
    assert np.isfinite(out).all()
    for group in range(groups):
        own = x[:, group * 4096 : (group + 1) * 4096]
        np.testing.assert_array_equal(out[:, group * stride :][:, :n], own @ dense[group])


def test_the_tape_of_a_model_is_taken_as_the_timeline_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix by matrix the blocks that are waited for and given back, looped products among them."""
    lengths = plain_loops(monkeypatch)
    for config, knobs in (
        (ModelConfig.preset("k3-nano"), {"block": (128, 128)}),
        (ModelConfig.preset("k3-mini"), {"cores": 4}),
        (ModelConfig.preset("k3-nano"), {"cores": 2, "block": (384, 256)}),
    ):
        plan = make_plan(config, context=64, ring_depth=2, **knobs)
        work = [item for item in work_of(plan) if item.block is not None]
        tape = Tape(np.zeros((plan.tape_blocks, plan.block_rows, plan.block_lanes), np.uint16))
        starts = {"kda": plan.layer_starts[0][0], "dense": plan.layer_starts[0][1], "head": plan.layer_starts[-1][0]}
        starts |= {"mla": plan.layer_starts[3][0], "moe": plan.layer_starts[3][1]}
        layers = {"kda": 0, "dense": 0, "mla": 3, "moe": 3, "head": config.num_hidden_layers}
        for section, matrices in plan.sections.items():
            for matrix in matrices:
                tape.log.clear()
                operand = np.zeros((plan.rows, plan.operand_width), np.float32)
                out = np.zeros((plan.rows, plan.output_width(matrix)), np.float32)
                x = jnp.zeros((plan.rows, matrix.groups * matrix.k), jnp.float32)
                linear.linear(plan, tape, starts[section], x, matrix, operand, out)  # type: ignore[arg-type]
                drawn = []
                for item in work:
                    if (item.name, item.layer) == (matrix.name, layers[section]):
                        drawn += [("wait", item.block)] * item.first + [("give back", item.block)] * item.last
                assert tape.log == drawn
    assert max(lengths) > 4


def test_rows_of_a_folded_product_do_not_depend_on_their_number() -> None:
    """The parts of a folded panel are rows of one product: a row's bits stay its own."""
    rng = np.random.default_rng(0)
    part = jnp.asarray(rng.standard_normal((5, 256)), jnp.float32)
    plan = Section((), 128, 256, product_rows=1, rows=1)
    several = dataclasses.replace(plan, product_rows=2, rows=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear.pltpu, "roll", jnp.roll)
        alone = linear._unfolded(plan, part, 4)  # type: ignore[arg-type]
        both = linear._unfolded(several, jnp.repeat(part, 2, axis=0), 4)  # type: ignore[arg-type]
    np.testing.assert_array_equal(jax.device_get(both), np.repeat(alone, 2, axis=0))


# ---- halves ----


def halved(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    plan = Section((), 128, 256, target=TARGETS["in halves"])
    product = linear._product_of_halves(plan, jnp.asarray(x), jnp.asarray(weights))  # type: ignore[arg-type]
    return np.asarray(linear._sum_of_halves(product, len(x)))


@pytest.mark.parametrize("rows", [1, 3, 8, 12, 16])
@pytest.mark.parametrize("inputs", [16, 128, 160, 384, 512, 528, 896, 1024])
def test_halves_meet_their_own_weights(inputs: int, rows: int) -> None:
    """In whole numbers, of which sums are exact."""
    rng = np.random.default_rng(inputs)
    x = rng.integers(-9, 9, (rows, inputs)).astype(np.float32)
    weights = rng.integers(-9, 9, (inputs, 256)).astype(np.float32)
    np.testing.assert_array_equal(halved(x, weights), x @ weights)


def test_halves_of_a_row_do_not_depend_on_the_number_of_rows() -> None:
    """A row stands where it stands among fewer, and so meets the same weights in the same order."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((16, 384)), jnp.float32)
    weights = jnp.asarray(rng.standard_normal((384, 256)), jnp.float32)
    inputs, side_by_side = linear._halves(x, weights)
    for rows in (1, 7, 8):
        fewer, same = linear._halves(x[:rows], weights)
        np.testing.assert_array_equal(same, side_by_side)
        np.testing.assert_array_equal(fewer[:rows], inputs[:rows])
        np.testing.assert_array_equal(fewer[8 : 8 + rows], inputs[8 : 8 + rows])


def test_what_goes_in_halves() -> None:
    """Where units sum by themselves: long panels of one unit's width, whatever the number of rows."""

    def goes(inputs: int, outputs: int, target: str = "in halves", lanes: int = 256, rows: int = ROWS) -> bool:
        matrix = Matrix("m", inputs, (Column("out", outputs, "", lanes=outputs),))
        section = Section((matrix,), 1024, lanes, target=TARGETS[target], product_rows=rows)
        panel = section.tilings["m"].panels[0]
        return linear._multiplies_in_halves(section, panel)  # type: ignore[arg-type]

    assert goes(512, 256)
    assert goes(7168, 128)  # in two parts
    assert goes(512, 256, rows=16)
    assert not goes(384, 256)
    assert not goes(7168, 32)  # in eight parts
    assert not goes(7168, 512, lanes=512)
    assert not goes(7168, 256, target="whole")
