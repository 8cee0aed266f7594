"""A model of a step's time.

What it gives is *predicted*. Bytes are exact but for the routed experts, which count as the busiest core is expected to
read them; copies and exchanges go by the published figures of `rates`; computing takes the bundles of the compiler's
schedule where one is given, spread over a phase's parts as the estimates say, else the estimates themselves. With a
drafter a round is predicted, its proposal included; bundles of that are always estimated.
"""

from __future__ import annotations

import dataclasses

from megakernel.cost_record import Cost, PhaseCost
from megakernel.drafted_step import DraftedStep
from megakernel.phase_bundles import BESIDE_DRAFTING, phase_bundles
from megakernel.plan import Plan
from megakernel.rates import Rates, rates_of
from megakernel.schedule import Loop
from megakernel.step_model import StepModel

__all__ = ["Cost", "PhaseCost", "predict"]


def predict(
    plan: Plan, *, schedule: Loop | None = None, position: int | None = None, rates: Rates | None = None
) -> Cost:
    """The predicted time of a step; with a drafter, of a round.

    Args:
      schedule: the compiler's, from `compile_for(plan, schedule=True).schedule`.
      position: of every sequence; default: half the context.
      rates: other assumptions than `rates_of(plan.target)`.

    Raises:
      ValueError: nothing is known of the plan's target.
    """
    rates = rates or rates_of(plan.target)
    position = plan.context // 2 if position is None else position
    model = DraftedStep if plan.drafter else StepModel
    estimated = model(plan, rates, position, {}).run()
    if schedule is None:
        return estimated
    compiled = phase_bundles(schedule)
    if plan.drafter:
        compiled = {name: bundles for name, bundles in compiled.items() if name not in BESIDE_DRAFTING}
    scales = {p.name: compiled[p.name] / p.bundles for p in estimated.phases if p.bundles and p.name in compiled}
    left = tuple(p.name for p in estimated.phases if p.bundles and p.name not in scales)
    return dataclasses.replace(model(plan, rates, position, scales).run(), compiled=True, estimated=left)
