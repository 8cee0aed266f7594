"""Penalties and logit bias: the kernel's choices are those of the definition, and drafts change none of them.

The definition is `model.sampling.adjusted_logits`, written for one row and all tokens before it. The kernel counts
tokens as they come, and the drafts of a round while it chooses for a row behind them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_plain import MINI_DRAFTER, RIGHT, drafter_weights, mini
from speculating import Ask, Scripted, kept_logits, open_session, run

from megakernel import Generation, SamplingParams, decode
from megakernel.loading import LoadedModel
from megakernel.phases import penalty
from megakernel.session import Session, SlotRequest
from model.sampling import MAX_BIASES, adjusted_logits, sample
from spec_decode import NGramDrafter
from spec_decode.dspark.drafter import DSparkDrafter

PROMPT = (5, 6, 7, 8, 5, 6, 7, 8, 5, 6)
BIAS = {5: 1.5, 6: -math.inf, 17: 0.75, 100: 2.0, 383: -3.0}
CASES = {
    "repetition": SamplingParams(repetition_penalty=1.6),
    "repetition is liked": SamplingParams(repetition_penalty=0.6),
    "presence": SamplingParams(presence_penalty=0.9),
    "frequency": SamplingParams(frequency_penalty=0.5),
    "frequency is liked": SamplingParams(frequency_penalty=-0.5),
    "bias": SamplingParams(logit_bias=BIAS),
    "few tokens": SamplingParams(frequency_penalty=0.7, logit_bias=dict.fromkeys((16, 17, 18, 19), 12.0)),
    "all, greedy": SamplingParams(0.0, 0, 1.0, 0.0, 1.3, 0.4, 0.3, BIAS),
    "all, sampled": SamplingParams(0.9, 40, 0.9, 0.01, 1.3, 0.4, 0.3, BIAS),
}
NEW = 40


def session(drafter: Any = None, drafts: int | None = None, sequences: int = 1, model: Any = None) -> Session:
    weights = drafter_weights(drafter.config) if isinstance(drafter, DSparkDrafter) else None
    return open_session(model or mini(), drafter, drafts, sequences, draft_weights=weights, penalties=True)


@functools.cache
def plain_session() -> Session:
    return session()


@functools.cache
def plain(case: str) -> tuple[list[int], list[float]]:
    (result,) = run(plain_session(), [Ask(PROMPT, NEW, CASES[case], 3)])
    return result.tokens, result.logprobs


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_definition(case: str) -> None:
    """From the kernel's own logits, token by token; log-probabilities stay those of the raw logits."""
    opened, params = plain_session(), CASES[case]
    (result,) = run(opened, [Ask(PROMPT, NEW, params, 3)])
    logits = kept_logits(opened, 0)[len(PROMPT) - 1 :]
    for i, (row, token, logprob) in enumerate(zip(logits, result.tokens, result.logprobs, strict=True)):
        adjusted = adjusted_logits(row, params, PROMPT, result.tokens[:i])
        assert token == int(sample(adjusted, params, 3, len(PROMPT) + i))
        assert logprob == pytest.approx(float(jax.nn.log_softmax(row)[token]), abs=1e-5)


def test_every_case_changes_tokens() -> None:
    """Without this the cases would prove nothing."""
    neutral, sampled = SamplingParams(), SamplingParams(0.9, 40, 0.9, 0.01)
    for case, params in CASES.items():
        (unadjusted,) = run(plain_session(), [Ask(PROMPT, NEW, neutral if params.greedy else sampled, 3)])
        assert plain(case)[0] != unadjusted.tokens, case
    assert 6 not in plain("bias")[0]
    assert len(set(plain("frequency")[0])) > len(set(plain("frequency is liked")[0]))


def test_definition_by_hand() -> None:
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, logit_bias={0: 1.0, 3: -math.inf}
    )
    logits = np.array([1.0, -1.0, 4.0, 9.0, 5.0], np.float32)
    adjusted = np.asarray(adjusted_logits(logits, params, prompt=[0, 1, 1], output=[2, 2]))
    assert adjusted.tolist() == [1.0, -2.0, 2.0 - 0.25 - 1.0, -math.inf, 5.0]


