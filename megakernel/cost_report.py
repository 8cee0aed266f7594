"""The model of time as text: each phase of a step, what bounds it, and how far the model can be trusted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from megakernel.cost import Cost, predict
from megakernel.limits import PlanError
from megakernel.messages import faster_in_one_hop
from megakernel.other_kernel import (
    CORES,
    GOAL_SECONDS,
    PUBLISHED_FLOOR_SECONDS,
    PUBLISHED_SECONDS,
    PUBLISHED_VERIFY_SECONDS,
    READINGS,
    check_rates,
)
from megakernel.phase_bundles import DRAFTING
from megakernel.pipeline import KINDS
from megakernel.plan import Plan
from megakernel.rates import Rates, rates_of
from megakernel.report import duration, place, plural, size
from megakernel.split import split_choices
from megakernel.target import find_target
from megakernel.visits import expected_experts

ROWS = tuple(PUBLISHED_SECONDS)
_VERIFIED = 8


def cost_text(cost: Cost) -> str:
    """Phases, bound, floor, divisions of the experts, assumptions and their check."""
    parts = (_phases(cost), _divisions(cost.plan), _assumptions(cost), _check(_rates_of_v7x(cost)))
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


def compares(plan: Plan) -> bool:
    """Whether figures of another kernel were published for this model on these cores, decoded without drafts."""
    return not plan.drafter and (plan.config.name, plan.target.name, plan.split.cores) == ("kimi-k3", "v7x", CORES)


def comparison_text(plan_of: Callable[[int], Plan], known: Cost) -> str:
    """Predicted steps beside the other kernel's published ones.

    Args:
      plan_of: rows -> plan with that many sequences.
      known: the prediction of one of these plans, kept as it is.
    """
    lines = [
        "Steps of 1 to 8 rows, in ms (predicted), beside this project's goal and the other kernel's, as published:",
        f"  {'rows':<6}{'bundles':<11}{'predicted':>10}{'HBM alone':>11}{'computing':>11}{'exchanges':>11}{'floor':>8}"
        f"{'goal':>7}{'published':>11}{'its floor':>11}",
    ]
    for rows in ROWS:
        try:
            plan = plan_of(rows)
        except PlanError as refusal:
            lines.append(f"  {rows:<6}does not fit: {str(refusal).partition(';')[0]}")
            continue
        cost = known if plan == known.plan else predict(plan)
        goal = f"{GOAL_SECONDS[rows] * 1e3:.1f}" if rows in GOAL_SECONDS else ""
        own = "".join(f"{seconds * 1e3:>11.2f}" for seconds in cost.alone.values())
        lines.append(
            f"  {rows:<6}{_bundles(cost):<11}{cost.seconds * 1e3:>10.2f}{own}{cost.floor_seconds * 1e3:>8.2f}{goal:>7}"
            f"{PUBLISHED_SECONDS[rows] * 1e3:>11.2f}{PUBLISHED_FLOOR_SECONDS[rows] * 1e3:>11.2f}"
        )
    verification = dataclasses.replace(plan_of(1), tokens=_VERIFIED)
    verify = predict(dataclasses.replace(verification, one_hop=faster_in_one_hop(verification))).seconds
    lines.append(
        f"  {_VERIFIED} rows of one sequence, a verification: {verify * 1e3:.2f} predicted without drafting (bundles "
        f"estimated), about {PUBLISHED_VERIFY_SECONDS * 1e3:.1f} published"
    )
    return "\n".join(lines)


def _phases(cost: Cost) -> Iterator[str]:
    plan = cost.plan
    what = "A round, drafting included, of" if plan.drafter else "A step of"
    but = f", but estimated: {', '.join(cost.estimated)}" if cost.estimated else ""
    yield (
        f"{what} {plural(plan.live_rows, 'row')} on {place(plan)} at position {cost.position:,} "
        f"(predicted; bundles {_bundles(cost)}{but})"
    )
    heads = ("from and to HBM", "bundles", "exchanges", "sent", "computing", "for HBM", "for others", "us in all")
    yield f"  {'':<18}" + "".join(f"{head:>{max(11, len(head) + 2)}}" for head in heads)
    widths = [max(11, len(head) + 2) for head in heads]
    for phase in cost.phases:
        seconds = [phase.seconds[kind] * 1e6 for kind in KINDS]
        cells = [size(phase.hbm_bytes), f"{phase.bundles:,.0f}", f"{phase.exchanges:,}", size(phase.sent_bytes)]
        cells += [f"{us:,.1f}" for us in (*seconds, phase.total_seconds * 1e6)]
        yield f"  {phase.name:<18}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    alone = ", ".join(f"{name} {duration(seconds)}" for name, seconds in cost.alone.items() if seconds)
    name, most = ("round", "if every draft is accepted") if plan.drafter else ("step", "")
    yield f"Predicted {name}: {duration(cost.seconds)}; bound by {cost.bound} (if alone: {alone})"
    yield (
        f"Floor of a {name}: the {size(cost.hbm_bytes)} expected at the peak of "
        f"{cost.rates.peak_bytes_per_s / 1e9:,.0f} GB/s take {duration(cost.floor_seconds)}, so "
        f"{plan.live_rows / cost.floor_seconds:,.0f} tokens/s at most {most}".rstrip()
    )


def _bundles(cost: Cost) -> str:
    return "compiled" if cost.compiled else "estimated"


def _divisions(plan: Plan) -> Iterator[str]:
    """Expected bytes of the routed experts on the busiest core, for every way to divide them."""
    if plan.split.cores == 1 or not plan.moe_layers:
        return
    yield "Routed experts of a step on the busiest core, padding included, expected:"
    yield f"  {'division':<18}" + "".join(f"{plural(rows, 'row'):>12}" for rows in ROWS)
    for split in split_choices(plan.config, plan.split.cores):
        division, loads = f"{split.expert_groups} x {split.expert_parts}", ""
        for rows in ROWS:
            other = dataclasses.replace(plan, split=split, sequences=rows, tokens=1)
            loads += f"{size(plan.moe_layers * expected_experts(other) * other.expert_bytes):>12}"
        chosen = "  chosen" if split == plan.split else ""
        yield f"  {division:<18}{loads}{chosen}"


def _assumptions(cost: Cost) -> Iterator[str]:
    rates = cost.rates
    yield "Assumptions (published measurements of others on v7x; see megakernel/rates.py):"
    yield (
        f"  HBM to VMEM {rates.hbm_bytes_per_s / 1e9:,.0f} GB/s reached; {rates.clock_hz / 1e9:.2f} GHz, a bundle a "
        f"cycle" + ("" if cost.compiled else f"; {rates.tile_seconds * 1e9:.0f} ns a tile of 256 x 256 weights")
    )
    if cost.plan.split.cores > 1:
        yield (
            f"  an exchange {rates.exchange_seconds * 1e6:.1f} us (3.5 to 4.7 were published), and its bytes at "
            f"{rates.off_chip_bytes_per_s / 1e9:.0f} GB/s to other chips, {rates.sibling_bytes_per_s / 1e9:.0f} to the "
            "core on the same chip"
        )
    uncounted = ["the latency of a copy from HBM", "stalls inside a bundle", "cores out of step"]
    if cost.plan.drafter and DRAFTING not in (phase.name for phase in cost.phases):
        uncounted.append(f"the search of drafter {cost.plan.drafter.name!r}")
    yield f"  not counted: {', '.join(uncounted)}"


def _rates_of_v7x(cost: Cost) -> Rates:
    """What the prediction assumed, if it is of the kind of machine on which the other kernel was measured."""
    return cost.rates if cost.plan.target.name == "v7x" else rates_of(find_target("v7x"))


def _check(rates: Rates) -> Iterator[str]:
    """How the same model does on a kernel that was measured."""
    checks = check_rates(rates)
    quoted = [check for check in checks if check.reading == READINGS[0]]
    yield "Check: the same model on the other kernel (Kimi K3, 16 chips of v7x), predicted against published:"
    yield "  " + "; ".join(
        f"{plural(c.rows, 'row')} {c.predicted * 1e3:.2f} against {c.published * 1e3:.2f} ms ({c.error:+.0%})"
        for c in quoted
    )
    yield "  Its structure is known in part only. With other readings of what overlaps there:"
    for reading in READINGS[1:]:
        errors = (f"{check.error:+.0%}" for check in checks if check.reading == reading)
        yield f"    {reading}: {', '.join(errors)}"
    low, high = min(check.error for check in checks), max(check.error for check in checks)
    yield f"  So predictions are uncertain by {low:+.0%} to {high:+.0%} at least. No TPU was used."
