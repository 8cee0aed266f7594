"""The model of time: its bytes are the plan's, it moves the right way, and it is checked on another kernel."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import pytest

from megakernel import find_target, make_plan
from megakernel.__main__ import main
from megakernel.cost import Cost, predict
from megakernel.cost_report import compares, comparison_text, cost_text
from megakernel.messages import WIRE_BYTES, gather_lanes, totals_inbox
from megakernel.other_kernel import GOAL_SECONDS, PUBLISHED_SECONDS, READINGS, check_rates, other_kernel_seconds
from megakernel.phase_bundles import DRAFTING, PHASES
from megakernel.pipeline import KINDS
from megakernel.plan import BYTES, Plan
from megakernel.rates import rates_of
from megakernel.schedule import Loop
from megakernel.visits import expected_experts
from model.config import ModelConfig

V7X = find_target("v7x")
K3 = ModelConfig.preset("kimi-k3")


@functools.cache
def k3(rows: int = 1, context: int = 4096, **knobs: int) -> Plan:
    return make_plan(K3, V7X, cores=32, sequences=rows, context=context, launch_steps=256, **knobs)


@functools.cache
def k3_cost(rows: int = 1, context: int = 4096) -> Cost:
    return predict(k3(rows, context))


def plans() -> list[Plan]:
    nano, linear = ModelConfig.preset("k3-nano"), ModelConfig.preset("kimi-linear-48b")
    return [
        k3(1),
        k3(8),
        make_plan(nano, V7X, context=1024, ring_depth=4),
        make_plan(nano, V7X, cores=4, sequences=3, context=1024),
        make_plan(linear, V7X, cores=2, context=2048),
    ]


@pytest.mark.parametrize("plan", plans(), ids=lambda plan: f"{plan.config.name}-{plan.split.cores}-{plan.sequences}")
def test_bytes_are_those_of_the_plan_with_the_experts_that_are_expected(plan: Plan) -> None:
    experts = plan.moe_layers * expected_experts(plan) * plan.expert_bytes
    assert predict(plan).hbm_bytes == pytest.approx(sum({**plan.step_bytes, "experts": experts}.values()))


@pytest.mark.parametrize("plan", plans(), ids=lambda plan: f"{plan.config.name}-{plan.split.cores}-{plan.sequences}")
def test_the_step_is_what_its_phases_take_and_no_less_than_anything_alone(plan: Plan) -> None:
    cost = predict(plan)
    assert cost.seconds == pytest.approx(sum(phase.total_seconds for phase in cost.phases))
    assert cost.seconds == pytest.approx(sum(cost.by_kind(kind) for kind in KINDS))
    assert cost.seconds >= 0.999 * max(cost.alone["HBM"], cost.alone["computing"]) >= cost.floor_seconds * 0.999
    assert cost.spans[0].begin == 0.0
    assert cost.spans[-1].end == pytest.approx(cost.seconds)
    assert all(a.end == pytest.approx(b.begin) for a, b in zip(cost.spans, cost.spans[1:], strict=False))


def test_more_rows_and_longer_contexts_take_longer() -> None:
    seconds = [k3_cost(rows).seconds for rows in (1, 2, 4, 8)]
    assert seconds == sorted(seconds)
    assert len(set(seconds)) == 4
    assert k3_cost(1, 32768).seconds > k3_cost(1).seconds
    assert predict(k3(1), position=4000).hbm_bytes > predict(k3(1), position=200).hbm_bytes


def test_a_deeper_ring_never_takes_longer() -> None:
    seconds = [predict(k3(ring_depth=depth)).seconds for depth in (2, 8, 16)]
    assert seconds == sorted(seconds, reverse=True)


def test_slower_exchanges_take_longer_by_no_more_than_their_number() -> None:
    rates = rates_of(V7X)
    slower = predict(k3(), rates=dataclasses.replace(rates, exchange_seconds=rates.exchange_seconds + 1e-6))
    exchanges = sum(phase.exchanges for phase in slower.phases)
    assert 0 < slower.seconds - k3_cost().seconds <= exchanges * 1e-6 * 1.001


@pytest.mark.parametrize("hops", [1, 2])
def test_every_exchange_of_the_kernel_is_there_and_none_is_wider_than_its_buffer(hops: int) -> None:
    cost = predict(k3(hops=hops))
    found = {phase.name: phase.exchanges for phase in cost.phases}
    assert found["KDA"] == (1 + hops) * len(K3.kda_layers)
    assert found["MLA"] == (1 + hops) * len(K3.mla_layers)
    assert found["MoE"] == (3 + hops) * cost.plan.moe_layers
    assert found["dense"] == hops
    widest = max(
        phase.sent_bytes / phase.exchanges for phase in cost.phases if phase.name != "sampling" and phase.exchanges
    )
    piece = cost.plan.wire_rows * gather_lanes(cost.plan) * BYTES[cost.plan.activations]
    partial = math.prod(totals_inbox(cost.plan, hops)) * WIRE_BYTES[cost.plan.wire]
    assert widest <= 31 * max(piece, partial)
    assert len(cost.flights) == sum(found.values())


def test_one_core_exchanges_nothing_and_a_resident_tape_is_not_read() -> None:
    cost = predict(make_plan(ModelConfig.preset("k3-mini"), V7X))
    assert cost.plan.tape_is_resident
    assert not any(phase.exchanges for phase in cost.phases)
    assert next(phase for phase in cost.phases if phase.name == "LM head").hbm_bytes == 0


def named(name: str, bundles: int, *inner: Loop, turns: float = 1) -> Loop:
    return Loop(name, bundles=bundles, turns=turns, inner=list(inner))


def test_a_schedule_replaces_the_estimates_phase_by_phase() -> None:
    plan = k3()
    layer = named("layer", 1000, named("KDA", 50, turns=0.5), named("MoE", 70, named("expert", 10, turns=16)), turns=93)
    schedule = named("program", 9, named("round", 300, layer, named("product head", 20, turns=7)))
    cost = predict(plan, schedule=schedule)
    found = {phase.name: phase.bundles for phase in cost.phases}
    assert cost.compiled
    assert found["between sublayers"] == pytest.approx(93_000)
    assert found["KDA"] == pytest.approx(0.5 * 93 * 50)
    assert found["MoE"] == pytest.approx(93 * 70)
    assert found["experts"] == pytest.approx(93 * 160)
    assert found["LM head"] == pytest.approx(140)
    assert found["ends of a step"] == pytest.approx(300)
    assert cost.seconds < k3_cost().seconds
    assert cost.estimated == ("MLA", "dense", "sampling")
    assert "(predicted; bundles compiled, but estimated: MLA, dense, sampling)" in cost_text(cost)
    assert k3_cost().estimated == ()


def test_phases_are_known_by_name() -> None:
    assert {phase.name for phase in k3_cost().phases} == set(PHASES) - {DRAFTING}


def test_the_other_kernel_comes_out_within_what_the_text_says() -> None:
    checks = check_rates(rates_of(V7X))
    for reading in READINGS:
        found = [check for check in checks if check.reading == reading]
        assert [check.published for check in found] == list(PUBLISHED_SECONDS.values())
        predicted = [check.predicted for check in found]
        assert predicted == sorted(predicted)
    low, high = min(check.error for check in checks), max(check.error for check in checks)
    assert -0.34 < low < high < 0.34
    assert f"uncertain by {low:+.0%} to {high:+.0%} at least" in cost_text(k3_cost())


def test_the_readings_of_the_other_kernel_are_ordered_by_what_overlaps() -> None:
    rates = rates_of(V7X)
    for rows in PUBLISHED_SECONDS:
        late, serial, _ = (other_kernel_seconds(rates, rows, reading) for reading in READINGS)
        assert late < serial
    assert GOAL_SECONDS.keys() <= PUBLISHED_SECONDS.keys()


def test_the_text_says_of_which_kind_its_figures_are() -> None:
    text = cost_text(k3_cost())
    assert "(predicted; bundles estimated)" in text
    assert f"Predicted step: {k3_cost().seconds * 1e3:.2f} ms; bound by exchanges (if alone: HBM 1." in text
    assert "1 row 3.99 against 4.02 ms (-1%)" in text
    assert "at least. No TPU was used." in text
    assert text.count("Floor") == 1
    assert "measured" not in text.replace("published measurements of others", "").replace("(Kimi K3, 16 chips", "")
    for phase in k3_cost().phases:
        assert f"\n  {phase.name} " in text
    for other in ("1 x 32", "4 x 8", "32 x 1"):
        assert f"\n  {other} " in text


def test_the_table_has_a_line_for_every_published_number_of_rows() -> None:
    assert compares(k3())
    assert not compares(plans()[2])
    lines = comparison_text(k3, k3_cost()).splitlines()
    assert [line.split()[:2] for line in lines[2:6]] == [[rows, "estimated"] for rows in "1248"]
    assert lines[2].split()[2] == f"{k3_cost().seconds * 1e3:.2f}"
    assert lines[5].split()[-2:] == ["9.25", "2.58"]


def test_the_row_that_was_compiled_keeps_its_prediction_and_says_so() -> None:
    compiled = dataclasses.replace(k3_cost(2), compiled=True, seconds=0.001234)
    lines = comparison_text(k3, compiled).splitlines()
    assert [line.split()[1] for line in lines[2:6]] == ["estimated", "compiled", "estimated", "estimated"]
    assert lines[3].split()[2] == "1.23"


def test_times_of_small_models_are_in_microseconds() -> None:
    cost = predict(make_plan(ModelConfig.preset("k3-nano"), V7X))
    assert cost.floor_seconds == pytest.approx(cost.hbm_bytes / 3700e9)
    text = cost_text(cost)
    assert f"Predicted step: {cost.seconds * 1e6:.2f} us; bound by " in text
    assert f"take {cost.floor_seconds * 1e6:.2f} us, so {1 / cost.floor_seconds:,.0f} tokens/s at most\n" in text
    assert "0.00" not in text


def test_rows_that_do_not_fit_say_so_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "kimi-k3", "--target", "tpu7x:4x4x1", "--context", "8192"]
    assert main([*asked, "--launch-steps", "8192"]) == 0
    table = capsys.readouterr().out.partition("Steps of 1 to 8 rows")[2]
    assert re.search(r"\n  4     estimated +\d", table)
    assert re.search(
        r"\n  8     does not fit: kimi-k3 on one of 32 cores of v7x needs 0.8 MiB of SMEM, 0.5 MiB may", table
    )
    assert main(asked) == 0
    assert "does not fit" not in capsys.readouterr().out


def test_the_check_is_of_the_machine_that_was_measured() -> None:
    """Whatever machine the prediction is for."""
    nano = ModelConfig.preset("k3-nano")
    texts = [cost_text(predict(make_plan(nano, find_target(name)))) for name in ("v5e", "v7x")]
    checks = [text.partition("Check: ")[2] for text in texts]
    assert checks[0] == checks[1] != ""


def test_the_command_line_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "kimi-k3", "--target", "tpu7x:4x4x1", "--rows", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("kimi-k3 on one of 32 cores of v7x\n")
    assert "A step of 2 rows on one of 32 cores of v7x at position 2,048 (predicted" in text
    assert text.count("Floor") == 1
    assert "Steps of 1 to 8 rows" in text
    assert main(["plan", "k3-nano", "--target", "tpu7x:2x2x1", "--cores", "4"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("k3-nano on one of 4 cores of v7x\n")
    assert "Steps of 1 to 8 rows" not in text
    assert main(["plan", "k3-nano", "--target", "cpu"]) == 0
    assert "redicted step" not in capsys.readouterr().out
