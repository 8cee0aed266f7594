"""A proposal as the model of time sees it: what `propose` reads, multiplies and exchanges, in its order.

The vector table and the Markov head's output matrix are read once a launch, so they do not count.
"""

from __future__ import annotations

from megakernel.limits import POSITION_GROUP
from megakernel.plan import BYTES
from megakernel.program import LANES, round_up
from megakernel.rates import LOGIT_BUNDLES, NORM_BUNDLES, PAGE_BUNDLES, REGISTER, TILE, TILE_BUNDLES
from megakernel.step_model import StepModel
from spec_decode.dspark.share import Share


def walk_proposal(share: Share, model: StepModel) -> None:
    _store_context(share, model)
    _embed_block(share, model)
    for layer in range(share.config.num_layers):
        _norm(share, model)
        model.product(f"draft{layer}_in")
        _attend(share, model)
        model.product(f"draft{layer}_out")
        model.start_total("drafter's attention", share.config.hidden_size)()
        _norm(share, model)
        model.product(f"draft{layer}_gate_up")
        model.product(f"draft{layer}_down")
        model.start_total("drafter's FFN", share.config.hidden_size)()
    _norm(share, model)
    model.product("draft_head")
    for _ in range(model.plan.tokens - 1):
        _add_bias(share, model)
        _choose(share, model)


def _store_context(share: Share, model: StepModel) -> None:
    plan = model.plan
    model.product("draft_fc")
    model.start_gather("features", [share.features])()
    _norm(share, model)
    model.product("draft_context")
    group = plan.sequences * plan.group_positions * _entry_bytes(share, model)
    for _ in range(share.config.num_layers):
        _fetch(model, "drafter's latest keys", group)
        model.pipe.write(group)


def _embed_block(share: Share, model: StepModel) -> None:
    plan = model.plan
    rows = (plan.sequences + 1) * POSITION_GROUP
    _fetch(model, "drafter's embedding", rows * share.hidden * BYTES[plan.weights])
    model.start_gather("drafter's prefix", [share.hidden])()


def _attend(share: Share, model: StepModel) -> None:
    """The pages of the window, one on its way while another is seen, and the block itself."""
    page = model.plan.page
    first = max(model.position - share.config.sliding_window, 0) // page
    pages = range(first, -(-model.position // page))
    for _ in range(model.plan.sequences):
        for number in pages[:1]:
            model.pipe.read(f"drafter's page {number}", page * _entry_bytes(share, model))
        for number in pages:
            if number + 1 in pages:
                model.pipe.read(f"drafter's page {number + 1}", page * _entry_bytes(share, model))
            model.pipe.wait(f"drafter's page {number}")
            model.vector("drafter's attention", share.kv_heads * PAGE_BUNDLES)
        model.vector("drafter's attention", share.kv_heads * PAGE_BUNDLES)


def _add_bias(share: Share, model: StepModel) -> None:
    plan, rank = model.plan, share.config.markov_rank
    _fetch(model, "Markov rows", plan.sequences * POSITION_GROUP * round_up(rank, LANES) * BYTES[plan.weights])
    model.vector("Markov bias", TILE_BUNDLES * rank * plan.output_width(plan.matrices["draft_head"]) / TILE)


def _choose(share: Share, model: StepModel) -> None:
    """Every core looks through its own part of the vocabulary; the best of each is exchanged."""
    plan = model.plan
    entries = share.config.vocab_size if plan.split.cores == 1 else plan.split.vocabulary
    model.vector("choose a draft", plan.sequences * LOGIT_BUNDLES * entries / REGISTER)
    model.start_gather("best drafts", [LANES])()


def _norm(share: Share, model: StepModel) -> None:
    model.vector("drafter's norm", NORM_BUNDLES * model.registers(share.config.hidden_size))


def _fetch(model: StepModel, name: str, size: float) -> None:
    model.pipe.read(name, size)
    model.pipe.wait(name)


def _entry_bytes(share: Share, model: StepModel) -> int:
    """Of one cached position of a layer."""
    return share.cache_lanes * BYTES[model.plan.activations]
