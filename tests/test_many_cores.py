"""One model on several cores: the tokens of one core, logits as close as rounding allows, equal bits on every core."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from launching import Ask, Ran, anew, launch_once, open_session, random_model, relative_error

from megakernel import LoadedModel, NumericsError, PlanError, SamplingParams, decode, find_target, make_plan, totals
from megakernel.collectives import Exchange
from megakernel.loading import SHIPPED, load
from megakernel.mesh import core_mesh
from megakernel.races import watch_races
from megakernel.session import Session
from model.reference import forward, load_model
from spec_decode.ngram import NGramDrafter

ASK = Ask((7, 45, 300, 122, 9), new=12)
ROUND_OFF = 2.0**-24
"""Of float32, relative."""


def wide_model() -> LoadedModel:
    """Eight heads of each kind, a latent width of one and a half tiles, experts that do not divide into groups."""
    return random_model(
        "k3-mini",
        hidden_size=384,
        num_attention_heads=8,
        kda_num_heads=8,
        routed_expert_hidden_size=192,
        num_experts=10,
        num_experts_per_token=3,
        moe_intermediate_size=128,
    )


def plain_model() -> LoadedModel:
    """Kimi-Linear's variants: low-rank gates, full-width experts, no query rank, no gate, no attention residuals."""
    return random_model(
        "k3-mini",
        use_full_rank_gate=False,
        latent_experts=False,
        latent_moe_use_norm=False,
        routed_expert_hidden_size=128,
        q_lora_rank=None,
        mla_use_output_gate=False,
        attn_res_block_size=0,
        gate_lower_bound=None,
        hidden_act="silu",
    )


MODELS = {"k3-mini": random_model, "wide": wide_model, "plain": plain_model}


@functools.cache
def on_one(name: str) -> Ran:
    return one_run(MODELS[name](), 1)


def one_run(model: LoadedModel, cores: int, ask: Ask = ASK, **how: Any) -> Ran:
    session = open_session(model, 1, cores=cores, **how)
    (ran,) = launch_once(session, [ask])
    assert ran is not None
    if cores > 1:
        check_equal_bits(session)
    return ran


def check_equal_bits(session: Session) -> None:
    """What every core works out for itself: results, and latents made from the residual stream."""
    for name in ("new_tokens", "logprobs", "status"):
        shards = [np.asarray(shard.data) for shard in session.device_results[name].addressable_shards]
        assert len(shards) == session.plan.split.cores
        for shard in shards:
            np.testing.assert_array_equal(shard, shards[0], err_msg=name)
    latents = np.split(np.asarray(session.caches["latents"], np.float32), session.plan.split.cores)
    for other in latents:
        np.testing.assert_array_equal(other, latents[0])


@functools.cache
def bound(name: str) -> float:
    """Of the logits' relative error: sums in another order are off like a random walk of as many roundings as the
    longest sum has terms; how the model passes on relative changes is measured on the reference. Twice that."""
    model, change = MODELS[name](), 1e-5
    rng = np.random.default_rng(1)
    other = {
        key: tensor if tensor.dtype == np.uint8 else tensor * (1 + change * rng.uniform(-1, 1, tensor.shape))
        for key, tensor in model.weights.items()
    }
    tokens = jnp.asarray([on_one(name).fed])
    ours, theirs = (forward(load_model(weights, model.config), tokens) for weights in (model.weights, other))
    gain = relative_error(theirs, ours) / change
    config = model.config
    longest = max(config.hidden_size, config.intermediate_size, config.kda_width, config.shared_intermediate_size)
    return 2 * gain * ROUND_OFF * (longest + 16) ** 0.5


@pytest.mark.parametrize(
    ("name", "cores"),
    [("k3-mini", 2), ("k3-mini", 8), ("wide", 2), ("wide", 4), ("wide", 8), ("plain", 2), ("plain", 4)],
)
def test_same_tokens_as_one_core(name: str, cores: int) -> None:
    ran, expected = one_run(MODELS[name](), cores), on_one(name)
    assert ran.tokens == expected.tokens
    assert relative_error(ran.logits, expected.logits) < bound(name)
    np.testing.assert_allclose(ran.logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_any_division_of_the_experts(groups: int) -> None:
    ran = one_run(wide_model(), 4, expert_groups=groups)
    assert ran.tokens == on_one("wide").tokens
    assert relative_error(ran.logits, on_one("wide").logits) < bound("wide")


def test_three_cores() -> None:
    """No power of two: heads, columns and vocabulary leave the last core less, or nothing."""
    model = random_model("k3-mini", moe_intermediate_size=96)
    ran, expected = one_run(model, 3), one_run(model, 1)
    assert ran.tokens == expected.tokens
    assert relative_error(ran.logits, expected.logits) < bound("k3-mini")


def test_a_wrong_sum_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above goes red if one core's part is left out of the sums."""
    monkeypatch.setattr(totals, "in_order", lambda pieces: next(iter(pieces)))
    ran = one_run(anew(random_model()), 2)
    assert relative_error(ran.logits, on_one("k3-mini").logits) > 100 * bound("k3-mini")


@pytest.mark.parametrize("cores", [2, 4])
def test_a_tpu_plan_rounds_like_one_core(cores: int) -> None:
    """bfloat16 activations and wire. Both are off the float32 model by their roundings, so off each other by at most
    the sum; which the one-core plan's own distance from float32 bounds."""
    exact = on_one("k3-mini").logits
    forced = Ask(on_one("k3-mini").fed, new=1)
    one, many = (one_run(random_model(), n, forced, target="v7x") for n in (1, cores))
    own_error = relative_error(one.logits, exact[: len(one.logits)])
    assert relative_error(many.logits, exact[: len(many.logits)]) < 2 * own_error
    assert relative_error(many.logits, one.logits) < 3 * own_error


SAMPLING = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01)


