"""The DSpark drafter on several cores: drafts are the same on every core and on one, tokens those of plain decoding."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from against_plain import MINI_DRAFTER, drafter_weights
from launching import needs_nano, random_model
from speculating import Ask, open_session, run
from test_dspark_kernel import Logged
from test_pack import unpacked

from megakernel import PlanError, find_target, load, make_plan
from megakernel.aot import compile_for
from megakernel.loading import LoadedModel
from megakernel.pack import pack
from megakernel.races import watch_races
from megakernel.session import Session, SlotResult
from megakernel.split import Split
from model.config import ModelConfig
from model.sampling import SamplingParams
from spec_decode import DSparkDrafter, choose_drafter
from spec_decode.dspark.config import DSparkConfig, dspark_specs
from spec_decode.dspark.presets import KIMI_K3
from spec_decode.dspark.share import Share

DATA = Path(__file__).parent / "data"
TARGET = random_model(num_hidden_layers=3, mla_layers=(2,))
"""KDA twice, MLA once; dense and MoE."""
DRAFTER = dataclasses.replace(
    MINI_DRAFTER, tap_layers=(1, 3), hidden_size=256, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=32,
    intermediate_size=160, markov_rank=48, shares_embeddings=False,
)  # fmt: skip
"""Three query heads to a key-value head, widths of one and a quarter tiles, two tiles to sum."""
ASKS = (Ask((5, 6, 7, 8, 5, 6, 7), 6), Ask((9, 8), 9, SamplingParams(temperature=0.9), 3))
SIZES: dict[str, Any] = {"context": 64, "launch_steps": 32, "page": 16}


def fresh(model: LoadedModel) -> LoadedModel:
    """The same weights with nothing compiled or packed yet."""
    return LoadedModel(model.config, model.weights, model.tokenizer)


# ---- what each core holds ----


def test_the_public_speculator_has_its_size() -> None:
    assert sum(math.prod(spec.shape) for spec in dspark_specs(KIMI_K3).values()) == 4_744_900_481


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 5, 8, 16, 24, 32, 64, 96, 128])
@pytest.mark.parametrize("config", [KIMI_K3, DRAFTER, MINI_DRAFTER], ids=lambda config: config.name)
def test_every_query_head_meets_its_key_value_head(config: DSparkConfig, cores: int) -> None:
    share, readers = Share(config, Split(TARGET.config, cores)), config.num_heads // config.num_kv_heads
    held = []
    for core in range(cores):
        first_kv = core // share.kv_holders * share.kv_heads
        for head in range(core * share.heads, min((core + 1) * share.heads, config.num_heads)):
            own = head - core * share.heads
            assert first_kv + own // share.readers == head // readers
            held.append(head)
    assert held == list(range(config.num_heads))


def test_the_speculator_of_kimi_k3_is_near_an_even_share() -> None:
    """More than that: each key-value head is on two cores, and columns that fill no whole panel are padded, as blocks
    are chosen for the target."""
    target, drafter = ModelConfig.preset("kimi-k3"), DSparkDrafter(KIMI_K3)
    plan = make_plan(target, find_target("v7x"), cores=32, drafter=drafter, draft_tokens=7)
    share = Share(KIMI_K3, plan.split)
    assert (share.heads, share.kv_heads, share.kv_holders) == (3, 1, 2)
    even = 2 * sum(matrix.parameters for matrix in drafter.matrices(Split(target))) / 32
    twice = 2 * KIMI_K3.num_layers * 2 * 2 * KIMI_K3.num_kv_heads * KIMI_K3.head_dim * KIMI_K3.hidden_size / 32
    tape = plan.section_blocks("draft") * plan.block_bytes
    held, row = drafter.matrices(plan.split), 2 * plan.block_lanes
    assert 2 * sum(matrix.parameters for matrix in held) == even + twice
    cuts = [cut for matrix in held for panel in plan.tilings[matrix.name].panels for cut in panel.cuts]
    laid = row * sum(cut.rows for cut in cuts)
    unfilled = row * (plan.block_rows + 127 * len(cuts))  # an end, and before a cut less than a tile
    assert even + twice <= laid <= tape <= laid + unfilled
    assert tape <= 1.081 * even


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shared", [False, True])
def test_the_parts_of_all_cores_are_the_drafter(cores: int, shared: bool) -> None:
    config = dataclasses.replace(DRAFTER, shares_embeddings=shared, hidden_size=128 if shared else 256)
    target = random_model("k3-mini", moe_intermediate_size=192)
    tensors = {name: bfloat16(tensor) for name, tensor in drafter_weights(config).items()}  # as in a checkpoint
    drafter = DSparkDrafter(dataclasses.replace(config, tap_layers=(1, 3)))
    plan = make_plan(target.config, cores=cores, context=64, drafter=drafter)
    packed = [pack(plan, target.weights, tensors, core=core) for core in range(cores)]
    embedding = target.weights["model.embed_tokens.weight"]
    head = target.weights.get("lm_head.weight", embedding)
    tensors |= {"target.embed_tokens": embedding, "target.lm_head": head}

    rows = [a["tape"].view(ml_dtypes.bfloat16)[plan.draft_start :].reshape(-1, plan.block_lanes) for a in packed]
    seen = [np.zeros(part.shape, bool) for part in rows]
    holders = Share(config, plan.split).kv_holders
    for matrix in plan.sections["draft"]:
        parts = [unpacked(plan, matrix, part, read)[0] for part, read in zip(rows, seen, strict=True)]
        for column in matrix.columns:
            at = slice(matrix.offset(column.name), matrix.offset(column.name) + column.width)
            own = [part[:, at] for part in parts]
            assert column.shared_by == (holders if column.name[0] in "kv" else 1)
            for core, part in enumerate(own):
                np.testing.assert_array_equal(part, own[core - core % column.shared_by])
            whole = np.concatenate(own[:: column.shared_by], axis=0 if matrix.own_inputs else 1)
            check_whole(whole, bfloat16(tensors[column.tensor]).T)
    assert not any(part[~read].any() for part, read in zip(rows, seen, strict=True))

    table = "target.embed_tokens" if shared else "embed_tokens.weight"
    for name, tensor, width in (
        ("draft_embedding", tensors[table], plan.split.sum_piece(config.hidden_size)),
        ("draft_markov_w2", tensors["markov_head.markov_w2.weight"].T, plan.split.vocabulary),
    ):
        own = [values(arrays[name])[:, :width] for arrays in packed]
        check_whole(np.concatenate(own, axis=1), bfloat16(tensor))
    for arrays in packed:
        check_whole(values(arrays["draft_markov_w1"]), bfloat16(tensors["markov_head.markov_w1.weight"]))


def values(stored: np.ndarray) -> np.ndarray:
    """What an array of weights holds, whether kept as bits of bfloat16 or widened."""
    return stored.view(ml_dtypes.bfloat16) if stored.dtype == np.uint16 else stored


def bfloat16(tensor: np.ndarray) -> np.ndarray:
    return np.asarray(tensor).astype(ml_dtypes.bfloat16)


def check_whole(found: np.ndarray, expected: np.ndarray) -> None:
    """`expected` in the corner, zeros around it."""
    rows, columns = expected.shape
    np.testing.assert_array_equal(found[:rows, :columns], expected)
    assert not found[rows:].any()
    assert not found[:, columns:].any()


# ---- the same drafts and tokens ----


def launched(
    model: LoadedModel, cores: int, drafter: Any, weights: Any, asks: Any = ASKS, drafts: int = 3, **how: Any
) -> tuple[Session, list[SlotResult]]:
    session = open_session(model, drafter, drafts, len(asks), draft_weights=weights, cores=cores, **(SIZES | how))
    results = run(session, asks)
    if cores > 1:
        for name in ("new_tokens", "logprobs", "status", "accepted", "proposed"):
            shards = [np.asarray(shard.data) for shard in session.device_results[name].addressable_shards]
            assert len(shards) == cores
            for shard in shards:
                np.testing.assert_array_equal(shard, shards[0], err_msg=name)
    return session, results


def logged_drafts(session: Session) -> np.ndarray:
    """Every proposal of the launch; the same on every core.  # [rounds, drafts]"""
    plan, rounds = session.plan, session.results["round_tokens"]
    cores = np.split(np.asarray(session.caches["draft_log"]), plan.split.cores)
    for other in cores:
        np.testing.assert_array_equal(other, cores[0])
    return cores[0][: np.count_nonzero(rounds.sum(axis=0)), : plan.live_rows - plan.sequences, 0]


