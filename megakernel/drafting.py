"""What the kernel asks of a drafter: more tape, more buffers, and a proposal after every round.

Drafters live in `spec_decode`; a plan carries one. Whatever they propose, the tokens that come out are those of plain
decoding: a draft is only ever compared with the token that the target itself has chosen (`megakernel.rounds`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from megakernel.program import Matrix
from megakernel.split import Split
from megakernel.target import Target
from model.config import ModelConfig

if TYPE_CHECKING:
    from megakernel.layers import Step
    from megakernel.memory import Buffer
    from megakernel.plan import Plan
    from megakernel.step_model import StepModel


class Drafter(Protocol):
    """Hashable and free of arrays: part of the static plan."""

    @property
    def name(self) -> str: ...

    @property
    def max_drafts(self) -> int:
        """Most tokens that one proposal holds."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Numbers of completed target layers after which the prefix is kept for the drafter, ascending."""
        ...

    def check(self, config: ModelConfig) -> None:
        """Raises `PlanError` if this drafter does not fit the target model."""
        ...

    def check_split(self, split: Split, target: Target) -> None:
        """Raises `PlanError` if the cores cannot share this drafter, or this kind of machine cannot run it."""
        ...

    def matrices(self, split: Split) -> tuple[Matrix, ...]:
        """One core's streamed products of one proposal, on the tape behind the target's LM head."""
        ...

    def exchange_lanes(self, split: Split) -> int:
        """Lanes of the widest piece that one core sends everyone for a proposal; 0: none."""
        ...

    @property
    def sum_widths(self) -> tuple[int, ...]:
        """Widths of the sums over cores that a proposal takes."""
        ...

    def vmem(self, plan: Plan) -> dict[str, Buffer]: ...

    def weights(self, plan: Plan) -> dict[str, Buffer]:
        """Read-only HBM arrays."""
        ...

    def caches(self, plan: Plan) -> dict[str, Buffer]:
        """HBM arrays that outlive a launch."""
        ...

    def request(self, plan: Plan) -> dict[str, Buffer]:
        """VMEM arrays that the host fills for each launch from the known tokens, see `fill_request`."""
        ...

    def fill_request(self, plan: Plan, slot: int, known: list[int], arrays: Mapping[str, np.ndarray]) -> None: ...

    def semaphores(self, plan: Plan) -> dict[str, int]: ...

    def begin(self, step: Step) -> None:
        """Runs in the kernel before the first round."""
        ...

    def propose(self, step: Step, section: Any) -> None:
        """Runs in the kernel after every round; `section` is the tape block at which its own section begins.

        `step.refs.window` still holds the rows of the round that has just been accepted and `current` already stands
        behind them. Writes the drafts for the next round to `drafts[k, sequence]` and their number, at most
        `plan.tokens - 1`, to `current[DRAFTS, sequence]`; the same on every core.
        """
        ...

    def walk_proposal(self, model: StepModel) -> None:
        """Walks what `propose` does on the model of time."""
        ...

    def pack(self, plan: Plan, weights: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray], core: int) -> None:
        """Fills one core's arrays of `weights(plan)`.

        `weights` are the drafter's own tensors, and the target's embedding and LM head as `target.embed_tokens` and
        `target.lm_head`. The tape is filled from the tensors that `matrices` names.
        """
        ...


class Weightless:
    """The answers of a drafter that has no weights, keeps nothing and asks the other cores for nothing."""

    def check(self, config: ModelConfig) -> None:
        """Fits every model."""

    def check_split(self, split: Split, target: Target) -> None:
        """Runs on any number of cores of any kind: each of them drafts the same."""

    def matrices(self, split: Split) -> tuple[Matrix, ...]:
        return ()

    def exchange_lanes(self, split: Split) -> int:
        return 0

    @property
    def sum_widths(self) -> tuple[int, ...]:
        return ()

    def vmem(self, plan: Plan) -> dict[str, Buffer]:
        return {}

    def weights(self, plan: Plan) -> dict[str, Buffer]:
        return {}

    def caches(self, plan: Plan) -> dict[str, Buffer]:
        return {}

    def request(self, plan: Plan) -> dict[str, Buffer]:
        return {}

    def fill_request(self, plan: Plan, slot: int, known: list[int], arrays: Mapping[str, np.ndarray]) -> None:
        """Asks nothing of the host."""

    def semaphores(self, plan: Plan) -> dict[str, int]:
        return {}

    def begin(self, step: Step) -> None:
        """Needs no preparation."""

    def walk_proposal(self, model: StepModel) -> None:
        """Reads, multiplies and exchanges nothing; the little that it computes is not counted."""

    def pack(self, plan: Plan, weights: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray], core: int) -> None:
        """Has nothing to pack."""


@dataclasses.dataclass(frozen=True)
class Draft:
    """A drafter and its tensors, as `decode` takes them."""

    drafter: Drafter
    weights: Mapping[str, np.ndarray]
