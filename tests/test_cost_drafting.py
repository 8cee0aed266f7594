"""The model of time with a drafter: a round is the step that verifies and the proposal, as the kernel makes both."""

from __future__ import annotations

import functools

import pytest

from megakernel import Plan, find_target, make_plan
from megakernel.cost import predict
from megakernel.cost_report import cost_text
from megakernel.drafting import Drafter
from megakernel.phase_bundles import DRAFTING
from megakernel.program import LANES
from megakernel.schedule import Loop
from model.config import ModelConfig
from spec_decode import DSparkDrafter, NGramDrafter
from spec_decode.dspark.presets import KIMI_K3
from spec_decode.dspark.share import Share

DSPARK = DSparkDrafter(KIMI_K3)


@functools.cache
def planned(drafter: Drafter | None, drafts: int | None = None, hops: int | None = None, **knobs: int) -> Plan:
    return make_plan(
        ModelConfig.preset("kimi-k3"), find_target("v7x"), cores=32, context=4096, launch_steps=256, drafter=drafter,
        draft_tokens=drafts, hops=hops, **knobs,
    )  # fmt: skip


def test_a_proposal_reads_its_section_of_the_tape_and_its_caches() -> None:
    """Counted anew: positions 0 to 2,047 are all in the window."""
    plan = planned(DSPARK, 7)
    share = Share(KIMI_K3, plan.split)
    entry = 2 * share.kv_heads * LANES * 2
    caches = KIMI_K3.num_layers * (2048 + 2 * 32) * entry
    rows = 2 * 16 * share.hidden * 2 + 7 * 16 * 256 * 2
    tape = (plan.tape_blocks - plan.draft_start) * plan.block_bytes
    (drafting,) = (phase for phase in predict(plan).phases if phase.name == DRAFTING)
    assert drafting.hbm_bytes == pytest.approx(tape + caches + rows)


@pytest.mark.parametrize("hops", [1, 2])
def test_every_exchange_of_a_proposal_is_there(hops: int) -> None:
    """Features, prefix, two sums a layer, the best of every slot."""
    found = {phase.name: phase.exchanges for phase in predict(planned(DSPARK, 7, hops)).phases}
    assert found[DRAFTING] == 2 + 2 * hops * KIMI_K3.num_layers + 7


def test_drafting_comes_on_top_of_the_step_that_verifies() -> None:
    drafted, looked_up = predict(planned(DSPARK, 7)), predict(planned(NGramDrafter(), 7))
    seconds = next(phase.total_seconds for phase in drafted.phases if phase.name == DRAFTING)
    assert seconds > 0
    assert drafted.seconds - looked_up.seconds == pytest.approx(seconds, rel=0.2)
    assert predict(planned(DSPARK, 3)).seconds < drafted.seconds


def test_more_context_takes_longer_until_the_window_is_full() -> None:
    at = {position: predict(planned(DSPARK, 7), position=position) for position in (512, 2048, 4000)}
    drafting = {p: next(f.hbm_bytes for f in cost.phases if f.name == DRAFTING) for p, cost in at.items()}
    assert drafting[512] < drafting[2048]
    assert drafting[4000] - drafting[2048] <= KIMI_K3.num_layers * 2 * 128 * 2 * LANES * 2


def test_a_schedule_leaves_drafting_estimated() -> None:
    layer = Loop("layer", bundles=1000, turns=93)
    after = [Loop("sampling", bundles=500, turns=8), Loop("loop", bundles=700)]
    cost = predict(
        planned(DSPARK, 7), schedule=Loop("program", inner=[Loop("round", bundles=9, inner=[layer, *after])])
    )
    found = {phase.name: phase.bundles for phase in cost.phases}
    guessed = {phase.name: phase.bundles for phase in predict(planned(DSPARK, 7)).phases}
    assert found["between sublayers"] == pytest.approx(93_000)
    for name in (DRAFTING, "sampling", "ends of a step"):
        assert found[name] == guessed[name]
        assert name in cost.estimated


def test_a_search_that_is_not_counted_is_said_to_be() -> None:
    assert "the search of drafter 'ngram'" in cost_text(predict(planned(NGramDrafter(), 7)))
    text = cost_text(predict(planned(DSPARK, 7)))
    assert "the search of drafter" not in text
    assert "A round, drafting included, of 8 rows on one of 32 cores of v7x" in text
