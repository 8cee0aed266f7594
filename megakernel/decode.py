"""The public API: `decode`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, overload

from megakernel.call import checked_call
from megakernel.drafting import Draft
from megakernel.loading import LoadedModel
from megakernel.request import Prompt, StopArgument
from megakernel.result import Generation, Piece
from model.sampling import SamplingParams

BackendName = Literal["auto", "interpret", "simulate", "tpu", "reference"]


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
      megakernel.RaceError: backend "simulate" found accesses to memory that nothing orders.
      megakernel.ContainerError: a packed model that is damaged, or packed for another number of cores.
      megakernel.HostsError: other hosts make another call, or none.
    """
    call = checked_call(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=stop,
        logprobs=logprobs,
        seed=seed,
        backend=backend,
        draft=draft,
        draft_tokens=draft_tokens,
        cores=cores,
        wire=wire,
        stream=stream,
    )
    if stream:
        return call.pieces()
    found = call.generations()
    return found[0] if call.single else found
