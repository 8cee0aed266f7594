"""The public API: `decode`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, overload

from tqdm import tqdm

from megakernel.backends import resolve_backend
from megakernel.compile_cache import use_compile_cache
from megakernel.distributed import agree
from megakernel.drafting import Draft
from megakernel.generate import STREAM_TOKENS, Settings, groups, run_group, run_reference
from megakernel.loading import LoadedModel
from megakernel.request import Prompt, make_jobs, make_stop
from megakernel.result import Generation, Piece
from model.sampling import SamplingParams

BackendName = Literal["auto", "interpret", "simulate", "tpu", "reference"]
StopArgument = str | int | Sequence[str | int] | None


@overload
def decode(
    model: LoadedModel,
    prompts: str,
    *,
    max_new_tokens: int = ...,
    sampling: SamplingParams | Sequence[SamplingParams] | None = ...,
    stop: StopArgument = ...,
    logprobs: bool = ...,
    seed: int | Sequence[int] | None = ...,
    backend: BackendName = ...,
    draft: str | Path | Draft = ...,
    draft_tokens: int | None = ...,
    cores: int = ...,
    wire: str | None = ...,
    stream: Literal[False] = ...,
) -> Generation: ...


@overload
def decode(
    model: LoadedModel,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = ...,
    sampling: SamplingParams | Sequence[SamplingParams] | None = ...,
    stop: StopArgument = ...,
    logprobs: bool = ...,
    seed: int | Sequence[int] | None = ...,
    backend: BackendName = ...,
    draft: str | Path | Draft = ...,
    draft_tokens: int | None = ...,
    cores: int = ...,
    wire: str | None = ...,
    stream: Literal[False] = ...,
) -> Generation | list[Generation]: ...


@overload
def decode(
    model: LoadedModel,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = ...,
    sampling: SamplingParams | Sequence[SamplingParams] | None = ...,
    stop: StopArgument = ...,
    logprobs: bool = ...,
    seed: int | Sequence[int] | None = ...,
    backend: BackendName = ...,
    draft: str | Path | Draft = ...,
    draft_tokens: int | None = ...,
    cores: int = ...,
    wire: str | None = ...,
    stream: Literal[True],
) -> Iterator[Piece]: ...


def decode(
    model: LoadedModel,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    stop: StopArgument = None,
    logprobs: bool = False,
    seed: int | Sequence[int] | None = None,
    backend: BackendName = "auto",
    draft: str | Path | Draft = "none",
    draft_tokens: int | None = None,
    cores: int = 1,
    wire: str | None = None,
    stream: bool = False,
) -> Generation | list[Generation] | Iterator[Piece]:
    """Decodes prompts, up to 16 together, each generation inside one kernel launch.

    Args:
      model: from `megakernel.load`.
      prompts: a string, a list of token ids, or a list of either; lengths may differ.
      max_new_tokens: most new tokens of each sequence.
      sampling: how tokens are drawn, penalties and logit bias included; default greedy. One for all prompts or one for
        each.
      stop: strings or token ids that end a sequence, besides the model's own end-of-sequence token. Strings split the
        generation into several launches, since the host has to look at the text.
      logprobs: also return the log-probability of each new token.
      seed: an integer from 0 to 2**64 - 1, one for all prompts or one for each. A prompt, its sampling and its seed
        give the same tokens in any batch. Default: one drawn for each prompt, and reported in its `Generation`.
      backend: "auto" (a TPU if there is one, else "interpret"), "interpret", "simulate" (race detection, slow), "tpu",
        or "reference" (the flax model instead of the kernel).
      draft: speculative decoding: "none", "ngram" (prompt lookup), "dspark" (the shipped drafter of this model) or the
        folder of a DSpark checkpoint. It changes how many tokens come out a round, not which: choices are those of
        plain decoding. (A DSpark drafter needs the kernel to read the whole prompt, where plain decoding takes a prompt
        above 64 tokens through the reference: equal maths, rounded differently.)
      draft_tokens: drafts verified in a round, at most 15 for one sequence; default: as many as drafter and rows allow.
      cores: devices that share the model, in one launch on all of them. On a CPU, tell JAX before its first use how
        many to make: `jax.config.update("jax_num_cpu_devices", cores)`.
      wire: number format in which partial sums travel between cores: "float32", "bfloat16", "int8" or "float8_e4m3fn";
        fewer bits are faster and change the numbers a little. Default: the format of activations.
      stream: yield `Piece`s while decoding, a launch of a few tokens at a time; the last one of a sequence carries its
        `Generation`.

    Returns:
      One `Generation` for a single prompt, a list for several; with `stream`, an iterator of pieces.

    On several hosts (`megakernel.distributed.start`), every one of them makes the same call and gets the result.

    Raises:
      ValueError, TypeError: an argument, by name and value, and what was expected.
      megakernel.PlanError: the machine is too small for the request.
      megakernel.NumericsError: NaN or infinity; the message names the layer.
      megakernel.ContainerError: a packed model that is damaged, or packed for another number of cores.
      megakernel.HostsError: other hosts make another call, or none.
    """
    jobs, single = make_jobs(model, prompts, max_new_tokens, sampling, seed)
    where, use = make_stop(model, stop), resolve_backend(backend)
    chosen = find_draft(model, draft)
    if chosen and use.name == "reference":
        raise ValueError(f"draft = {draft!r}: backend 'reference' decodes token by token; use draft='none'")
    if chosen is None and draft_tokens is not None:
        raise ValueError(f"draft_tokens = {draft_tokens} with draft='none'; choose a drafter")
    if use.name == "reference" and cores != 1:
        raise ValueError(f"cores = {cores}: backend 'reference' runs on one")
    if use.name == "reference" and wire is not None:
        raise ValueError(f"wire = {wire!r}: backend 'reference' has none; leave it out")
    if use.name == "reference" and model.container is not None:
        raise ValueError(f"{model.container.folder} is a container; backend 'reference' needs the checkpoint itself")
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

    def events() -> Iterator[Piece | Generation]:
        if use.name == "reference":
            yield from run_reference(model, jobs, settings)
            return
        split = list(groups(model, use, jobs, settings))
        for plan, group in tqdm(split, desc="decode", unit="group", disable=None if len(split) > 1 else True):
            yield from run_group(model, use, plan, group, settings)

    if stream:
        return (event for event in events() if isinstance(event, Piece))
    found = [event for event in events() if isinstance(event, Generation)]
    return found[0] if single else found


def find_draft(model: LoadedModel, draft: str | Path | Draft) -> Draft | None:
    """What `draft` names, checked against the model; None for "none"."""
    if isinstance(draft, Draft):
        draft.drafter.check(model.config)
        return draft
    # Drafters are built on this package, so it must not import them until one is asked for.
    from spec_decode import choose_drafter

    return choose_drafter(draft, model)
