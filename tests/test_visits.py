"""Experts meet the rows that chose them, no others: what is listed, what is summed, when a slot is refilled."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from launching import Ask, anew, random_model, run

from megakernel import NumericsError, Plan, find_target, make_plan
from megakernel.backends import simulator
from megakernel.bank import mxfp4_rows
from megakernel.memory import smem_scratch, vmem_buffers, weight_buffers
from megakernel.phases import experts as experts_phase
from megakernel.phases import visits as visits_phase
from megakernel.phases.experts import expert_hidden, expert_output, run_experts
from megakernel.phases.route import start_experts
from megakernel.phases.sums import addend
from megakernel.phases.visits import Visits
from megakernel.races import watch_races
from megakernel.stream import Experts
from megakernel.visits import expected_experts, expected_visits
from model.config import ModelConfig

V7X = find_target("v7x")
K3 = ModelConfig.preset("kimi-k3")
LATENT, INNER, TOP, ROWS, LAYER = 128, 64, 3, 4, 1
MANY = dataclasses.replace(
    ModelConfig.preset("k3-mini"), routed_expert_hidden_size=LATENT, moe_intermediate_size=INNER,
    num_experts=40, num_experts_per_token=TOP,
)  # fmt: skip
"""So many that a row rarely shares one: experts meet single rows."""
FEW = dataclasses.replace(MANY, num_experts=6)
"""So few that experts meet all rows."""
CONFIGS = {"single rows": MANY, "all rows": FEW}
CHOICES = {
    "apart": [[0, 1, 2], [3, 4, 5], [], []],
    "some shared": [[0, 2, 5], [1, 2, 3], [2, 3, 4], [0, 1, 5]],
    "all the same": [[1, 3, 5]] * 4,
    "first and last inactive": [[], [0, 4, 5], [1, 2, 4], []],
    "one row, one expert": [[], [], [5], []],
    "nobody": [[], [], [], []],
}


@functools.cache
def plan_for(config: ModelConfig, rows: int, slots: int | None, target: str = "v7x") -> Plan:
    return make_plan(config, find_target(target), sequences=rows, context=64, expert_slots=slots)


def weights_of(choice: list[list[int]], config: ModelConfig) -> np.ndarray:
    """[8, lanes] f32"""
    weights, rng = np.zeros((8, 128), np.float32), np.random.default_rng(3)
    for row, chosen in enumerate(choice):
        for expert in chosen:
            number = expert * (config.num_experts // 6)  # spread over all experts
            weights[row, number] = rng.uniform(0.1, 1)
    return weights


@functools.cache
def bank(config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Random codes, random scales around 2 ** -6."""
    rng, buffers = np.random.default_rng(0), weight_buffers(plan_for(config, 1, None))
    gate_up, down = (rng.integers(0, 1 << 32, buffers[name].shape, np.uint32) for name in ("bank_in", "bank_out"))
    code_rows, _ = mxfp4_rows(LATENT)
    scales = rng.integers(118, 124, (*gate_up[:, code_rows:].shape, 4), np.uint8)
    gate_up[:, code_rows:] = scales.view(np.uint32)[..., 0]
    return gate_up, down


def inputs() -> np.ndarray:
    """[8, latent] f32, values of the activation format"""
    x = np.random.default_rng(1).normal(size=(8, LATENT)).astype(np.float32)
    return np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))


def compiled(plan: Plan, interpret: Any = True) -> Any:
    """`start_experts` and `run_experts` in a kernel of their own: sums, then what was listed and how much of it."""
    vmem, smem = vmem_buffers(plan), smem_scratch(plan)
    lists = [jax.ShapeDtypeStruct(smem[name].shape, jnp.int32) for name in ("chosen_experts", "expert_visits")]

    def kernel(
        weights: Any, x: Any, bank_in: Any, bank_out: Any,
        total: Any, chosen: Any, listed: Any, counted: Any,
        slot_in: Any, slot_out: Any, in_done: Any, out_done: Any,
    ) -> None:  # fmt: skip
        experts = Experts(plan, (bank_in, bank_out), (slot_in, slot_out), (in_done, out_done), 0)
        visits = Visits(plan, chosen, listed)
        counts = start_experts(plan, weights[...], jnp.int32(LAYER), 0, experts, visits)
        run_experts(plan, counts, jnp.int32(LAYER), weights, x, experts, visits, total)
        counted[0], counted[1] = counts

    in_vmem, in_smem, in_hbm = (
        pl.BlockSpec(memory_space=space) for space in (pltpu.VMEM, pltpu.SMEM, pl.ANY)
    )  # fmt: skip
    slots = [pltpu.VMEM(vmem[name].shape, jnp.uint32) for name in ("expert_in", "expert_out")]
    call = pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct(vmem["expert_sum"].shape, jnp.float32),
            *lists,
            jax.ShapeDtypeStruct((2,), jnp.int32),
        ],
        in_specs=[in_vmem, in_vmem, in_hbm, in_hbm],
        out_specs=[in_vmem, in_smem, in_smem, in_smem],
        scratch_shapes=[*slots, *[pltpu.SemaphoreType.DMA((plan.expert_slots,))] * 2],
        interpret=interpret,
    )
    return jax.jit(call)


