"""Which loop of the compiled kernel is which, by the buffers that it touches, and how often it turns in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megakernel.memory import EXCHANGES
from megakernel.tiling import find_repeat
from megakernel.visits import expected_experts, expected_visits
from megakernel.vocabulary import piece_count, vocabulary_shape

if TYPE_CHECKING:
    from megakernel.plan import Plan
    from megakernel.schedule import Loop

_KDA = {"state", "tails", "kda_rows", "kda_read", "trial_state", "pending"}
_MLA = {"page", "latent_group", "fresh", "queries", "contexts"}
_MOE = {"expert_weights", "expert_input", "expert_sum", "chosen_experts", "expert_visits"}
_LOGITS = {"row_logits", "scaled_logits", "logit_mass"}
_SENDS = {f"{name}_{part}" for name in EXCHANGES for part in ("sent", "received", "outbox")}
_EXPERT_COPIES = {"expert_in_done", "expert_out_done"}
SUBLAYERS = ("KDA", "MLA", "dense", "MoE")


def name_loops(program: Loop, plan: Plan) -> None:
    """Names the loops of `kernel.decode_rounds` and says how often each turns; leaves what is not certain alone."""
    if not program.inner:
        return
    round_ = max(program.inner, key=lambda loop: loop.total)
    round_.name = "round"
    owned = _buffers_of_sublayers(plan)
    layer = next((loop for loop in round_.inner if _sublayers_inside(loop, owned)), None)
    if layer is not None:
        layer.name, layer.turns = "layer", plan.config.num_hidden_layers
        _name_inside_layer(layer, plan, owned)
    after = round_.inner[round_.inner.index(layer) + 1 :] if layer in round_.inner else round_.inner
    for loop in after:
        _name_after_layers(loop, plan)


def layers_of(plan: Plan) -> dict[str, int]:
    """How many layers have each kind of sublayer."""
    config = plan.config
    return {
        "KDA": len(config.kda_layers),
        "MLA": len(config.mla_layers),
        "dense": config.num_hidden_layers - plan.moe_layers,
        "MoE": plan.moe_layers,
    }


def _buffers_of_sublayers(plan: Plan) -> dict[str, set[str]]:
    own = {"KDA": _KDA, "MLA": _MLA, "dense": set(), "MoE": _MOE}
    outs = {name: {f"out_{m.name}" for m in plan.sections.get(name.lower(), ())} for name in SUBLAYERS}
    return {name: own[name] | outs[name] for name in SUBLAYERS if layers_of(plan)[name]}


def _touched(loop: Loop) -> set[str]:
    return {name for _, inner in loop.walk() for name in inner.touches}


def _sublayers_inside(loop: Loop, owned: dict[str, set[str]]) -> bool:
    """Whether sublayers have loops of their own directly inside; one may keep all that it computes in registers."""
    found = [name for name, buffers in owned.items() if any(_touched(inner) & buffers for inner in loop.inner)]
    return bool(found) and len(found) >= len(owned) - 1


def _name_inside_layer(layer: Loop, plan: Plan, owned: dict[str, set[str]]) -> None:
    layers, left = plan.config.num_hidden_layers, dict(owned)
    for loop in layer.inner:
        touched = _touched(loop)
        name = max(owned, key=lambda name: len(touched & owned[name]))
        if touched & owned[name]:
            left.pop(name, None)
            _name_sublayer(loop, plan, name)
        elif touched == {"stream"}:
            loop.name, loop.turns = "write snapshot", plan.config.num_snapshots / layers
        elif "taps" in touched and plan.drafter:
            loop.name, loop.turns = "keep for the drafter", len(plan.drafter.taps) / layers
    unnamed = [loop for loop in layer.inner if loop.name == "loop" and "ring" in _touched(loop)]
    if len(left) == len(unnamed) == 1:
        _name_sublayer(unnamed[0], plan, *left)


def _name_sublayer(loop: Loop, plan: Plan, name: str) -> None:
    loop.name, loop.turns = name, layers_of(plan)[name] / plan.config.num_hidden_layers
    for inner in loop.inner:
        _name_inside_sublayer(inner, plan)


def _name_inside_sublayer(loop: Loop, plan: Plan) -> None:
    touched = _touched(loop)
    if "expert_sum" in touched:
        _name_visits(loop, plan)
    elif _EXPERT_COPIES & touched:
        loop.name, loop.turns = "start an expert", min(expected_experts(plan), plan.expert_slots)
    elif touched and touched <= {"chosen_experts", "expert_visits"}:
        loop.name, loop.turns = "find an expert", max(0.0, expected_experts(plan) - plan.expert_slots)
    elif "page_done" in touched:
        _name_pages(loop, plan)
    elif "trial_state" in touched:
        _name_delta_rule(loop, plan)
    elif touched and touched <= _SENDS:
        loop.name, loop.turns = "send", plan.split.cores - 1
    else:
        _name_product(loop, plan, touched)


def _name_visits(loop: Loop, plan: Plan) -> None:
    """The loop of visits; where one is computed beside the next, what surrounds it has halves of the first and last."""
    visits = expected_visits(plan)
    turns = next((inner for inner in loop.inner if "expert_sum" in _touched(inner)), None)
    if turns is not None:
        loop.name = "experts"
        for inner in loop.inner:
            inner.name, inner.turns = "start an expert", 0
        loop, visits = turns, max(0.0, visits - 1)
    loop.name, loop.turns = "expert", visits
    starting = loop.inner
    if plan.expert_tiles > 1:
        for inner in loop.inner:
            inner.name, inner.turns = "next expert", expected_experts(plan) / expected_visits(plan)
        starting = [start for inner in loop.inner for start in inner.inner]
    for start in starting:
        ahead = max(0.0, expected_experts(plan) - plan.expert_slots)
        start.name, start.turns = "start an expert", ahead / expected_experts(plan)


def _name_pages(loop: Loop, plan: Plan) -> None:
    """The pages that are fetched first, or all of them as they are computed with."""
    pages = plan.pages(plan.context // 2)
    fetched_first = min(plan.page_windows, plan.sequences * pages)
    if "fresh" not in _touched(loop):
        loop.name, loop.turns = "start a page", fetched_first
        return
    if plan.sequences > 1 and loop.inner:
        loop.name, loop.turns = "sequence", plan.sequences
        loop = max(loop.inner, key=lambda inner: inner.total)
    loop.name, loop.turns = "page", pages
    for inner in loop.inner:
        merges = "fresh" in inner.touches
        inner.turns = 1 / pages if merges else 1 - fetched_first / (plan.sequences * pages)


def _name_delta_rule(loop: Loop, plan: Plan) -> None:
    if loop.inner:
        loop.name, loop.turns = "heads", plan.split.kda_heads // plan.head_group
    for inner in loop.inner or [loop]:
        inner.name, inner.turns = "token", plan.tokens


def _name_product(loop: Loop, plan: Plan, touched: set[str]) -> None:
    """A product that repeats: of the one output that it writes."""
    outs = [name.removeprefix("out_") for name in touched if name.startswith("out_")]
    if "ring" not in touched or len(outs) != 1 or outs[0] not in plan.tilings:
        return
    repeat = find_repeat(plan.tilings[outs[0]])
    loop.name, loop.turns = f"product {outs[0]}", repeat.turns if repeat else 1


def _name_after_layers(loop: Loop, plan: Plan) -> None:
    touched = _touched(loop)
    if "out_head" in touched and "ring" in touched:
        _name_product(loop, plan, touched)
    elif touched and touched <= _SENDS:
        loop.name, loop.turns = "send", plan.split.cores - 1
    elif touched & _LOGITS:
        loop.name, loop.turns = "sampling", plan.live_rows if plan.split.cores == 1 else 1
        while "row_tokens" not in loop.touches and loop.inner:
            loop = max(loop.inner, key=lambda inner: inner.total)
        for inner in loop.inner:
            if inner.inner and "scaled_logits" in _touched(inner):
                inner.name, inner.turns = "draw (if sampled)", 0
            else:
                inner.turns = piece_count(vocabulary_shape(plan.config.vocab_size, plan.split.cores))
