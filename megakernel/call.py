"""A call of `decode`, checked: whatever can be refused is, before anything is packed or compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from megakernel.backends import Backend, resolve_backend
from megakernel.compile_cache import use_compile_cache
from megakernel.container import check_plan
from megakernel.distributed import agree
from megakernel.drafting import Draft
from megakernel.generate import STREAM_TOKENS, Settings, groups, run_group, run_reference
from megakernel.loading import LoadedModel
from megakernel.mesh import core_mesh
from megakernel.plan import Plan
from megakernel.request import Job, Prompt, StopArgument, make_jobs, make_stop
from megakernel.result import Generation, Piece
from model.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call of `decode` will run.

    Attributes:
      single: the call had one prompt, not a list of them.
      groups: jobs that share a plan; none where the reference runs them.
    """

    model: LoadedModel
    backend: Backend
    settings: Settings
    jobs: Sequence[Job]
    single: bool
    groups: Sequence[tuple[Plan, Sequence[Job]]]

    def pieces(self) -> Iterator[Piece]:
        return (event for event in self._events() if isinstance(event, Piece))

    def generations(self) -> list[Generation]:
        return [event for event in self._events() if isinstance(event, Generation)]

    def _events(self) -> Iterator[Piece | Generation]:
        if self.backend.name == "reference":
            yield from run_reference(self.model, self.jobs, self.settings)
            return
        several = None if len(self.groups) > 1 else True
        for plan, group in tqdm(self.groups, desc="decode", unit="group", disable=several):
            yield from run_group(self.model, self.backend, plan, group, self.settings)


def checked_call(
    model: LoadedModel,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int,
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    stop: StopArgument,
    logprobs: bool,
    seed: int | Sequence[int] | None,
    backend: str,
    draft: str | Path | Draft,
    draft_tokens: int | None,
    cores: int,
    wire: str | None,
    stream: bool,
) -> Call:
    """Checks the arguments of `decode` and plans their launches; raises what `decode` says."""
    if not isinstance(model, LoadedModel):
        raise TypeError(f"model = {model!r}; expected a loaded model: load({str(model)!r})")
    jobs, single = make_jobs(model, prompts, max_new_tokens, sampling, seed)
    where, use = make_stop(model, stop), resolve_backend(backend)
    chosen = find_draft(model, draft)
    if chosen is None and draft_tokens is not None:
        raise ValueError(f"draft_tokens = {draft_tokens} with draft='none'; choose a drafter")
    if use.name == "reference":
        _check_reference(model, draft if chosen else None, cores, wire)
    launch_tokens = STREAM_TOKENS if stream or where.strings else None
    settings = Settings(where, logprobs, launch_tokens, chosen, draft_tokens, cores, wire, model.container is None)
    asked = {
        "model": model.config,
        "prompts": [job.prompt for job in jobs],
        "max_new_tokens": max_new_tokens,
        "sampling": [job.sampling for job in jobs],
        "seed": None if seed is None else [job.seed for job in jobs],
        "stop": where,
        "logprobs": logprobs,
        "backend": use.name,
        "draft": chosen and chosen.drafter,
        "draft_tokens": draft_tokens,
        "cores": cores,
        "wire": wire,
        "stream": stream,
    }
    seeds = agree(asked, [job.seed for job in jobs])
    jobs = [dataclasses.replace(job, seed=seed) for job, seed in zip(jobs, seeds, strict=True)]
    use_compile_cache()
    planned: list[tuple[Plan, list[Job]]] = []
    if use.name != "reference":
        planned = list(groups(model, use, jobs, settings))
        _check_machine(model, cores, [plan for plan, _ in planned])
    return Call(model, use, settings, jobs, single, planned)


def _check_reference(model: LoadedModel, draft: str | Path | Draft | None, cores: int, wire: str | None) -> None:
    if draft is not None:
        raise ValueError(f"draft = {draft!r}: backend 'reference' decodes token by token; use draft='none'")
    if cores != 1:
        raise ValueError(f"cores = {cores}: backend 'reference' runs on one")
    if wire is not None:
        raise ValueError(f"wire = {wire!r}: backend 'reference' has none; leave it out")
    if model.container is not None:
        raise ValueError(f"{model.container.folder} is a container; backend 'reference' needs the checkpoint itself")


def _check_machine(model: LoadedModel, cores: int, plans: Sequence[Plan]) -> None:
    core_mesh(cores)
    if model.container is not None:
        for plan in plans:
            check_plan(model.container.folder, model.container.manifest, plan)


def find_draft(model: LoadedModel, draft: str | Path | Draft) -> Draft | None:
    """What `draft` names, checked against the model; None for "none"."""
    if isinstance(draft, Draft):
        draft.drafter.check(model.config)
        return draft
    # Drafters are built on this package, so it must not import them until one is asked for.
    from spec_decode import choose_drafter

    return choose_drafter(draft, model)
