"""Runs jobs: groups of sequences through the kernel, or one after another through the reference model."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from tqdm import tqdm

from megakernel.backends import Backend
from megakernel.drafting import Draft
from megakernel.limits import MAX_ROWS, PlanError
from megakernel.loading import LoadedModel
from megakernel.plan import Plan, make_plan
from megakernel.prefill import reference_model, run_prompt
from megakernel.program import power_of_two
from megakernel.races import refuse_races
from megakernel.request import Job, Stop
from megakernel.result import FinishReason, Generation, NumericsError, Piece, Speculation, Timing
from megakernel.session import Session, SlotRequest, SlotResult
from megakernel.text import TextStream
from model.reference import jit_step
from model.sampling import adjusted_logits, sample

KERNEL_PROMPT = 64
"""Longest prompt that the kernel reads itself; longer ones go through the reference's chunkwise form."""
_SMALLEST_CONTEXT = 256
_ROUNDS_TO_JUDGE, _PAYING = 32, 1.15
"""A drafter that makes fewer tokens a round than this, over so many rounds, is warned about."""
STREAM_TOKENS = 16
"""New tokens of one launch when text is streamed or stop strings are watched."""


@dataclasses.dataclass
class Progress:
    """One sequence on its way."""

    job: Job
    text: TextStream
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    finish: FinishReason | None = None
    shown: str = ""

    def take(self, tokens: Sequence[int], logprobs: Sequence[float], stop: Stop, with_logprobs: bool) -> Piece:
        """Adds new tokens, up to the one that ends the sequence."""
        sure, count = "", 0
        for token in tokens:
            count += 1
            if token in stop.tokens:
                self.finish = "stop"
                break
            sure += self.text.push(token)
            if self.text.stopped:
                self.finish = "stop"
                break
        self.tokens += tokens[:count]
        self.logprobs += logprobs[:count]
        if self.finish is None and len(self.tokens) >= self.job.max_new_tokens:
            self.finish = "length"
        if self.finish is not None:
            sure += self.text.flush()
        self.shown += sure
        kept = tuple(logprobs[:count]) if with_logprobs else None
        return Piece(self.job.index, sure, tuple(tokens[:count]), kept, self.finish)

    def generation(self, timing: Timing, with_logprobs: bool, speculation: Speculation | None = None) -> Generation:
        assert self.finish is not None
        return Generation(
            text=self.shown,
            tokens=tuple(self.tokens),
            finish_reason=self.finish,
            logprobs=tuple(self.logprobs) if with_logprobs else None,
            prompt_tokens=self.job.prompt,
            seed=self.job.seed,
            timing=timing,
            speculation=speculation,
        )


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all jobs of a call share."""

    stop: Stop
    with_logprobs: bool
    launch_tokens: int | None  # new tokens of one launch; None: all of them
    draft: Draft | None = None
    draft_tokens: int | None = None
    cores: int = 1
    wire: str | None = None
    has_tensors: bool = True  # not only a container, which the reference cannot read

    @property
    def kernel_prompt(self) -> int | None:
        """Longest prompt that the kernel reads itself; None where it must read them all: where the drafter sees every
        position, or where the reference has no tensors or its one core might not hold the model."""
        reads_all = self.cores > 1 or not self.has_tensors or (self.draft is not None and bool(self.draft.drafter.taps))
        return None if reads_all else KERNEL_PROMPT


def groups(
    model: LoadedModel, backend: Backend, jobs: Sequence[Job], settings: Settings
) -> Iterator[tuple[Plan, list[Job]]]:
    """Splits jobs into groups that one plan serves, as many sequences together as fit."""
    left = list(jobs)
    while left:
        size = min(len(left), MAX_ROWS)
        while True:
            try:
                plan = _plan_for(model, backend, left[:size], settings)
                break
            except PlanError:
                if size == 1:
                    raise
                size //= 2
        yield plan, left[:size]
        left = left[size:]


def _plan_for(model: LoadedModel, backend: Backend, jobs: Sequence[Job], settings: Settings) -> Plan:
    """A plan for these jobs; sizes are rounded up to powers of two, so that few plans are ever compiled."""
    context = max(len(job.prompt) + job.max_new_tokens for job in jobs)
    read = [1 if _is_prefilled(job, settings) else len(job.prompt) for job in jobs]
    steps = max(length + job.max_new_tokens for length, job in zip(read, jobs, strict=True))
    limit = model.config.max_position_embeddings
    return make_plan(
        model.config,
        backend.target,
        sequences=power_of_two(len(jobs)),
        context=min(power_of_two(max(context, _SMALLEST_CONTEXT)), limit),
        launch_steps=power_of_two(max(steps, _SMALLEST_CONTEXT)),
        drafter=settings.draft.drafter if settings.draft else None,
        draft_tokens=settings.draft_tokens,
        cores=settings.cores,
        wire=settings.wire,
        penalties=any(job.sampling.adjusts_logits for job in jobs),
        **(model.container.plan_choices(settings.cores) if model.container else {}),
    )


def _is_prefilled(job: Job, settings: Settings) -> bool:
    return settings.kernel_prompt is not None and len(job.prompt) > settings.kernel_prompt


def run_group(
    model: LoadedModel, backend: Backend, plan: Plan, jobs: Sequence[Job], settings: Settings
) -> Iterator[Piece | Generation]:
    """Decodes one group; yields pieces launch by launch, then one generation a job."""
    session = Session(model, plan, backend, settings.stop.tokens, settings.draft.weights if settings.draft else None)
    running = [Progress(job, TextStream(model.tokenizer, settings.stop.strings)) for job in jobs]
    nexts = [_first_request(session, slot, job, settings) for slot, job in enumerate(jobs)]
    while any(progress.finish is None for progress in running):
        requests = [
            dataclasses.replace(request, wanted=_launch_size(progress, settings)) if progress.finish is None else None
            for progress, request in zip(running, nexts, strict=True)
        ]
        pieces: dict[int, Piece] = {}
        for slot, result in enumerate(_launch(session, requests)[: len(jobs)]):
            request = requests[slot]
            if result is None or request is None:
                continue
            nexts[slot] = dataclasses.replace(
                request,
                given=result.tokens[-1:],
                position=request.position + result.steps,
                known=[*request.known, *result.tokens],
                output=request.output + len(result.tokens),
            )
            pieces[slot] = running[slot].take(result.tokens, result.logprobs, settings.stop, settings.with_logprobs)
        for slot, piece in pieces.items():
            ended = piece.finish_reason is not None
            yield dataclasses.replace(
                piece, generation=_generation(session, slot, running, settings) if ended else None
            )
    for slot in range(len(running)):
        generation = _generation(session, slot, running, settings)
        _warn_if_it_does_not_pay(generation.speculation)
        yield generation


def _launch(session: Session, requests: Sequence[SlotRequest | None]) -> list[SlotResult | None]:
    if session.backend.name != "simulate":
        return session.launch(requests)
    with refuse_races():
        results = session.launch(requests)
        jax.block_until_ready(session.caches)
    return results


def _generation(session: Session, slot: int, running: Sequence[Progress], settings: Settings) -> Generation:
    """What a slot has made, with the timing of the whole group so far."""
    timing = Timing(
        compile=session.compile_seconds,
        prefill=session.prefill_seconds,
        decode=session.decode_seconds,
        launches=session.launches,
        steps=session.steps,
        tokens=sum(len(progress.tokens) for progress in running),
    )
    speculation = session.speculation(slot, len(running[slot].tokens))
    return running[slot].generation(timing, settings.with_logprobs, speculation)


def _warn_if_it_does_not_pay(speculation: Speculation | None) -> None:
    if speculation and speculation.rounds >= _ROUNDS_TO_JUDGE and speculation.tokens_per_round < _PAYING:
        warnings.warn(
            f"drafter {speculation.drafter!r} made {speculation.tokens_per_round:.2f} tokens a round "
            f"(1.00 is plain decoding) over {speculation.rounds} rounds; draft='none' may be faster here",
            stacklevel=2,
        )


def _first_request(session: Session, slot: int, job: Job, settings: Settings) -> SlotRequest:
    given, position = job.prompt, 0
    if _is_prefilled(job, settings):
        session.prefill(slot, given[:-1])
        given, position = given[-1:], len(given) - 1
    return SlotRequest(given, position, job.prompt, job.max_new_tokens, job.sampling, job.seed)


def _launch_size(progress: Progress, settings: Settings) -> int:
    left = progress.job.max_new_tokens - len(progress.tokens)
    return min(left, settings.launch_tokens or left)


def run_reference(model: LoadedModel, jobs: Sequence[Job], settings: Settings) -> Iterator[Piece | Generation]:
    """The same jobs, one after another, token by token through the reference model in float32."""
    for job in jobs:
        progress = Progress(job, TextStream(model.tokenizer, settings.stop.strings))
        started = time.perf_counter()
        logits, cache = run_prompt(model, "float32", job.prompt, len(job.prompt) + job.max_new_tokens)
        prefill = time.perf_counter() - started
        reference, started = reference_model(model, "float32"), time.perf_counter()
        bar = tqdm(total=job.max_new_tokens, desc="reference", unit="token", disable=None, leave=False)
        while progress.finish is None:
            if not bool(jnp.isfinite(logits).all()):
                raise NumericsError(f"NaN or infinity in the logits of {model.config.name}")
            position = len(job.prompt) + len(progress.tokens)
            adjusted = adjusted_logits(logits[0], job.sampling, job.prompt, progress.tokens)
            token = int(sample(adjusted, job.sampling, job.seed, position))
            logprob = float(logits[0, token] - jnp.logaddexp.reduce(logits[0]))
            piece = progress.take([token], [logprob], settings.stop, settings.with_logprobs)
            bar.update()
            if progress.finish is None:
                yield piece
                logits, cache = jit_step(reference, jnp.array([token], jnp.int32), cache)
        bar.close()
        seconds, count = time.perf_counter() - started, len(progress.tokens)
        generation = progress.generation(Timing(0.0, prefill, seconds, 0, count, count), settings.with_logprobs)
        yield dataclasses.replace(piece, generation=generation)
        yield generation
