"""Mistakes in verification, commit and replay: each must show in tokens, logits or caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
from against_plain import CONTEXT, PROMPTS, mini, plain, scripts
from speculating import Ask, Scripted, caches_of, kept_logits, open_session, run

from megakernel import kernel, rounds
from megakernel.loading import LoadedModel
from megakernel.memory import COMMIT, POSITION, TOKEN
from megakernel.phases import kda, mla, sample
from model.sampling import SamplingParams


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
