"""Speculation changes nothing but speed: tokens, log-probabilities, logits and caches are those of plain decoding.

All comparisons are bitwise. What is compared with is a plain launch, one token a round, of one sequence alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
from speculating import EVERY, GREEDY, SAMPLINGS, Ask, Scripted, caches_of, kept_logits, open_session, run

from megakernel import PlanError, decode, kernel, make_plan, rounds
from megakernel.drafting import Draft
from megakernel.loading import LoadedModel
from megakernel.memory import COMMIT, FULL, POSITION, ROUNDS, STOPPED, TOKEN
from megakernel.phases import kda, mla, sample
from megakernel.session import Session, SlotRequest
from model.config import ModelConfig
from model.reference import random_weights
from model.sampling import SamplingParams
from spec_decode import NGramDrafter
from spec_decode.dspark.config import DSparkConfig, dspark_specs
from spec_decode.dspark.drafter import DSparkDrafter

PROMPTS = ([5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [17], [300 - 7 * i for i in range(23)])
CONTEXT = 512
MINI_DRAFTER = DSparkConfig(
    name="mini", block_size=4, tap_layers=(1, 3, 5), mask_token_id=383, vocab_size=384, markov_rank=16,
    confidence_head=False, hidden_size=128, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
    intermediate_size=64, rms_norm_eps=1e-5, sliding_window=16, rope_theta=1e4, target_hidden_size=128,
    shares_embeddings=True,
)  # fmt: skip
"""A small drafter for k3-mini; with random weights it is nearly always wrong."""


@functools.cache
def mini() -> LoadedModel:
    config = ModelConfig.preset("k3-mini")
    return LoadedModel(config, random_weights(config, 0))


def drafter_weights(config: DSparkConfig, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: np.ones(spec.shape, np.float32)
        if "norm" in name
        else rng.normal(0, 1 / np.sqrt(spec.shape[-1]), spec.shape).astype(np.float32)
        for name, spec in dspark_specs(config).items()
    }


def session(drafter: object = None, drafts: int | None = None, sequences: int = 1, **how) -> Session:
    weights = drafter_weights(drafter.config) if isinstance(drafter, DSparkDrafter) else None
    sizes = {"context": CONTEXT, "launch_steps": CONTEXT}
    return open_session(mini(), drafter, drafts, sequences, draft_weights=weights, **sizes, **how)


@dataclasses.dataclass(frozen=True)
class Plain:
    """One sequence decoded without a drafter."""

    tokens: list[int]
    logprobs: list[float]
    logits: np.ndarray
    caches: dict[str, np.ndarray]
    steps: int
    reason: int


@functools.cache
def _plain(prompt: tuple[int, ...], new: int, sampling: SamplingParams, seed: int, stop: tuple[int, ...]) -> Plain:
    plain = session()
    plain.stop_tokens = list(stop)
    (result,) = run(plain, [Ask(prompt, new, sampling, seed)])
    caches = caches_of(plain, 0, result.steps)
    return Plain(result.tokens, result.logprobs, kept_logits(plain, 0), caches, result.steps, result.reason)


def plain(ask: Ask, stop: tuple[int, ...] = ()) -> Plain:
    return _plain(tuple(ask.prompt), ask.new, ask.sampling, ask.seed, stop)


def assert_same(ours: Session, slot: int, result, expected: Plain) -> None:
    assert result.tokens == expected.tokens
    assert result.logprobs == expected.logprobs
    assert (result.steps, result.reason) == (expected.steps, expected.reason)
    np.testing.assert_array_equal(kept_logits(ours, slot), expected.logits)
    for name, found in caches_of(ours, slot, expected.steps).items():
        np.testing.assert_array_equal(found, expected.caches[name], err_msg=name)


def scripts(asks: list[Ask]) -> dict[int, list[int]]:
    return {slot: [*ask.prompt, *plain(ask).tokens] for slot, ask in enumerate(asks)}


RIGHT: dict[str, Callable[[int], int]] = {
    "always right": lambda anchor: EVERY,
    "always wrong": lambda anchor: 0,
    "now and then": lambda anchor: anchor * 7 % 5,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafts", "sequences"), [(1, 1), (2, 3), (3, 1), (3, 4), (6, 2), (15, 1)], ids=lambda value: str(value)
)
def test_scripted_drafts_change_nothing(drafts: int, sequences: int) -> None:
    """About 3,000 tokens a case: right, wrong, mixed and random drafts; greedy and sampled; lengths differ."""
    drafter = Scripted()
    ours, made = session(drafter, drafts, sequences), 0
    rng = np.random.default_rng(drafts)
    for number, sampling in enumerate((GREEDY, *SAMPLINGS)):
        new = [41, 48, 30, 37] if sequences > 1 else [48]
        for shift in range(1 if sequences > 1 else len(PROMPTS)):
            prompts = [PROMPTS[(shift + slot) % len(PROMPTS)] for slot in range(sequences)]
            asks = [Ask(prompt, new[slot], sampling, 10 * number + slot) for slot, prompt in enumerate(prompts)]
            for rule in (*RIGHT, "random"):
                drafter.scripts.clear()
                drafter.scripts.update(scripts(asks))
                if rule == "random":
                    drafter.scripts.update({s: rng.integers(0, 384, CONTEXT).tolist() for s in range(sequences)})
                told = dataclasses.replace(drafter, right=RIGHT.get(rule, RIGHT["always right"]))
                ours.plan = dataclasses.replace(ours.plan, drafter=told)
                for slot, (ask, result) in enumerate(zip(asks, run(ours, asks), strict=True)):
                    assert_same(ours, slot, result, plain(ask))
                    made += len(result.tokens)
                    accepted = int(ours.results["accepted"][slot].sum())
                    if rule == "always wrong":
                        assert accepted == 0
                    if rule == "always right" and len(ask.prompt) > 1:
                        assert ours.results["status"][slot, ROUNDS] <= 2 + ask.new // (drafts + 1)
    assert made >= 1000


@pytest.mark.slow
def test_real_drafters_change_nothing() -> None:
    """Prompt lookup of single tokens, and a random DSpark drafter; 680 tokens."""
    made = 0
    every = np.random.default_rng(0).permutation(384)[:350].tolist()  # something to look nearly every token up in
    for drafter, drafts in ((NGramDrafter(shortest=1), 3), (DSparkDrafter(MINI_DRAFTER), 4)):
        ours = session(drafter, drafts, 2)
        prompts = (PROMPTS[0], every, PROMPTS[2]) if drafter.name == "ngram" else PROMPTS
        for number, sampling in enumerate((GREEDY, *SAMPLINGS)):
            for shift in range(2):
                asks = [Ask(prompts[shift + slot], 41 - 7 * slot, sampling, number + slot) for slot in range(2)]
                for slot, result in enumerate(run(ours, asks)):
                    assert_same(ours, slot, result, plain(asks[slot]))
                    made += len(result.tokens)
        proposed = ours.proposed.sum()
        assert proposed > 50, f"{drafter.name} proposed {proposed} drafts: this shows nothing"
    assert made >= 600


# The cases below share the plan of 3 drafts and one sequence.

K = 3


def told(right: Callable[[int], int], script: list[int], count: Callable[[int], int] = lambda anchor: EVERY) -> Session:
    ours = session(Scripted(), K)
    ours.plan = dataclasses.replace(ours.plan, drafter=Scripted({0: script}, right, count))
    return ours


@dataclasses.dataclass
class Played:
    """What a launch with a scripted drafter must report."""

    rounds: int
    proposed: list[int]
    accepted: list[int]
    patterns: list[int]


def play(prompt: int, new: int, right: Callable[[int], int], count: Callable[[int], int] = lambda a: EVERY) -> Played:
    """The rounds of a launch by plain arithmetic."""
    taken, made, drafted = 0, 0, 0
    played = Played(0, [0] * K, [0] * K, [])
    while made < new:
        given = prompt - taken
        if given > 1:
            rows = min(given, K + 1)
            emitted, made = rows, made + (rows == given)
            played.rounds += rows == given
        else:
            rows = min(1 + drafted, new - made)
            kept = min(rows - 1, right(taken) if drafted else 0)
            emitted, made = 1 + kept, made + 1 + kept
            played.rounds += 1
            played.patterns.append(kept)
            for k in range(rows - 1):
                played.proposed[k] += 1
                played.accepted[k] += k < kept
        taken += emitted
        drafted = min(count(taken), K)
    return played


def test_states_after_a_hundred_rounds_of_rejections() -> None:
    """Every number of accepted drafts, 0 to K, follows every other one; states, tails and latents stay exact."""
    order = np.random.default_rng(1).integers(0, K + 1, CONTEXT).tolist()
    ask = Ask(PROMPTS[0], 240, SamplingParams(temperature=1.0), 4)
    ours = told(order.__getitem__, scripts([ask])[0])
    (result,) = run(ours, [ask])
    assert_same(ours, 0, result, plain(ask))
    played = play(len(ask.prompt), ask.new, order.__getitem__)
    assert played.rounds >= 95
    assert len(set(itertools.pairwise(played.patterns))) == (K + 1) ** 2


def test_statistics() -> None:
    """Rounds, and drafts proposed and accepted by place, are what arithmetic says; prompt rows are no drafts."""
    right, count = (lambda anchor: anchor % 4), (lambda anchor: anchor * 3 % 5)
    for prompt in PROMPTS:
        ask = Ask(prompt, 37, SamplingParams(temperature=1.0), 5)
        ours = told(right, scripts([ask])[0], count)
        (result,) = run(ours, [ask])
        played = play(len(prompt), ask.new, right, count)
        assert ours.results["status"][0, ROUNDS] == played.rounds
        assert ours.results["proposed"][0, 1:].tolist() == played.proposed
        assert ours.results["accepted"][0, 1:].tolist() == played.accepted
        assert played.rounds + sum(played.accepted) == len(result.tokens)
        speculation = ours.speculation(0, len(result.tokens))
        assert speculation.tokens_per_round == pytest.approx(37 / played.rounds)
        assert speculation.accepted == tuple(played.accepted)
        assert speculation.proposed == tuple(played.proposed)
        shares = [a / p if p else 0.0 for a, p in zip(played.accepted, played.proposed, strict=True)]
        assert speculation.acceptance == pytest.approx(shares)


def test_stop_token_at_every_place_of_a_block() -> None:
    ask = Ask(PROMPTS[0], 40, SamplingParams(temperature=1.5), 6)
    tokens = plain(ask).tokens
    ours, reached = told(RIGHT["always right"], scripts([ask])[0]), set()
    for n in range(2 * (K + 1) + 1):
        ours.stop_tokens = [tokens[n]]
        (result,) = run(ours, [ask])
        assert result.reason == STOPPED
        assert result.tokens == tokens[: tokens.index(tokens[n]) + 1]
        assert_same(ours, 0, result, plain(ask, (tokens[n],)))
        reached.add(int(ours.results["round_tokens"][0][ours.results["round_tokens"][0] > 0][-1]))
    assert reached == {1, 2, 3, 4}


def test_limit_at_every_place_of_a_block() -> None:
    script = scripts([Ask(PROMPTS[0], 40)])[0]
    ours = told(RIGHT["always right"], script)
    for new in range(1, 2 * (K + 1) + 2):
        ask = Ask(PROMPTS[0], new)
        (result,) = run(ours, [ask])
        assert result.reason == FULL
        assert len(result.tokens) == new
        assert_same(ours, 0, result, plain(ask))


@pytest.mark.parametrize("drafter", [Scripted(), NGramDrafter()], ids=lambda drafter: drafter.name)
def test_plain_and_speculative_launches_take_turns(drafter) -> None:
    """One set of caches goes from hand to hand; the end is that of one plain launch."""
    ask = Ask(PROMPTS[0], 60, SAMPLINGS[0], 7)
    script = scripts([ask])[0]
    if isinstance(drafter, Scripted):
        drafter = dataclasses.replace(drafter, right=RIGHT["now and then"])
        drafter.scripts[0] = script
    quick = session(type(drafter)(), K)
    quick.plan = dataclasses.replace(quick.plan, drafter=drafter)
    slow = session()
    given, position, tokens, logprobs, caches = list(ask.prompt), 0, [], [], None
    for number, wanted in enumerate((5, 7, 1, 9, 4, 13, 2, 19)):
        mine = (slow, quick)[number % 2]
        if caches is not None:
            mine.caches = mine.caches | {name: value for name, value in caches.items() if name in mine.caches}
        known = script[: position + len(given)]
        (result,) = mine.launch([SlotRequest(given, position, known, wanted, ask.sampling, ask.seed)])
        tokens, logprobs = tokens + result.tokens, logprobs + result.logprobs
        position, given = position + result.steps, result.tokens[-1:]
        caches = {name: mine.caches[name] for name in ("states", "conv_tails", "latents")}
    assert tokens == plain(ask).tokens
    assert logprobs == plain(ask).logprobs
    for name, value in caches_of(mine, 0, position).items():
        np.testing.assert_array_equal(value, plain(ask).caches[name], err_msg=name)


class Spelled:
    """A tokenizer whose tokens have two letters each, so that a string can begin in one and end in the next."""

    def stream(self) -> Spelled:
        return self

    def push(self, tokens: list[int]) -> str:
        return "".join(chr(0x4E00 + token) + "." for token in tokens)

    def flush(self) -> str:
        return ""


@pytest.mark.slow
def test_stop_string_across_rounds_and_launches() -> None:
    """Found from inside a round, from one round to the next, and from one launch of 16 tokens to the next."""
    model = dataclasses.replace(mini(), tokenizer=Spelled(), derived={})
    how = {"max_new_tokens": 40, "sampling": SamplingParams(temperature=1.2), "seed": 3}
    whole = decode(model, [PROMPTS[0]], draft="none", **how)[0]
    assert len(whole.tokens) == 40
    drafter = Scripted({0: [*PROMPTS[0], *whole.tokens]})
    for n in (4, 5, 6, 7, 14, 15, 16):
        stop = chr(0x4E00 + whole.tokens[n]) + "." + chr(0x4E00 + whole.tokens[n + 1])
        found = [
            decode(model, [PROMPTS[0]], draft=draft, draft_tokens=drafts, stop=stop, **how)[0]
            for draft, drafts in (("none", None), (Draft(drafter, {}), K))
        ]
        for one in found:
            assert one.finish_reason == "stop"
            assert one.tokens == whole.tokens[: n + 2]
            assert one.text == whole.text[: 2 * n]
        assert found[1].speculation.rounds < len(found[1].tokens)


# What does not fit is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 512}, ("vocabulary of 512", "has 384")),
        ({"target_hidden_size": 64}, ("target hidden size of 64", "has 128")),
        ({"hidden_size": 96}, ("hidden size 96", "has 128")),
        ({"tap_layers": (1, 9)}, ("(1, 9)", "has 5")),
        ({"tap_layers": ()}, ("()", "has 5")),
    ],
    ids=["vocabulary", "target hidden size", "own hidden size", "missing layer", "no layer"],
)
def test_drafter_of_another_model(changes: dict, words: tuple[str, str]) -> None:
    drafter = DSparkDrafter(dataclasses.replace(MINI_DRAFTER, **changes))
    for refused in (
        lambda: make_plan(mini().config, drafter=drafter),
        lambda: decode(mini(), [PROMPTS[0]], draft=Draft(drafter, {})),
    ):
        with pytest.raises(PlanError) as caught:
            refused()
        for word in words:
            assert word in str(caught.value)


def test_too_many_drafts() -> None:
    with pytest.raises(PlanError, match=r"draft_tokens = 5; drafter 'dspark' makes 1 to 4"):
        make_plan(mini().config, drafter=DSparkDrafter(MINI_DRAFTER), draft_tokens=5)
    with pytest.raises(PlanError, match=r"draft_tokens = 16; drafter 'ngram' makes 1 to 15"):
        make_plan(mini().config, drafter=NGramDrafter(), draft_tokens=16)
    with pytest.raises(PlanError, match=r"draft_tokens = 0;"):
        make_plan(mini().config, drafter=NGramDrafter(), draft_tokens=0)
    with pytest.raises(PlanError, match=r"need 20 rows, and a step carries 16; lower draft_tokens to 3"):
        make_plan(mini().config, sequences=4, drafter=NGramDrafter(), draft_tokens=4)
    with pytest.raises(PlanError, match=r"draft_tokens = 3 without a drafter"):
        make_plan(mini().config, draft_tokens=3)


def test_refused_by_decode() -> None:
    with pytest.raises(PlanError, match=r"draft = 'oracle': no drafter for k3-mini; known: 'none', 'ngram', 'dspark'"):
        decode(mini(), [PROMPTS[0]], draft="oracle")
    with pytest.raises(PlanError, match=r"draft = 'dspark': no drafter for k3-mini; .*shipped: k3-nano-dspark"):
        decode(mini(), [PROMPTS[0]], draft="dspark")
    with pytest.raises(ValueError, match=r"draft = 'ngram': backend 'reference' decodes token by token"):
        decode(mini(), [PROMPTS[0]], draft="ngram", backend="reference")
    with pytest.raises(ValueError, match=r"draft_tokens = 3 with draft='none'"):
        decode(mini(), [PROMPTS[0]], draft_tokens=3)


# Mistakes: each must show in tokens, logits or caches


def noise_of_the_anchor_on_every_row(patch: pytest.MonkeyPatch) -> None:
    choose, draw, at = rounds._choose, sample.choose_token, []

    def row(step, number, sequence, token, infinite) -> None:
        at.append(token)
        choose(step, number, sequence, token, infinite)

    patch.setattr(rounds, "_choose", row)
    patch.setattr(sample, "choose_token", lambda x, scratch, how, position: draw(x, scratch, how, position - at[-1]))


def noise_one_position_late(patch: pytest.MonkeyPatch) -> None:
    draw = sample.choose_token
    patch.setattr(sample, "choose_token", lambda x, scratch, how, position: draw(x, scratch, how, position + 1))


def verify_rows_are_greedy(patch: pytest.MonkeyPatch) -> None:
    choose, draw, at = rounds._choose, sample.choose_token, []

    def row(step, number, sequence, token, infinite) -> None:
        at.append(token)
        choose(step, number, sequence, token, infinite)

    def cold(x, scratch, how, position):
        how = dataclasses.replace(how, temperature=jnp.where(at[-1] > 0, 0.0, how.temperature))
        return draw(x, scratch, how, position)

    patch.setattr(rounds, "_choose", row)
    patch.setattr(sample, "choose_token", cold)


def anchor_from_the_row_before(patch: pytest.MonkeyPatch) -> None:
    accept = rounds._accept_sequence

    def wrong(step, sequence, bad_layer):
        going = accept(step, sequence, bad_layer)
        row = jnp.maximum(step.refs.current[COMMIT, sequence] - 2, 0) * step.plan.sequences + sequence
        step.refs.current[TOKEN, sequence] = step.refs.row_tokens[row]
        return going

    patch.setattr(rounds, "_accept_sequence", wrong)


def one_draft_too_many_accepted(patch: pytest.MonkeyPatch) -> None:
    accept = rounds._accept_sequence

    def wrong(step, sequence, bad_layer):
        plan, refs, first = step.plan, step.refs, jnp.bool_(True)
        for t in range(plan.tokens - 1):
            row, after = t * plan.sequences + sequence, (t + 1) * plan.sequences + sequence
            refused = first & (refs.window[after] != refs.row_tokens[row])
            refs.window[after] = jnp.where(refused, refs.row_tokens[row], refs.window[after])
            first = first & jnp.logical_not(refused)
        return accept(step, sequence, bad_layer)

    patch.setattr(rounds, "_accept_sequence", wrong)


def replay_one_row_short(patch: pytest.MonkeyPatch) -> None:
    right = kda.run_tokens

    def wrong(plan, rows, query, count, most, keep, *refs) -> None:
        right(plan, rows, query, jnp.maximum(count - keep, 0), most, keep, *refs)

    patch.setattr(kda, "run_tokens", wrong)


def replay_one_row_too_many(patch: pytest.MonkeyPatch) -> None:
    right = kda.run_tokens

    def wrong(plan, rows, query, count, most, keep, *refs) -> None:
        count, most = (jnp.minimum(n + keep * (n > 0), plan.tokens) for n in (count, most))
        right(plan, rows, query, count, most, keep, *refs)

    patch.setattr(kda, "run_tokens", wrong)


def tails_moved_one_too_far(patch: pytest.MonkeyPatch) -> None:
    right = kda.move_tails

    def wrong(plan, rows, taken, tails) -> None:
        right(plan, rows, jnp.where(taken > 0, jnp.minimum(taken + 1, plan.tokens), 0), tails)

    patch.setattr(kda, "move_tails", wrong)


def states_not_settled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kernel, "settle", lambda step: None)


def rows_see_the_next_draft(patch: pytest.MonkeyPatch) -> None:
    right = mla._row_token
    patch.setattr(mla, "_row_token", lambda plan, rows: right(plan, rows) + 1)


def refused_latents_stay_visible(patch: pytest.MonkeyPatch) -> None:
    right = mla.merge_fresh

    def wrong(plan, entries, first, fresh, sequence, position, count):
        return right(plan, entries, first, fresh, sequence, position + (count > 1), count)

    patch.setattr(mla, "merge_fresh", wrong)


def position_stays_behind(patch: pytest.MonkeyPatch) -> None:
    accept = rounds._accept_sequence

    def wrong(step, sequence, bad_layer):
        going = accept(step, sequence, bad_layer)
        several = (step.refs.current[COMMIT, sequence] > 1).astype(jnp.int32)
        step.refs.current[POSITION, sequence] = step.refs.current[POSITION, sequence] - several
        return going

    patch.setattr(rounds, "_accept_sequence", wrong)


MISTAKES = (
    noise_of_the_anchor_on_every_row, noise_one_position_late, verify_rows_are_greedy, anchor_from_the_row_before,
    one_draft_too_many_accepted, replay_one_row_short, replay_one_row_too_many, tails_moved_one_too_far,
    states_not_settled, rows_see_the_next_draft, refused_latents_stay_visible, position_stays_behind,
)  # fmt: skip


def differences(model: LoadedModel) -> set[str]:
    """Where 2 drafts a round, now right and now wrong, differ from plain decoding."""
    ask, found = Ask(PROMPTS[0][:5], 16, SamplingParams(temperature=1.0), 8), set()
    expected = plain(ask)
    order = [0, 0, 0, 0, 0, 1, 2, 0, 0, 2, 0, 1, 2, 1, 0, 2, 1, 0, 1, 2, 0]  # from position 5: every number, twice
    ours = open_session(model, Scripted(scripts([ask]), lambda anchor: order[anchor % 21]), 2, context=CONTEXT)
    (result,) = run(ours, [ask])
    if result.tokens != expected.tokens:
        found.add("tokens")
    logits = kept_logits(ours, 0)
    if logits.shape != expected.logits.shape or not np.array_equal(logits, expected.logits):
        found.add("logits")
    caches = caches_of(ours, 0, expected.steps)
    return found | {name for name, value in caches.items() if not np.array_equal(value, expected.caches[name])}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [None, *MISTAKES], ids=lambda mistake: mistake.__name__ if mistake else "none")
def test_mistakes_show(mistake: Callable | None, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts([Ask(PROMPTS[0][:5], 16, SamplingParams(temperature=1.0), 8)])  # before anything is broken
    if mistake:
        mistake(monkeypatch)
    found = differences(LoadedModel(mini().config, mini().weights))
    print(mistake.__name__ if mistake else "no mistake", "shows in", sorted(found))
    assert bool(found) == bool(mistake)
    if mistake is states_not_settled:
        assert found == {"states", "conv_tails"}  # or the test would not see what a launch leaves behind
