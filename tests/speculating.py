"""A drafter that does as it is told, and launches with drafters: shared by the tests of speculation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megakernel.backends import Backend, simulator
from megakernel.drafting import Weightless
from megakernel.layers import Step
from megakernel.loading import LoadedModel
from megakernel.memory import DRAFTS, POSITION, Buffer
from megakernel.plan import Plan, make_plan
from megakernel.program import LANES, round_up
from megakernel.session import Session, SlotRequest, SlotResult
from megakernel.target import find_target
from model.sampling import SamplingParams

GREEDY = SamplingParams()
SAMPLINGS = (
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_k=20),
    SamplingParams(temperature=1.3, top_p=0.7),
    SamplingParams(temperature=1.0, min_p=0.1),
)
EVERY = 99


@dataclasses.dataclass(frozen=True)
class Scripted(Weightless):
    """Drafts what stands in a script, right or wrong as a rule says.

    Attributes:
      scripts: by slot, the tokens of the sequence from position 0 on. Not part of the plan: nothing compiles anew.
      right: how many of the leading drafts follow the script, by the anchor's position; the others are off by one.
      count: how many drafts there are at most, by the anchor's position.
    """

    scripts: dict[int, list[int]] = dataclasses.field(default_factory=dict, compare=False)
    right: Callable[[int], int] = dataclasses.field(default=lambda anchor: EVERY, compare=False)
    count: Callable[[int], int] = dataclasses.field(default=lambda anchor: EVERY, compare=False)
    name: str = "scripted"
    max_drafts: int = 15
    taps: tuple[int, ...] = ()

    def request(self, plan: Plan) -> dict[str, Buffer]:
        """Three rows a sequence: script, `right` and `count`, all by position."""
        return {"script": Buffer((plan.sequences, 3, round_up(plan.context + plan.tokens, LANES)), "int32")}

    def fill_request(self, plan: Plan, slot: int, known: list[int], arrays: Mapping[str, np.ndarray]) -> None:
        rows, script = arrays["script"][slot], self.scripts.get(slot, [])
        rows[0, : len(script)] = script[: rows.shape[1]]
        rows[1, : plan.context] = [self.right(anchor) for anchor in range(plan.context)]
        rows[2, : plan.context] = [self.count(anchor) for anchor in range(plan.context)]

    def propose(self, step: Step, index: Any) -> Any:
        plan, refs = step.plan, step.refs

        def one(sequence: jax.Array, _: None) -> None:
            rows, anchor = refs.script[sequence], refs.current[POSITION, sequence]
            lane = lax.broadcasted_iota(jnp.int32, (1, rows.shape[1]), 1)

            def at(row: int, position: jax.Array) -> jax.Array:
                return jnp.max(jnp.where(lane == position, rows[row : row + 1], 0))

            right = at(1, anchor)
            for k in range(plan.tokens - 1):
                token = at(0, anchor + 1 + k)
                wrong = lax.rem(token + 1, jnp.int32(plan.config.vocab_size))
                refs.drafts[k * plan.sequences + sequence] = jnp.where(k < right, token, wrong)
            refs.current[DRAFTS, sequence] = jnp.minimum(at(2, anchor), plan.tokens - 1)

        lax.fori_loop(0, plan.sequences, one, None)
        return index


@dataclasses.dataclass(frozen=True)
class Ask:
    """One sequence: its prompt, and how it goes on."""

    prompt: Sequence[int]
    new: int
    sampling: SamplingParams = GREEDY
    seed: int = 0


def open_session(
    model: LoadedModel,
    drafter: Any = None,
    drafts: int | None = None,
    sequences: int = 1,
    *,
    stop: Sequence[int] = (),
    target: str = "cpu",
    simulate: str | None = None,
    draft_weights: Mapping[str, np.ndarray] | None = None,
    **knobs: Any,
) -> Session:
    """A session that keeps logits. `simulate`: a DMA mode of the simulator; None interprets plainly."""
    machine = find_target(target)
    sizes = {"context": 128, "launch_steps": 128, "keep_logits": True} | knobs
    plan = make_plan(model.config, machine, sequences=sequences, drafter=drafter, draft_tokens=drafts, **sizes)
    name = f"{machine.name} {simulate or 'interpret'}"
    backend = Backend(name, machine, simulator(simulate) if simulate else True)
    return Session(model, plan, backend, stop, draft_weights)


def run(session: Session, asks: Sequence[Ask]) -> list[SlotResult]:
    """One launch from position 0."""
    session.caches = jax.tree.map(jnp.zeros_like, session.caches)
    requests = [SlotRequest(list(a.prompt), 0, list(a.prompt), a.new, a.sampling, a.seed) for a in asks]
    return [result for result in session.launch(requests) if result]


def kept_logits(session: Session, slot: int) -> np.ndarray:
    """Logits after every accepted token of the last launch, in order.  # [tokens run, vocabulary]"""
    counts, found = session.results["round_tokens"][slot], session.results["step_logits"]
    total, rows = int(session.results["status"][slot, 0]), []
    for number, count in enumerate(counts):
        if len(rows) >= total:
            break
        rows += [found[number, t * session.plan.sequences + slot] for t in range(count)]
    return np.stack(rows)[:, : session.plan.config.vocab_size]


def caches_of(session: Session, slot: int, positions: int) -> dict[str, np.ndarray]:
    """States and conv tails of a slot, and its latents of the first `positions` positions."""
    caches = {name: np.asarray(value) for name, value in session.caches.items()}
    return {
        "states": caches["states"][:, :, slot],
        "conv_tails": caches["conv_tails"][:, :, slot],
        "latents": caches["latents"][:, slot, :positions],
    }
