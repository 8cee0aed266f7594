"""A round with a drafter as the model of time sees it: the step that verifies its drafts, then its next proposal."""

from __future__ import annotations

from megakernel.phase_bundles import DRAFTING
from megakernel.step_model import StepModel


class DraftedStep(StepModel):
    def step(self) -> None:
        super().step()
        assert self.plan.drafter is not None
        self.pipe.phase = DRAFTING
        self.plan.drafter.walk_proposal(self)
