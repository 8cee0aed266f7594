"""The kernel in simulated TPU memories: copies that take their time, races detected, fresh memory full of NaN.

The plain interpreter completes a copy where it is started, so it cannot see a missing wait. The simulator can: with
"on_wait" a copy happens at its wait, with "eager" at its start, and its race detector (vector clocks) reports any
access that no wait orders. `DEFECTS` takes the waits of `megakernel.stream` away one by one: each has to be noticed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from launching import Ask, Ran, anew, launch_once, open_session, random_model

import megakernel.plan as planning
from megakernel import LoadedModel, SamplingParams, stream
from megakernel.phases import mla
from megakernel.races import watch_races
from megakernel.tiling import Panel, Tiling

pytestmark = pytest.mark.slow

PAGE = 16
ASKS = (
    Ask([5, 9], new=2, position=78),  # the last of its three steps opens the sixth page
    Ask([7, 300, 11], new=1, position=94, sampling=SamplingParams(1.0, top_k=50, top_p=0.9), seed=3),  # the seventh
)
"""Both go on from caches that hold random numbers, and read more pages than are in flight at once."""
DIRECTIONS = ["on_wait", "eager"]
ONE_SLOT = {"ring_depth": 3, "expert_slots": 1}
"""Streams the tape, and a layer's two to four experts pass through one slot."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one launch did: results, what the race detector said, and the error that ended it, if one did."""

    ran: list[Ran]
    caches: dict[str, np.ndarray]
    races: list[str]
    error: str


def outcome(model: LoadedModel, simulate: str | None = None, **knobs: Any) -> Outcome:
    session = open_session(model, len(ASKS), simulate=simulate, page=PAGE, context=128, launch_steps=8, **knobs)
    rng = np.random.default_rng(1)
    session.caches = {
        name: jnp.asarray(rng.standard_normal(cache.shape), cache.dtype) for name, cache in session.caches.items()
    }
    ran, caches, error = [], {}, ""
    with watch_races() as races:
        try:
            ran = [one for one in launch_once(session, ASKS) if one]
            caches = {name: np.asarray(cache) for name, cache in session.caches.items()}
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"  # what a broken kernel raises is part of its outcome
    return Outcome(ran, caches, races.messages, error)


def symptoms(found: Outcome, expected: Outcome) -> set[str]:
    """What tells the two outcomes apart."""
    signs = {"race"} if found.races else set()
    if found.error:
        return signs | {"error"}
    for ours, theirs in zip(found.ran, expected.ran, strict=True):
        same = (ours.tokens, ours.logprobs) == (theirs.tokens, theirs.logprobs)
        if not (same and np.array_equal(ours.logits, theirs.logits)):
            signs.add("results")
    if any(not np.array_equal(found.caches[name], cache) for name, cache in expected.caches.items()):
        signs.add("caches")
    return signs


# ---- the kernel as it is ----


@functools.cache
def interpreted(model_of: Callable[[], LoadedModel]) -> Outcome:
    found = outcome(model_of(), None, **ONE_SLOT)
    assert not found.error
    assert [one.fed[: len(ask.tokens)] for one, ask in zip(found.ran, ASKS, strict=True)] == [[5, 9], [7, 300, 11]]
    return found