compiled_once = functools.cache(compiled)


def summed(plan: Plan, weights: np.ndarray, x: np.ndarray, call: Any = None) -> np.ndarray:
    """[8, latent] f32"""
    return np.asarray((call or compiled_once(plan))(weights, x, *bank(plan.config))[0])


@functools.cache
def outputs(config: ModelConfig) -> np.ndarray:
    """What each expert of the layer makes of each row alone.  # [experts, 8, latent] f32"""
    plan = plan_for(config, 1, None)

    def kernel(x: Any, gate_up: Any, down: Any, out: Any) -> None:
        out[...] = expert_output(plan, expert_hidden(plan, x[...], gate_up[...]), gate_up[...], down[...])

    one = jax.jit(pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((1, LATENT), jnp.float32), interpret=True))
    first = LAYER * config.num_experts
    banks = [array[first : first + config.num_experts] for array in bank(config)]
    rows = [inputs()[row : row + 1] for row in range(ROWS)]
    return np.array([[np.asarray(one(x, *expert))[0] for x in rows] for expert in zip(*banks, strict=True)])


def expected(config: ModelConfig, weights: np.ndarray) -> np.ndarray:
    """Sums in ascending order of expert, in float32.  # [8, latent]"""
    total = np.zeros((8, LATENT), np.float32)
    for row in range(ROWS):
        for expert in np.flatnonzero(weights[row]):
            total[row] += weights[row, expert] * outputs(config)[expert, row]
    return total


def check(plan: Plan, choice: str, call: Any = None) -> None:
    weights = weights_of(CHOICES[choice], plan.config)
    found = summed(plan, weights, inputs(), call)
    np.testing.assert_allclose(found, expected(plan.config, weights), rtol=1e-6, atol=1e-6)


# ---- how many rows make a tile ----


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
def test_experts_of_kimi_k3_meet_single_rows_on_a_tpu(rows: int) -> None:
    plan = make_plan(K3, V7X, cores=32, sequences=rows, context=4096, launch_steps=256)
    assert (plan.expert_rows, plan.expert_tiles, plan.max_expert_visits) == (1, rows, 16 * rows)
    assert plan.experts_held == 2


def test_where_experts_are_shared_or_decoded_they_meet_all_rows() -> None:
    for rows in (1, 2, 8, 16):
        cpu = make_plan(K3, dataclasses.replace(find_target("cpu"), smem_bytes=1 << 40), cores=32, sequences=rows,
                        context=128, ring_depth=2, expert_slots=1)  # fmt: skip
        assert (cpu.expert_rows, cpu.expert_tiles, cpu.experts_held) == (max(2, rows), 1, 1)
    assert plan_for(FEW, 8, None).expert_rows == 8
    assert plan_for(FEW, 2, None).expert_rows == 2
    assert make_plan(ModelConfig.preset("kimi-linear-48b"), V7X, cores=4, sequences=4, context=256).expert_rows == 8


def test_expected_visits_are_those_of_a_lottery() -> None:
    plan, rng = make_plan(K3, V7X, cores=32, sequences=8, context=4096, launch_steps=256), np.random.default_rng(0)
    drawn = [[rng.permutation(K3.num_experts)[:16] for _ in range(8)] for _ in range(500)]
    ratio = np.mean([8 * 16 / len(np.unique(rows)) for rows in drawn])
    assert expected_visits(plan) / expected_experts(plan) == pytest.approx(ratio, rel=0.01)
    assert expected_visits(plan_for(FEW, 8, None)) == expected_experts(plan_for(FEW, 8, None))


# ---- what is listed ----


@pytest.mark.parametrize("choice", CHOICES)
def test_every_expert_is_listed_once_and_every_row_that_chose_it(choice: str) -> None:
    plan = plan_for(MANY, ROWS, 2)
    weights = weights_of(CHOICES[choice], MANY)
    _, chosen, listed, (experts, visits) = compiled_once(plan)(weights, inputs(), *bank(MANY))
    wanted = np.flatnonzero(weights.any(axis=0)).tolist()
    assert np.asarray(chosen)[:experts].tolist() == wanted
    pairs = [(order, row) for order, expert in enumerate(wanted) for row in range(ROWS) if weights[row, expert]]
    assert [divmod(int(code), 16) for code in np.asarray(listed)[:visits]] == pairs


# ---- what is summed ----


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("slots", [1, 2, 3, None])
@pytest.mark.parametrize("form", CONFIGS)
def test_sums_are_those_of_the_rows_own_experts(form: str, slots: int | None, choice: str) -> None:
    plan = plan_for(CONFIGS[form], ROWS, slots)
    assert plan.expert_tiles == (ROWS if form == "single rows" else 1)
    check(plan, choice)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("form", CONFIGS)
