"""Arguments of `decode` -> jobs, checked before anything is compiled."""

from __future__ import annotations

import dataclasses
import math
import operator
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from megakernel.loading import LoadedModel
from megakernel.memory import MAX_STOP_TOKENS
from model.sampling import SamplingParams

Prompt = str | Sequence[int]
StopArgument = str | int | Sequence[str | int] | None
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Job:
    """One sequence to decode. `index` is the place of its prompt in the call."""

    index: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams
    seed: int


@dataclasses.dataclass(frozen=True)
class Stop:
    """What ends a sequence: tokens inside the launch, strings on the host."""

    tokens: tuple[int, ...]
    strings: tuple[str, ...]


def make_jobs(
    model: LoadedModel,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int,
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    seed: int | Sequence[int] | None,
) -> tuple[list[Job], bool]:
    """Returns the jobs and whether `prompts` was a single prompt.

    Raises:
      ValueError, TypeError: an argument, by name and value, and what was expected.
    """
    many, single = _list_prompts(prompts)
    if not _is_int(max_new_tokens) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens = {max_new_tokens!r}; expected an integer, 1 or more")
    samplings = _one_each(many, SamplingParams() if sampling is None else sampling, "sampling", SamplingParams)
    for params in samplings:
        _check_bias(model, params)
    given = _draw_seeds(many) if seed is None else _plain_ints(seed)
    seeds = [_check_seed(value) for value in _one_each(many, given, "seed", int)]
    return [
        Job(i, _tokens(model, prompt, i, max_new_tokens), max_new_tokens, samplings[i], seeds[i])
        for i, prompt in enumerate(many)
    ], single


def make_stop(model: LoadedModel, stop: StopArgument) -> Stop:
    """End-of-sequence tokens of the model, and the caller's tokens and strings."""
    single = isinstance(stop, str) or _is_int(stop)
    entries: list[Any] = [stop] if single else []
    if not single and stop is not None:
        entries = _as_list(stop, f"stop = {stop!r}; expected strings or token ids")
    strings = tuple(entry for entry in entries if isinstance(entry, str))
    tokens = [entry for entry in entries if not isinstance(entry, str)]
    for token in tokens:
        _check_token(model, token, "stop")
    if "" in strings:
        raise ValueError("stop holds an empty string, which would stop before the first token")
    if strings and model.tokenizer is None:
        raise ValueError(f"stop = {strings!r} needs a tokenizer, and {model.config.name} has none; give token ids")
    all_tokens = tuple(dict.fromkeys([*model.config.eos_token_ids, *map(int, tokens)]))
    if len(all_tokens) > MAX_STOP_TOKENS:
        raise ValueError(f"stop: {len(all_tokens)} stop tokens with the model's own; at most {MAX_STOP_TOKENS}")
    return Stop(all_tokens, strings)


def _list_prompts(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    expected = "expected a string, a list of token ids, or a list of either"
    if isinstance(prompts, str):
        return [prompts], True
    many = _as_list(prompts, f"prompts = {prompts!r}; {expected}")
    if not many:
        raise ValueError(f"prompts is empty; {expected}")
    if all(_is_int(token) for token in many):
        return [many], True
    for index, prompt in enumerate(many):
        if not isinstance(prompt, str):
            _as_list(prompt, f"prompt {index} is {prompt!r}; expected a string or a list of token ids")
    return many, False


def _as_list(value: Any, message: str) -> list[Any]:
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise TypeError(message)
    return list(value)


def _tokens(model: LoadedModel, prompt: Prompt, index: int, max_new_tokens: int) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError(f"prompt {index} is a string, and {model.config.name} has no tokenizer; give token ids")
        tokens = tuple(model.tokenizer.encode(prompt))
    else:
        tokens = tuple(prompt)
    if not tokens:
        raise ValueError(f"prompt {index} is empty; expected at least one token")
    for token in tokens:
        _check_token(model, token, f"prompt {index}")
    limit = model.config.max_position_embeddings
    if len(tokens) + max_new_tokens > limit:
        raise ValueError(
            f"prompt {index} has {len(tokens)} tokens and max_new_tokens = {max_new_tokens}, together more than the "
            f"context of {limit}; shorten the prompt or lower max_new_tokens to {max(limit - len(tokens), 0)}"
        )
    return tuple(int(token) for token in tokens)


def _check_token(model: LoadedModel, token: object, where: str) -> None:
    vocab = model.config.vocab_size
    if not _is_int(token):
        raise TypeError(f"{where} holds {token!r}; expected token ids (integers)")
    if not 0 <= token < vocab:  # type: ignore[operator]
        raise ValueError(f"{where} holds token id {token}; expected 0 to {vocab - 1}")


def _check_bias(model: LoadedModel, params: SamplingParams) -> None:
    for token in params.logit_bias:
        _check_token(model, token, "logit_bias")
    if sum(value == -math.inf for value in params.logit_bias.values()) >= model.config.vocab_size:
        raise ValueError(f"logit_bias forbids all {model.config.vocab_size} tokens of {model.config.name}; allow one")


def _draw_seeds(prompts: Sequence[Prompt]) -> list[int]:
    return [secrets.randbits(63) for _ in prompts]


def _plain_ints(value: Any) -> Any:
    """Integers of NumPy and JAX as Python's; everything else as it is."""
    if _is_int(value):
        return int(value)
    return [int(one) if _is_int(one) else one for one in value] if isinstance(value, Iterable) else value


def _check_seed(seed: int) -> int:
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed = {seed}; expected 0 to 2**64 - 1")
    return seed


def _one_each(prompts: Sequence[Prompt], value: T | Sequence[T], name: str, kind: type[T]) -> list[T]:
    if isinstance(value, kind) and not isinstance(value, bool):
        return [value] * len(prompts)
    if not isinstance(value, list | tuple) or not all(isinstance(v, kind) and not isinstance(v, bool) for v in value):
        raise TypeError(f"{name} = {value!r}; expected {kind.__name__} or one for each prompt")
    if len(value) != len(prompts):
        raise ValueError(f"{name} has {len(value)} entries for {len(prompts)} prompts")
    return list(value)


def _is_int(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)