@pytest.mark.parametrize("knobs", [ONE_SLOT, {}], ids=["streamed, one expert slot", "resident, default slots"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_simulator_agrees_bit_for_bit(direction: str, knobs: dict[str, int]) -> None:
    """No race, no NaN, nothing out of bounds; tokens, log-probabilities, logits and caches of the interpreter."""
    model = random_model()
    session = open_session(model, 2, page=PAGE, **knobs)
    assert session.plan.tape_is_resident == (not knobs)
    assert session.plan.expert_slots == knobs.get("expert_slots", 4)
    found = outcome(model, direction, **knobs)
    assert found.error == ""
    assert found.races == []
    assert symptoms(found, interpreted(random_model)) == set()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_experts_that_meet_single_rows_have_no_race(direction: str) -> None:
    """As on a TPU: one visit beside the next, in two slots. `test_visits` plants the defects."""
    model, knobs = random_model(num_experts=40), {"target": "v7x", "ring_depth": 3, "expert_slots": 3}
    plan = open_session(model, len(ASKS), page=PAGE, **knobs).plan
    assert (plan.expert_rows, plan.experts_held) == (1, 2)
    found = outcome(model, direction, **knobs)
    assert (found.error, found.races) == ("", [])
    assert symptoms(found, outcome(model, None, **knobs)) == set()


# ---- the kernel with a wait taken away ----

Defect = Callable[[pytest.MonkeyPatch], None]


class Unwaited:
    """A copy that is started and never waited for."""

    def __init__(self, copy: Any):
        self.copy = copy

    def start(self) -> None:
        self.copy.start()

    def wait(self) -> None:
        pass


def without_wait(owner: type, method: str, *copies: str) -> Defect:
    """Inside `method` the waits of the owner's copies do nothing; elsewhere they are kept."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, method)

        def broken(self: Any, *arguments: Any) -> Any:
            with pytest.MonkeyPatch.context() as inner:
                for name in copies:
                    make = getattr(owner, name)
                    inner.setattr(owner, name, lambda *a, make=make: _unwaited(make(*a)))
                return original(self, *arguments)

        patch.setattr(owner, method, broken)

    return plant


def _unwaited(made: Any) -> Any:
    return [Unwaited(copy) for copy in made] if isinstance(made, list) else Unwaited(made)


def skipped(owner: type, method: str) -> Defect:
    """`method` does nothing."""
    return lambda patch: patch.setattr(owner, method, lambda self, *arguments: None)


def given_back_before_it_is_read(patch: pytest.MonkeyPatch) -> None:
    wait, give_back = stream.Tape.wait, stream.Tape.give_back

    def wait_and_give_back(self: stream.Tape, index: jax.Array) -> None:
        wait(self, index)
        give_back(self, index)

    patch.setattr(stream.Tape, "wait", wait_and_give_back)
    patch.setattr(stream.Tape, "give_back", lambda self, index: None)


def given_back_before_its_last_use(patch: pytest.MonkeyPatch) -> None:
    """The last cut of a block but one gives it back: for a block that matrices share, before the last of them."""
    lay_out = planning.lay_out

    def hasty(*arguments: Any) -> tuple[dict[str, Tiling], int]:
        tilings, blocks = lay_out(*arguments)
        cuts = [cut for tiling in tilings.values() for panel in tiling.panels for cut in panel.cuts]
        uses = {block: [cut for cut in cuts if cut.block == block] for block in range(blocks)}
        early = {found[-2]: True for found in uses.values() if len(found) > 1}
        late = {found[-1]: False for found in uses.values() if len(found) > 1}

        def moved(panel: Panel) -> Panel:
            last = {cut: (early | late).get(cut, cut.last) for cut in panel.cuts}
            return dataclasses.replace(
                panel, cuts=tuple(dataclasses.replace(cut, last=last[cut]) for cut in panel.cuts)
            )

        broken = {
            name: dataclasses.replace(tiling, panels=tuple(map(moved, tiling.panels)))
            for name, tiling in tilings.items()
        }
        return broken, blocks

    patch.setattr(planning, "lay_out", hasty)


def read_over_the_last_write(patch: pytest.MonkeyPatch) -> None:
    start_read = stream.LatentGroups.start_read

    def at_once(self: stream.LatentGroups, layer: jax.Array, positions: Any, has_written: jax.Array) -> None:
        start_read(self, layer, positions, jnp.bool_(False))

    patch.setattr(stream.LatentGroups, "start_read", at_once)


def one_vector_window(patch: pytest.MonkeyPatch) -> None:
    """The next tables are fetched over those in use."""

    def copies(self: stream.Vectors, index: jax.Array) -> list[Any]:
        table = lax.rem(index, self.tables)
        return [
            pltpu.make_async_copy(self.hbm[name].at[table], self.windows[name].at[0], self.done[name].at[0])
            for name in self.hbm
        ]

    def row(self: stream.Vectors, index: jax.Array, name: str, lanes: Any) -> jax.Array:
        table, at = self.plan.vector_places[name]
        return self.windows[table][0, at : at + 1, lanes]

    patch.setattr(stream.Vectors, "_copies", copies)
    patch.setattr(stream.Vectors, "row", row)


def pages_in(windows: Callable[[int], int]) -> Defect:
    """Fewer windows than pages in flight: a page is fetched over one that is still to be read."""

    def defect(patch: pytest.MonkeyPatch) -> None:
        def copy(self: stream.LatentPages, order: jax.Array, layer: jax.Array, *place: jax.Array) -> Any:
            sequence, page = place
            slot = lax.rem(order, windows(self.in_flight))
            source = self.hbm.at[layer, sequence, pl.ds(pl.multiple_of(page * self.plan.page, PAGE), self.plan.page)]
            return pltpu.make_async_copy(source, self.windows.at[slot], self.done.at[slot])

        def take(self: stream.LatentPages, order: jax.Array, *where: jax.Array) -> Any:
            copy(self, order, *where).wait()
            return self.windows.at[lax.rem(order, windows(self.in_flight))]

        patch.setattr(stream.LatentPages, "_copy", copy)
        patch.setattr(stream.LatentPages, "take", take)

    return defect


def pages_before_the_last_write(patch: pytest.MonkeyPatch) -> None:
    """They start before the latents of the last round have been written. Only one MLA layer shows it: with more, the
    write that is awaited is another layer's."""
    start_read, start_pages = stream.LatentGroups.start_read, mla.start_pages
    put_off: list[tuple[Any, ...]] = []

    def hasty(*arguments: Any) -> mla.Place:
        place = start_pages(*arguments)
        start_read(*put_off.pop())
        return place

    patch.setattr(stream.LatentGroups, "start_read", lambda *arguments: put_off.append(arguments))
    patch.setattr(mla, "start_pages", hasty)


DEFECTS: dict[str, Defect] = {
    "tape block taken without waiting": without_wait(stream.Tape, "wait", "_copy"),
    "tape block given back before it is read": given_back_before_it_is_read,
    "tape block given back before its last use": given_back_before_its_last_use,
    "vectors not waited for": without_wait(stream.Vectors, "advance", "_copies"),
    "vectors in one window": one_vector_window,
    "embedding rows not waited for": without_wait(stream.EmbeddingRows, "fetch", "_copy"),
    "state window used before it is read": skipped(stream.Window, "wait_read"),
    "state window read before it is written": without_wait(stream.Window, "start_read", "_write"),
    "state window not drained": skipped(stream.Window, "drain"),
    "experts not waited for": without_wait(stream.Experts, "wait", "_copies"),
    "latent page not waited for": without_wait(stream.LatentPages, "take", "_copy"),
    "latent pages in one window": pages_in(lambda in_flight: 1),
    "latent pages in one window too few": pages_in(lambda in_flight: in_flight - 1),
    "latent pages fetched before the last write": pages_before_the_last_write,
    "latent group used before it is read": skipped(stream.LatentGroups, "wait_read"),
    "latent group read before it is written": read_over_the_last_write,
    "latent group not drained": skipped(stream.LatentGroups, "drain"),
}


@functools.cache
def three_layers() -> LoadedModel:
    """KDA twice, so that a window is written and read again; MLA; dense and MoE."""
    return random_model(num_hidden_layers=3, mla_layers=(2,))


def broken_outcome(name: str, direction: str) -> set[str]:
    with pytest.MonkeyPatch.context() as patch:
        DEFECTS[name](patch)
        found = outcome(anew(three_layers()), direction, **ONE_SLOT)
    return symptoms(found, interpreted(three_layers))


def test_three_layers_have_no_race() -> None:
    """So what the defects below show is theirs."""
    found = outcome(three_layers(), "eager", **ONE_SLOT)
    assert symptoms(found, interpreted(three_layers)) == set()


@pytest.mark.parametrize("name", DEFECTS)
def test_missing_wait_is_a_race(name: str) -> None:
    assert "race" in broken_outcome(name, "eager")


@pytest.mark.parametrize(
    "name", ["tape block taken without waiting", "embedding rows not waited for", "latent group not drained"]
)
def test_copy_that_never_happens_is_missed(name: str) -> None:
    """With "on_wait" a copy that nobody waits for does not happen: what it should bring is NaN or old."""
    assert broken_outcome(name, "on_wait") & {"error", "results", "caches"}