@functools.cache
def on_one() -> tuple[np.ndarray, list[list[int]]]:
    session, results = launched(TARGET, 1, Logged(DRAFTER), drafter_weights(DRAFTER))
    return logged_drafts(session), [result.tokens for result in results]


@functools.cache
def plain(asks: tuple[Ask, ...] = ASKS, penalties: bool = False) -> list[list[int]]:
    session = open_session(TARGET, penalties=penalties, **SIZES)
    return [run(session, [ask])[0].tokens for ask in asks]


@pytest.mark.parametrize("cores", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_cores_draft_what_one_core_drafts(cores: int) -> None:
    session, results = launched(TARGET, cores, Logged(DRAFTER), drafter_weights(DRAFTER))
    drafts, tokens = on_one()
    assert [result.tokens for result in results] == tokens == plain()
    np.testing.assert_array_equal(logged_drafts(session), drafts)
    assert len(np.unique(drafts)) > 10


@pytest.mark.slow
def test_key_value_heads_of_another_core_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They change the drafts, never the tokens."""
    monkeypatch.setattr(Share, "kv_holders", property(lambda share: 2))
    session, results = launched(fresh(TARGET), 2, Logged(DRAFTER), drafter_weights(DRAFTER))
    assert [result.tokens for result in results] == plain()
    assert not np.array_equal(logged_drafts(session), on_one()[0])


PENALISED = SamplingParams(repetition_penalty=1.8, frequency_penalty=0.5, logit_bias={17: 3.0, 290: 4.0})
FILTERED = SamplingParams(temperature=1.1, top_k=7, top_p=0.8, min_p=0.05)


@pytest.mark.slow
def test_drafts_obey_penalties_and_bias() -> None:
    asks = (Ask((5, 6, 7, 8, 5, 6, 7), 8, PENALISED), Ask((9, 8), 8, SamplingParams(temperature=0.9), 3))
    one, two = (
        launched(TARGET, cores, Logged(DRAFTER), drafter_weights(DRAFTER), asks, penalties=True) for cores in (1, 2)
    )
    assert [result.tokens for result in two[1]] == [result.tokens for result in one[1]] == plain(asks, True)
    np.testing.assert_array_equal(logged_drafts(two[0]), logged_drafts(one[0]))
    without, _ = launched(TARGET, 2, Logged(DRAFTER), drafter_weights(DRAFTER), (Ask(asks[0].prompt, 8), asks[1]))
    assert not np.array_equal(logged_drafts(without)[0], logged_drafts(two[0])[0])


@pytest.mark.slow
def test_drafts_without_the_filters_change_no_token() -> None:
    asks = (Ask((5, 6, 7, 8, 5, 6, 7), 8, FILTERED, 1), Ask((9, 8), 8, FILTERED, 2))
    session, results = launched(TARGET, 2, Logged(DRAFTER), drafter_weights(DRAFTER), asks)
    assert [result.tokens for result in results] == plain(asks)
    assert logged_drafts(session).any()


@pytest.mark.slow
@pytest.mark.parametrize("entries", [(37, 310), (200, 5), (383, 380)])
def test_equal_logits_go_to_the_lowest_entry(entries: tuple[int, int]) -> None:
    """The base logits are zero, and two entries have the same bias: both are the best, or neither is."""
    weights = drafter_weights(DRAFTER)
    bias = np.zeros_like(weights["markov_head.markov_w2.weight"])
    bias[list(entries)] = np.sign(weights["markov_head.markov_w1.weight"][min(entries)])
    weights |= {"lm_head.weight": np.zeros_like(weights["lm_head.weight"]), "markov_head.markov_w2.weight": bias}
    session, _ = launched(fresh(TARGET), 2, Logged(DRAFTER), weights, asks=ASKS[:1])
    assert set(np.unique(logged_drafts(session))) == {0, min(entries)}


@needs_nano
@pytest.mark.slow
@pytest.mark.parametrize("cores", [2, 4])
def test_the_shipped_drafter_is_as_good_on_several_cores(cores: int) -> None:
    model = load("k3-nano")
    draft = choose_drafter("dspark", model)
    assert draft is not None
    assert model.tokenizer is not None
    prompt = model.tokenizer.encode((DATA / "valid_excerpt.txt").read_text()[:120])
    asks = [Ask(prompt, 40)]
    sizes = {"context": 128, "launch_steps": 128, "page": 128}
    expected, ours = (launched(model, n, draft.drafter, draft.weights, asks, 7, **sizes) for n in (1, cores))
    without = run(open_session(model, **sizes), asks)
    assert ours[1][0].tokens == expected[1][0].tokens == without[0].tokens
    np.testing.assert_array_equal(ours[0].results["accepted"], expected[0].results["accepted"])
    assert ours[0].results["accepted"].sum() > 20


# ---- in simulated memories, and compiled ----


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["on_wait", "eager"])
def test_simulated_without_races(mode: str) -> None:
    asks, sizes = [Ask((7, 45, 9), 2)], {"context": 32, "launch_steps": 8, "page": 16, "ring_depth": 3}
    drafter, weights = Logged(DRAFTER), drafter_weights(DRAFTER)
    with watch_races() as races:
        session, results = launched(TARGET, 2, drafter, weights, asks, 2, simulate=mode, **sizes)
    assert races.messages == []
    plainly, expected = launched(TARGET, 2, drafter, weights, asks, 2, **sizes)
    assert results == expected
    np.testing.assert_array_equal(logged_drafts(session), logged_drafts(plainly))


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [1, 7])
def test_kimi_k3_and_its_speculator_compile_for_32_cores(drafts: int, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("libtpu")
    knobs = {"drafter": DSparkDrafter(KIMI_K3), "draft_tokens": drafts}
    plan = make_plan(ModelConfig.preset("kimi-k3"), find_target("v7x"), cores=32, **knobs)
    report = compile_for(plan)
    assert report.cores == 32
    with capsys.disabled():
        draft = plan.section_blocks("draft") * plan.block_bytes / 2**20
        print(f"\nkimi-k3 with {drafts} drafts, {draft:.1f} MiB of tape for the drafter on each core; {report}")


# ---- refusals ----


@pytest.mark.parametrize(
    ("changes", "cores", "target", "message"),
    [
        ({"hidden_size": 192}, 2, "cpu", r"hidden_size = 192, no multiple of 128: 2 cores cannot share it"),
        ({"hidden_size": 192}, 1, "v7x", r"hidden_size = 192, which does not fill the 128 lanes of v7x evenly"),
        ({"head_dim": 96}, 1, "v7x", r"head_dim = 96, which does not fill the 128 lanes of v7x evenly"),
    ],
)
def test_a_drafter_that_does_not_divide(changes: dict[str, int], cores: int, target: str, message: str) -> None:
    drafter = DSparkDrafter(dataclasses.replace(DRAFTER, **changes))
    with pytest.raises(PlanError, match=message):
        make_plan(ModelConfig.preset("k3-mini"), find_target(target), cores=cores, context=64, drafter=drafter)
