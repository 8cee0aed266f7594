"""Sums over cores in one hop and in two, over wires of all formats; how pieces come to lie side by side."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from launching import Ask, anew, launch_once, needs_nano, open_session, random_model
from test_many_cores import ASK, MODELS, check_equal_bits, one_run

from benchmarks.wire import END_OF_TEXT, EXCERPT, difference, read
from megakernel import NumericsError, PlanError, decode, find_target, load, make_plan
from megakernel.cost import predict
from megakernel.messages import EIGHT_BITS, WIRE_BYTES, hops_of_sums, total_seconds, total_widths, totals_inbox
from megakernel.program import LANES, round_up
from megakernel.races import watch_races
from megakernel.rates import rates_of
from megakernel.session import Session
from megakernel.wire import scaled, side_by_side, unscaled
from model.config import ModelConfig
from spec_decode import NGramDrafter

K3 = ModelConfig.preset("kimi-k3")
SHORT = Ask(ASK.tokens, new=4)


# ---- one hop or two ----


@pytest.mark.parametrize(
    ("name", "cores", "wire"),
    [
        ("k3-mini", 2, "float32"),
        ("wide", 4, "float32"),
        ("plain", 2, "float32"),
        ("k3-mini", 4, "bfloat16"),
        ("wide", 4, "int8"),
        ("k3-mini", 3, "float8_e4m3fn"),
    ],
)
def test_one_hop_gives_the_bits_of_two(name: str, cores: int, wire: str) -> None:
    model = random_model("k3-mini", moe_intermediate_size=96) if cores == 3 else MODELS[name]()
    one, two = (one_run(model, cores, SHORT, wire=wire, hops=hops) for hops in (1, 2))
    assert one.tokens == two.tokens
    np.testing.assert_array_equal(one.logits, two.logits)


def test_hops_may_differ_between_plans_of_one_row_and_of_two() -> None:
    """What a verification of drafts relies on: a row's bits are those of a plan with fewer rows."""
    asks = [SHORT, Ask((9, 8), new=4)]
    (alone,) = launch_once(open_session(random_model(), 1, cores=4, target="v7x", hops=1), asks[:1])
    together, _ = launch_once(open_session(random_model(), 2, cores=4, target="v7x", hops=2), asks)
    assert alone is not None
    assert together is not None
    np.testing.assert_array_equal(alone.logits, together.logits)


@pytest.mark.parametrize(("wire", "rows"), [("bfloat16", 3), ("int8", 2)])
def test_several_rows_in_one_hop(wire: str, rows: int) -> None:
    asks = [Ask((5 + i, 17, 300 - i), new=3) for i in range(rows)]
    found = []
    for hops in (1, 2):
        session = open_session(random_model(), rows, cores=2, wire=wire, hops=hops)
        found.append([ran and ran.logits for ran in launch_once(session, asks)])
        check_equal_bits(session)
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.slow
@pytest.mark.parametrize(("cores", "mode", "wire"), [(2, "eager", "float32"), (4, "on_wait", "int8")])
def test_one_hop_simulated_without_races(cores: int, mode: str, wire: str) -> None:
    ask = Ask((7, 45), new=1)
    with watch_races() as races:
        ran = one_run(random_model(), cores, ask, simulate=mode, launch_steps=4, wire=wire, hops=1)
    assert races.messages == []
    np.testing.assert_array_equal(
        ran.logits, one_run(random_model(), cores, ask, launch_steps=4, wire=wire, hops=1).logits
    )


@pytest.mark.parametrize(
    ("rows", "wire", "one_hop"),
    [(1, None, {7168, 3584}), (2, None, {3584}), (2, "int8", {7168, 3584}), (4, "int8", {3584}), (8, None, set())],
)
def test_the_faster_number_of_hops_is_chosen(rows: int, wire: str | None, one_hop: set[int]) -> None:
    """By the published rates of an exchange, for each width of Kimi K3 on 32 cores."""
    exchange = rates_of(find_target("v7x")).exchange
    plan = make_plan(K3, find_target("v7x"), cores=32, sequences=rows, wire=wire)
    assert plan.one_hop == one_hop
    for width in total_widths(plan):
        seconds = {hops: total_seconds(plan, width, hops, exchange) for hops in (1, 2)}
        assert seconds[plan.hops(width)] == min(seconds.values())


def test_sums_of_one_plan_go_in_one_hop_and_in_two() -> None:
    """Narrow sums in one, wide ones in two: the bits of either alone."""
    model = MODELS["wide"]()
    narrow = model.config.routed_expert_hidden_size
    plain = open_session(model, 1, cores=4, hops=2)
    mixed = Session(model, dataclasses.replace(plain.plan, one_hop=frozenset({narrow})), plain.backend)
    assert [mixed.plan.hops(width) for width in (narrow, model.config.hidden_size)] == [1, 2]
    found = [launch_once(session, [SHORT])[0] for session in (plain, mixed)]
    np.testing.assert_array_equal(*(ran.logits for ran in found if ran))