def test_a_row_s_sum_has_the_bits_that_it_has_alone(form: str, choice: str) -> None:
    config = CONFIGS[form]
    weights, alone = weights_of(CHOICES[choice], config), plan_for(config, 1, 2)
    found = summed(plan_for(config, ROWS, 2), weights, inputs())
    for row in range(ROWS):
        own_weights, own_x = np.zeros_like(weights), np.zeros_like(inputs())
        own_weights[0], own_x[0] = weights[row], inputs()[row]
        np.testing.assert_array_equal(found[row], summed(alone, own_weights, own_x)[0])


# ---- slots ----


@pytest.mark.parametrize("direction", ["on_wait", "eager"])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("form", CONFIGS)
def test_no_slot_is_refilled_before_its_last_reader(form: str, slots: int, direction: str) -> None:
    plan = plan_for(CONFIGS[form], ROWS, slots)
    call = compiled(plan, simulator(direction))
    for choice in ("some shared", "all the same", "nobody"):
        with watch_races() as races:
            check(plan, choice, call)
        assert races.messages == []


def races_with_single_rows(slots: int) -> list[str]:
    plan = plan_for(MANY, ROWS, slots)
    with watch_races() as races:
        summed(plan, weights_of(CHOICES["some shared"], MANY), inputs(), compiled(plan, simulator("eager")))
    return races.messages


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_while_one_expert_is_met_another_is_on_its_way(slots: int) -> None:
    """But with one slot: what is held at once leaves a slot, or there are no more experts than slots."""
    for config in (MANY, FEW):
        plan = plan_for(config, ROWS, slots)
        assert plan.experts_held < max(2, plan.expert_slots)
    linear = make_plan(ModelConfig.preset("kimi-linear-48b"), V7X, cores=2, sequences=4)
    assert linear.max_distinct_experts > linear.expert_slots > linear.experts_held


@pytest.mark.parametrize("slots", [2, 3])
def test_a_slot_refilled_one_expert_early_is_a_race(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert races_with_single_rows(slots) == []
    start_ahead = experts_phase._Layer.start_ahead
    monkeypatch.setattr(experts_phase._Layer, "start_ahead", lambda layer, order: start_ahead(layer, order + 1))
    assert races_with_single_rows(slots)


def test_an_expert_that_every_visit_takes_for_met_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits_phase.Visits, "is_first", lambda visits, visit: visit == 0)
    assert races_with_single_rows(8)


# ---- mistakes that the sums must show ----


def fails(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, broken: Any) -> None:
    plan = plan_for(MANY, ROWS, 2)
    check(plan, "some shared")
    monkeypatch.setattr(owner, method, broken)
    with pytest.raises(AssertionError):
        check(plan, "some shared", compiled(plan))


def test_a_row_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    every = Visits.list
    fails(monkeypatch, Visits, "list", lambda visits, order, tiles, count: every(visits, order, tiles & ~1, count))


def test_a_visit_to_the_wrong_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, Visits, "rows", lambda visits, visit: pl.ds((visits.listed[visit] + 1) % 4, 1))


def test_a_hidden_vector_of_another_visit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = experts_phase._Layer
    hidden = layer.hidden
    fails(monkeypatch, layer, "hidden", lambda self, visit: hidden(self, jnp.maximum(visit - 1, 0)))


# ---- overflow ----


@pytest.mark.parametrize("flips_sign", [False, True])
def test_an_expert_that_overflows_is_reported_either_way(flips_sign: bool) -> None:
    """One output of one expert becomes infinite, of either sign; it must not pass for a large number."""
    model = anew(random_model())
    expert = "model.layers.2.block_sparse_moe.experts.1"
    changed = {}
    for matrix in ("w1", "w3"):
        scales = model.weights[f"{expert}.{matrix}.weight_scale"]
        changed[f"{expert}.{matrix}.weight_scale"] = np.minimum(scales.astype(int) + 12, 254).astype(np.uint8)
    scales, codes = (model.weights[f"{expert}.w2.weight_{part}"].copy() for part in ("scale", "packed"))
    scales[5] = 252
    codes[5] ^= 0x88 if flips_sign else 0
    changed |= {f"{expert}.w2.weight_scale": scales, f"{expert}.w2.weight_packed": codes}
    model.weights = {**model.weights, **changed}
    with pytest.raises(NumericsError, match="layer 2"):
        run(model, Ask((7,), new=1))


def test_an_addend_is_a_finite_product_or_no_number() -> None:
    largest = float(np.finfo(np.float32).max)
    values = jnp.float32([0.0, -0.0, 1.5, -largest, largest, jnp.inf, -jnp.inf, jnp.nan, -largest])
    factors = jnp.float32([2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0])
    found = np.asarray(addend(factors, values))
    np.testing.assert_array_equal(found[:5], np.float32([0.0, -0.0, 3.0, -largest, largest]))
    assert np.isnan(found[5:]).all()