@pytest.mark.parametrize("cores", [2, 4])
def test_several_sequences_sample_what_one_core_samples(cores: int) -> None:
    """Five rows on fewer cores than rows, each with its own sampling: rows are chosen by different cores."""
    asks = [Ask((5 + i, 17, 300 - i), new=4 + i, sampling=SAMPLING, seed=i) for i in range(4)]
    asks.append(Ask((9,), new=6))
    expected = launch_once(open_session(random_model(), 5), asks)
    session = open_session(random_model(), 5, cores=cores)
    for ours, theirs in zip(launch_once(session, asks), expected, strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.tokens == theirs.tokens
    check_equal_bits(session)


def test_speculation_on_several_cores_changes_nothing() -> None:
    plan = make_plan(
        random_model().config, cores=2, context=64, launch_steps=64, drafter=NGramDrafter(), draft_tokens=3
    )
    assert plan.tokens == 4
    plain = one_run(random_model(), 2, Ask((7, 8, 7, 8, 7, 8), new=16))
    session = open_session(random_model(), 1, cores=2, drafter=NGramDrafter(), draft_tokens=3)
    (result,) = session.launch([Ask((7, 8, 7, 8, 7, 8), new=16).request()])
    assert result is not None
    assert result.tokens == plain.tokens
    assert result.logprobs == plain.logprobs


@pytest.mark.skipif(not (SHIPPED / "k3-nano" / "model.safetensors").is_file(), reason="no weights of k3-nano here")
def test_decode_on_several_cores() -> None:
    model = load("k3-nano")
    one, two = (decode(model, "Fellow citizens of the", max_new_tokens=12, cores=cores) for cores in (1, 2))
    assert two.text == one.text


# ---- in simulated memories ----


@pytest.mark.slow
@pytest.mark.parametrize(("cores", "mode"), [(2, "on_wait"), (2, "eager"), (4, "on_wait"), (8, "eager")])
def test_simulated_without_races(cores: int, mode: str) -> None:
    ask = Ask((7, 45), new=1)
    with watch_races() as races:
        ran = one_run(random_model(), cores, ask, simulate=mode, launch_steps=4)
    assert races.messages == []
    plainly = one_run(random_model(), cores, ask, launch_steps=4)
    np.testing.assert_array_equal(ran.logits, plainly.logits)


FAULTS = {
    "a dropped wait for what arrives": lambda patch: patch.setattr(Exchange, "_wait_received", lambda self, half: None),
    "a half of the inbox reused one phase early": lambda patch: patch.setattr(
        Exchange, "_other", staticmethod(lambda half: half)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_protocol_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    session = open_session(anew(random_model()), 1, cores=2, simulate="eager", launch_steps=4)
    with watch_races() as races, contextlib.suppress(NumericsError):  # what was not waited for may still be NaN
        launch_once(session, [Ask((7, 45), new=1)])
    assert races.messages


# ---- refusals ----


def test_more_cores_than_devices() -> None:
    with pytest.raises(PlanError, match=r"cores = 9, and JAX sees 8 devices; .*jax_num_cpu_devices., 9"):
        core_mesh(9)


@pytest.mark.parametrize(
    ("changes", "knobs", "message"),
    [
        ({}, {"cores": 0}, "cores = 0; expected a positive integer"),
        ({}, {"cores": True}, "cores = True; expected a positive integer"),
        ({"hidden_size": 144}, {"cores": 2}, "hidden_size = 144 is no multiple of 128: 2 cores cannot share it"),
        ({}, {"cores": 4, "expert_groups": 3}, "4 cores cannot share experts of width 64 in 3 groups"),
    ],
)
def test_a_mesh_that_does_not_divide_the_model(changes: dict, knobs: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(random_model("k3-mini", **changes).config, find_target("cpu"), context=64, **knobs)