def test_every_sum_of_a_drafter_has_its_exchange() -> None:
    """Also one of a width that the target has not, beside targets whose sums all go in one hop."""

    class Summing(NGramDrafter):
        @property
        def sum_widths(self) -> tuple[int, ...]:
            return (7168, 65536)

    plan = make_plan(K3, find_target("v7x"), cores=32, drafter=Summing(), draft_tokens=1)
    assert plan.one_hop == {3584}
    assert hops_of_sums(plan) == [1, 2]
    assert total_widths(plan) == (7168, 3584, 65536)
    assert totals_inbox(plan, 2) == (2, 65536 // 32)
    forced = make_plan(K3, find_target("v7x"), cores=32, drafter=Summing(), draft_tokens=1, hops=1)
    assert totals_inbox(forced, 1) == (2 * 65536 // LANES, LANES)


# ---- fewer bits ----


@functools.cache
def nano_tokens() -> list[int]:
    tokenizer = load("k3-nano").tokenizer
    assert tokenizer is not None
    return [END_OF_TEXT, *tokenizer.encode(EXCERPT.read_text())][:48]


ERRORS = {"int8": 0.013, "float8_e4m3fn": 0.028}
"""Relative rms error of normal numbers on a wire, see `test_collectives.test_error_of_a_wire`."""


@needs_nano
@pytest.mark.parametrize("wire", EIGHT_BITS)
def test_what_eight_bits_change_on_real_text(wire: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of the model's 12 sums is off by the wire's error at most, independently, and is part of what follows."""
    model, tokens = load("k3-nano"), nano_tokens()
    exact, plain, found = (read(model, tokens, 2, form) for form in ("float32", "bfloat16", wire))
    sums = 2 * model.config.num_hidden_layers
    with capsys.disabled():
        print(f"\n{wire}: logits off by {difference(found, exact):.4f}, bfloat16 by {difference(plain, exact):.4f}")
    assert difference(plain, exact) < difference(found, exact) < ERRORS[wire] * sums**0.5


def test_a_row_that_is_not_finite_arrives_as_nan() -> None:
    x = np.random.default_rng(0).standard_normal((6, 256)).astype(np.float32)
    x[1, 7], x[3, 200], x[4] = np.nan, -np.inf, 0.0
    for wire in EIGHT_BITS:
        values, exponents = jax.jit(functools.partial(scaled, wire=wire))(x)
        back = np.asarray(unscaled(values.astype(wire), exponents.astype(wire)))
        assert np.isnan(back[[1, 3]]).all()
        assert np.isfinite(back[[0, 2, 4, 5]]).all()
        assert not back[4].any()


def test_the_largest_and_the_smallest_rows_survive() -> None:
    sizes = np.float32([3.2e38, 1e38, 1.0, 1e-30])[:, None]
    x = sizes * np.float32([[1.0, -0.5, 0.25, 0.0]])
    for wire in EIGHT_BITS:
        values, exponents = jax.jit(functools.partial(scaled, wire=wire))(x)
        back = np.asarray(unscaled(values.astype(wire), exponents.astype(wire)))
        np.testing.assert_allclose(back, x, rtol=2.0**-4)


@pytest.mark.parametrize("hops", [1, 2])
def test_nan_does_not_get_lost_on_eight_bits(hops: int) -> None:
    broken = anew(random_model())
    name = "model.layers.1.self_attn.o_proj.weight"
    broken.weights = {**broken.weights, name: np.full_like(broken.weights[name], np.nan)}
    with pytest.raises(NumericsError, match="layer 1"):
        one_run(broken, 2, SHORT, wire="int8", hops=hops)


# ---- arguments ----


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"cores": 2, "wire": "int4"}, "wire = 'int4'; expected one of float32, bfloat16, int8, float8_e4m3fn"),
        ({"cores": 2, "hops": 3}, "hops = 3; expected one of 1, 2"),
        ({"wire": "int8"}, "wire = 'int8': with cores = 1 nothing travels"),
        ({"hops": 1}, "hops = 1: with cores = 1 nothing travels"),
    ],
)
def test_refusals(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(random_model().config, context=64, **knobs)


@needs_nano
def test_decode_takes_a_wire() -> None:
    model = load("k3-nano")
    found = decode(model, "Fellow citizens of the", max_new_tokens=8, cores=2, wire="bfloat16")
    assert found.text == decode(model, "Fellow citizens of the", max_new_tokens=8).text
    with pytest.raises(ValueError, match="wire = 'int8': backend 'reference' has none"):
        decode(model, "Fellow", backend="reference", wire="int8")


def test_narrower_wires_send_fewer_bytes() -> None:
    plans = [make_plan(K3, find_target("v7x"), cores=32, wire=wire, hops=1) for wire in WIRE_BYTES]
    sent = [next(phase.sent_bytes for phase in predict(plan).phases if phase.name == "dense") for plan in plans]
    lines = 7168 // LANES
    expected = [31 * LANES * size * (lines + (wire in EIGHT_BITS)) for wire, size in WIRE_BYTES.items()]
    assert sent == expected


# ---- side by side ----


@pytest.mark.parametrize(
    ("width", "cores", "total"),
    [
        (1, 5, 5),
        (16, 8, 120),
        (32, 3, 96),
        (48, 4, 190),
        (64, 2, 128),
        (112, 32, 3584),
        (128, 3, 300),
        (192, 4, 768),
        (224, 6, 1340),
        (256, 2, 500),
        (320, 3, 960),
    ],
)
@pytest.mark.parametrize("first", [0, 1, 2])
def test_pieces_lie_side_by_side(width: int, cores: int, total: int, first: int) -> None:
    """Wherever a piece begins and ends in its tiles; `first` counts pieces that ride in front."""
    lanes = round_up((first + 1) * width, LANES)
    pieces = np.random.default_rng(width).standard_normal((cores, 8, lanes)).astype(np.float32)

    def kernel(pieces: Any, out: Any) -> None:
        out[...] = side_by_side(pieces, width, total, first * width)

    shape = jax.ShapeDtypeStruct((8, round_up(total, LANES)), jnp.float32)
    found = np.asarray(pl.pallas_call(kernel, out_shape=shape, interpret=True)(pieces))
    expected = np.concatenate(list(pieces[:, :, first * width : (first + 1) * width]), axis=1)[:, :total]
    np.testing.assert_array_equal(found[:, :total], expected)
    assert not found[:, total:].any()
