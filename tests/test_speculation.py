"""Speculation changes nothing but speed: tokens, log-probabilities, logits and caches are those of plain decoding.

All comparisons are bitwise. What is compared with is a plain launch, one token a round, of one sequence alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from against_plain import CONTEXT, MINI_DRAFTER, PROMPTS, RIGHT, assert_same, mini, plain, scripts, session
from speculating import EVERY, GREEDY, SAMPLINGS, Ask, Scripted, caches_of, run

from megakernel import PlanError, decode, make_plan
from megakernel.drafting import Draft
from megakernel.memory import FULL, ROUNDS, STOPPED
from megakernel.session import Session, SlotRequest
from model.sampling import SamplingParams
from spec_decode import NGramDrafter
from spec_decode.dspark.drafter import DSparkDrafter


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