DRAFTERS: dict[str, tuple[Any, int]] = {
    "ngram, 1": (NGramDrafter(shortest=1), 1),
    "ngram, 3": (NGramDrafter(shortest=1), 3),
    "ngram, 7": (NGramDrafter(shortest=1), 7),
    "dspark, 2": (DSparkDrafter(MINI_DRAFTER), 2),
    "dspark, 4": (DSparkDrafter(MINI_DRAFTER), 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_change_nothing(name: str) -> None:
    opened = session(*DRAFTERS[name])
    for case in CASES:
        (result,) = run(opened, [Ask(PROMPT, NEW, CASES[case], 3)])
        assert (result.tokens, result.logprobs) == plain(case), case


@pytest.mark.slow
@pytest.mark.parametrize(("drafts", "sequences"), [(2, 1), (3, 4), (15, 1)])
def test_scripted_drafts_change_nothing(drafts: int, sequences: int) -> None:
    """Right, wrong and mixed drafts; neighbours with other penalties."""
    drafter, names = Scripted(), list(CASES)
    opened = session(drafter, drafts, sequences)
    for first in range(0, len(CASES), sequences):
        chosen = [names[(first + slot) % len(names)] for slot in range(sequences)]
        drafter.scripts.update({slot: [*PROMPT, *plain(case)[0]] for slot, case in enumerate(chosen)})
        for rule in RIGHT.values():
            opened.plan = dataclasses.replace(opened.plan, drafter=dataclasses.replace(drafter, right=rule))
            results = run(opened, [Ask(PROMPT, NEW, CASES[case], 3) for case in chosen])
            assert [(result.tokens, result.logprobs) for result in results] == [plain(case) for case in chosen]


@pytest.mark.parametrize("split", [1, 7])
def test_split_launches_keep_counts(split: int) -> None:
    opened, params = plain_session(), CASES["all, sampled"]
    opened.caches = jax.tree.map(np.zeros_like, opened.caches)
    request = SlotRequest(PROMPT, 0, PROMPT, NEW, params, 3)
    (whole,) = opened.launch([request])
    assert whole is not None
    opened.caches, tokens = jax.tree.map(np.zeros_like, opened.caches), []
    given, position = PROMPT, 0
    while len(tokens) < NEW:
        known, wanted = (*PROMPT, *tokens), min(split, NEW - len(tokens))
        (part,) = opened.launch([SlotRequest(given, position, known, wanted, params, 3, output=len(tokens))])
        assert part is not None
        tokens, given, position = [*tokens, *part.tokens], part.tokens[-1:], position + part.steps
    assert tokens == whole.tokens


def decoded(**how: Any) -> Generation:
    found = decode(mini(), [PROMPT], max_new_tokens=NEW, sampling=CASES["all, sampled"], seed=3, **how)
    return found[0] if isinstance(found, list) else found  # type: ignore[return-value]


def test_decode_hands_them_on() -> None:
    """Plain, streamed in launches of 16 tokens, drafted, and by the reference model."""
    expected = decoded().tokens
    assert expected == tuple(plain("all, sampled")[0])
    assert decoded(draft="ngram", draft_tokens=3).tokens == expected
    assert decoded(backend="reference").tokens == expected
    pieces = decode(
        mini(), [PROMPT], max_new_tokens=NEW, sampling=CASES["all, sampled"], seed=3, stream=True, draft="ngram"
    )
    assert tuple(token for piece in pieces for token in piece.tokens) == expected  # type: ignore[union-attr]


def test_neighbours_without_penalties_are_not_touched() -> None:
    alone = decode(mini(), [PROMPT], max_new_tokens=20, seed=3)
    beside = decode(
        mini(), [PROMPT, PROMPT], max_new_tokens=20, sampling=[SamplingParams(), CASES["repetition"]], seed=3
    )
    assert beside[0].tokens == alone[0].tokens  # type: ignore[index]
    assert beside[1].tokens == tuple(plain("repetition")[0][:20])  # type: ignore[index]


# ---- mistakes ----


def patched(name: str, change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(penalty, name, change(getattr(penalty, name)))


def one_row_late(count_drafts: Any) -> Any:
    """A row does not see its own draft, only those before it."""

    def late(plan: Any, refs: Any, sequence: Any, t: Any, amount: int) -> None:
        count_drafts(plan, refs, sequence, jnp.maximum(t - 1, 0), amount)

    return late


def one_row_early(count_drafts: Any) -> Any:
    def early(plan: Any, refs: Any, sequence: Any, t: Any, amount: int) -> None:
        count_drafts(plan, refs, sequence, jnp.minimum(t + 1, plan.tokens - 1), amount)

    return early


def drafts_do_not_count(count_drafts: Any) -> Any:
    """Every row sees the counts of the anchor."""
    return lambda plan, refs, sequence, t, amount: None


def adjusting_otherwise(patch: pytest.MonkeyPatch, change: Callable[[Any, Any, Any, Any], Any]) -> None:
    """Adjusted logits become `change(adjusted, refs, sequence, row of the sequence)`."""
    rows: list[Any] = []
    count, piece = penalty.count_drafts, penalty.adjust

    def at(plan: Any, refs: Any, sequence: Any, t: Any, amount: int) -> None:
        rows.append(t)
        count(plan, refs, sequence, t, amount)

    def adjust(refs: Any, sequence: Any) -> Any:
        adjusted = piece(refs, sequence)
        adjusted[...] = change(adjusted[...], refs, sequence, rows[-1])
        return adjusted

    patch.setattr(penalty, "count_drafts", at)
    patch.setattr(penalty, "adjust", adjust)


def no_bias_on_drafts(patch: pytest.MonkeyPatch) -> None:
    def change(adjusted: Any, refs: Any, sequence: Any, t: Any) -> Any:
        return adjusted - jnp.where(t == 0, 0.0, refs.logit_bias[sequence])

    adjusting_otherwise(patch, change)


def penalties_in_row_0_only(patch: pytest.MonkeyPatch) -> None:
    adjusting_otherwise(patch, lambda adjusted, refs, _, t: jnp.where(t == 0, adjusted, refs.row_logits[...]))


def last_token_is_not_counted(settle: Any) -> Any:
    def wrong(plan: Any, refs: Any, sequence: Any, emitted: Any) -> None:
        settle(plan, refs, sequence, emitted)
        penalty.count_token(refs, sequence, refs.current[0, sequence], -penalty.ONE_OUTPUT)

    return wrong


def drafts_stay(count_drafts: Any) -> Any:
    def wrong(plan: Any, refs: Any, sequence: Any, t: Any, amount: int) -> None:
        if amount > 0:
            count_drafts(plan, refs, sequence, t, amount)

    return wrong


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "counts one row late": patched("count_drafts", one_row_late),
    "counts one row early": patched("count_drafts", one_row_early),
    "drafts are not counted": patched("count_drafts", drafts_do_not_count),
    "penalties in row 0 only": penalties_in_row_0_only,
    "no bias on drafted rows": no_bias_on_drafts,
    "the last token is not counted": patched("settle_counts", last_token_is_not_counted),
    "drafts stay counted": patched("count_drafts", drafts_stay),
}


def differs(case: str) -> bool:
    """Whether 3 drafts a round, now right and now wrong, give other tokens than plain decoding."""
    expected = plain(case)[0]
    drafter = Scripted({0: [*PROMPT, *expected]}, lambda anchor: anchor * 7 % 4)
    opened = session(drafter, 3, model=LoadedModel(mini().config, mini().weights))
    (result,) = run(opened, [Ask(PROMPT, NEW, CASES[case], 3)])
    return result.tokens != expected


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_mistakes_show(mistake: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four neighbouring tokens take turns, and a wrong draft is off by one: a wrong count shows at once."""
    plain("few tokens")
    if mistake:
        MISTAKES[mistake](monkeypatch)
    assert differs("few tokens") == bool(mistake)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("repetition_penalty", value) for value in (0, -1.0, 0.001, 101, math.nan, math.inf)),
        *((f"{kind}_penalty", value) for kind in ("presence", "frequency") for value in (-2.1, 3, math.nan, math.inf)),
        *(("logit_bias", {7: value}) for value in (-101, 100.5, math.nan, math.inf)),
        *(("logit_bias", {key: 1.0}) for key in (-1, 1.5, "7", True)),
        ("logit_bias", [(7, 1.0)]),
        ("logit_bias", dict.fromkeys(range(MAX_BIASES + 1), 1.0)),
    ],
)
def test_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field} = .*; expected"):
        SamplingParams(**{field: value})


def test_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logit_bias holds token id 384; expected 0 to 383"):
        decode(mini(), [PROMPT], sampling=SamplingParams(logit_bias={384: 1.0}))
    with pytest.raises(ValueError, match=r"logit_bias forbids all 384 tokens of k3-mini; allow one"):
        decode(mini(), [PROMPT], sampling=SamplingParams(logit_bias=dict.fromkeys(range(384), -math.inf)))


def test_a_plan_without_penalties_is_refused() -> None:
    opened = open_session(mini())
    with pytest.raises(ValueError, match=r"needs a plan with penalties=True"):
        run(opened, [Ask(PROMPT, 4, CASES["presence"])])


def test_what_changes_nothing_costs_nothing() -> None:
    assert not SamplingParams(0.8, repetition_penalty=1, presence_penalty=0.0, logit_bias={}).adjusts_logits
    assert all(params.adjusts_logits for params in CASES.values())
    assert not {"logit_bias", "token_counts"} & set(open_session(mini()).plan.vmem_map)
    assert {"logit_bias", "token_counts"} <= set(plain_session().plan.vmem_map)
