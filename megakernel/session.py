"""One plan at work: packed weights, caches on the device, the compiled launch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from megakernel import memory
from megakernel.backends import Backend
from megakernel.loading import LoadedModel
from megakernel.mesh import core_mesh, divided, fetched, on_mesh, replicated
from megakernel.pack import pack, pack_drafter
from megakernel.phases import penalty, sample
from megakernel.plan import Plan
from megakernel.prefill import prefill_slot
from megakernel.result import NumericsError, Speculation
from model.checkpoint import Checkpoint, CheckpointError
from model.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class SlotRequest:
    """What one sequence asks of one launch.

    Attributes:
      given: tokens to run before the first new one is kept; at least one.
      position: of the first given token.
      known: every token of the sequence so far, the given ones included (drafters and penalties look at it).
      wanted: most new tokens.
      output: how many of the last `known` tokens are new ones of earlier launches; those before are the prompt.
    """

    given: Sequence[int]
    position: int
    known: Sequence[int]
    wanted: int
    sampling: SamplingParams
    seed: int
    output: int = 0


@dataclasses.dataclass(frozen=True)
class SlotResult:
    """New tokens of one sequence and their log-probabilities; `reason` as in `megakernel.memory`."""

    tokens: list[int]
    logprobs: list[float]
    steps: int
    reason: int


class Session:
    """Decodes up to `plan.sequences` sequences together; slot i keeps its caches from launch to launch."""

    def __init__(
        self,
        model: LoadedModel,
        plan: Plan,
        backend: Backend,
        stop_tokens: Sequence[int] = (),
        draft_weights: Mapping[str, np.ndarray] | None = None,
    ):
        self.model, self.plan, self.backend = model, plan, backend
        self.stop_tokens = list(stop_tokens)
        self.mesh = core_mesh(plan.split.cores)
        self.weights = _packed_weights(model, plan, self.mesh, draft_weights or _NO_DRAFTS)
        empty = {name: np.zeros(b.shape, jnp.dtype(b.dtype)) for name, b in memory.cache_buffers(plan).items()}
        self.caches = divided(plan, self.mesh, lambda core: empty)
        self.compile_seconds = 0.0
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self.launches = 0
        self.steps = 0
        self.rounds = np.zeros(plan.sequences, np.int64)
        self.proposed = np.zeros((plan.sequences, plan.tokens - 1), np.int64)
        self.accepted = np.zeros((plan.sequences, plan.tokens - 1), np.int64)

    def prefill(self, slot: int, tokens: Sequence[int]) -> None:
        """Fills a slot's caches with a prompt, from position 0, through the reference model's chunkwise form."""
        started = time.perf_counter()
        self.caches = prefill_slot(self.model, self.plan, self.caches, slot, tokens)
        jax.block_until_ready(self.caches)
        self.prefill_seconds += time.perf_counter() - started

    def launch(self, requests: Sequence[SlotRequest | None]) -> list[SlotResult | None]:
        """One launch over all slots; a None slot stays as it is.

        Raises:
          NumericsError: a sequence met NaN or infinity.
          ValueError: a request is longer than the plan's launch or context.
        """
        for request in requests:
            _check_fits(self.plan, request)
        arrays = replicated(self.plan, self.mesh, _request_arrays(self.plan, requests, self.stop_tokens))
        run = self._compiled(arrays)
        started = time.perf_counter()
        self.device_results, self.caches = run(self.weights, self.caches, arrays)
        found = fetched(self.device_results)
        self.decode_seconds += time.perf_counter() - started
        self.launches += 1
        self.steps += int(found["status"][:, memory.TAKEN].max())
        self.results = found
        self.rounds += found["status"][:, memory.ROUNDS]
        self.proposed += found["proposed"][:, 1:]
        self.accepted += found["accepted"][:, 1:]
        return [
            None if request is None else self._slot_result(slot, request, found)
            for slot, request in enumerate([*requests, *[None] * (self.plan.sequences - len(requests))])
        ]

    def speculation(self, slot: int, tokens: int) -> Speculation | None:
        """How drafting went in a slot that has made `tokens` new tokens."""
        plan = self.plan
        if plan.drafter is None:
            return None
        return Speculation(
            drafter=plan.drafter.name,
            rounds=int(self.rounds[slot]),
            tokens=tokens,
            proposed=tuple(self.proposed[slot].tolist()),
            accepted=tuple(self.accepted[slot].tolist()),
            draft_share=1 - plan.draft_start / plan.tape_blocks,
        )

    def _compiled(self, arrays: dict[str, Any]) -> Any:
        key = ("launch", self.plan, self.backend.name)
        if key not in self.model.derived:
            started = time.perf_counter()
            launch = on_mesh(self.plan, self.mesh, self.backend.interpret)
            lowered = jax.jit(launch, donate_argnums=1).lower(self.weights, self.caches, arrays)
            self.model.derived[key] = lowered.compile()
            self.compile_seconds += time.perf_counter() - started
        return self.model.derived[key]

    def _slot_result(self, slot: int, request: SlotRequest, found: dict[str, np.ndarray]) -> SlotResult:
        status = found["status"][slot]
        if status[memory.REASON] == memory.BROKEN:
            raise NumericsError(_blame(self.model, int(status[memory.BAD_LAYER])))
        new = slice(len(request.given) - 1, int(status[memory.TAKEN]))
        return SlotResult(
            tokens=found["new_tokens"][slot, new].tolist(),
            logprobs=found["logprobs"][slot, new].tolist(),
            steps=int(status[memory.TAKEN]),
            reason=int(status[memory.REASON]),
        )


_NO_DRAFTS: Mapping[str, np.ndarray] = {}


def _check_fits(plan: Plan, request: SlotRequest | None) -> None:
    if request is None:
        return
    if request.sampling.adjusts_logits and not plan.penalties:
        raise ValueError(f"{request.sampling} needs a plan with penalties=True")
    tokens = len(request.given) - 1 + request.wanted
    if not request.given or tokens > plan.launch_steps or request.position + tokens > plan.context:
        raise ValueError(
            f"{len(request.given)} given tokens from position {request.position} and {request.wanted} new ones do not "
            f"fit a launch of {plan.launch_steps} tokens over a context of {plan.context}"
        )


def _packed_weights(
    model: LoadedModel, plan: Plan, mesh: Mesh, drafts: Mapping[str, np.ndarray]
) -> dict[str, jax.Array]:
    own = plan.drafter if "draft" in plan.sections or (plan.drafter and plan.drafter.weights(plan)) else None
    if own is None:  # a drafter without weights shares the model's arrays with plain decoding
        plan, drafts = dataclasses.replace(plan, drafter=None), _NO_DRAFTS
    key = ("packed", plan.split, plan.block_rows, plan.block_lanes, plan.storage, own)
    packed_from, arrays = model.derived.get(key, (None, {}))
    if packed_from is not drafts:  # the same kind of drafter with other weights
        arrays = divided(plan, mesh, lambda core: _core_weights(model, plan, drafts, core))
        model.derived[key] = (drafts, arrays)
    return arrays


def _core_weights(model: LoadedModel, plan: Plan, drafts: Mapping[str, np.ndarray], core: int) -> dict[str, np.ndarray]:
    if model.container is None:
        return pack(plan, model.weights, drafts, core=core)
    packed = model.container.core_arrays(plan, core)
    return pack_drafter(plan, packed, model.weights, drafts, core=core) if plan.drafter else packed


def _request_arrays(
    plan: Plan, requests: Sequence[SlotRequest | None], stop_tokens: Sequence[int]
) -> dict[str, np.ndarray]:
    arrays = {name: np.zeros(b.shape, b.dtype) for name, b in memory.request_buffers(plan).items()}
    arrays["stop_tokens"][:] = -1
    arrays["stop_tokens"][: len(stop_tokens)] = stop_tokens
    arrays["sampling_floats"][:, [sample.TOP_P, penalty.REPETITION]] = 1.0
    for slot, request in enumerate(requests):
        if request is None:
            continue
        if plan.drafter:
            plan.drafter.fill_request(plan, slot, list(request.known), arrays)
        if plan.penalties:
            _fill_penalties(slot, request, arrays)
        arrays["tokens"][slot, : len(request.given)] = request.given
        lanes = arrays["request"][slot]
        lanes[memory.START], lanes[memory.GIVEN], lanes[memory.WANTED] = (
            request.position,
            len(request.given),
            request.wanted,
        )
        floats, ints = arrays["sampling_floats"][slot], arrays["sampling_ints"][slot]
        floats[sample.TEMPERATURE] = request.sampling.temperature
        floats[sample.TOP_P], floats[sample.MIN_P] = request.sampling.top_p, request.sampling.min_p
        ints[sample.TOP_K] = request.sampling.top_k
        seed = np.array([request.seed & 0xFFFFFFFF, request.seed >> 32], np.uint32).view(np.int32)
        ints[sample.SEED_LOW], ints[sample.SEED_HIGH] = seed
    return arrays


def _fill_penalties(slot: int, request: SlotRequest, arrays: Mapping[str, np.ndarray]) -> None:
    """Bias and counts by vocabulary entry, see `megakernel.phases.penalty`."""
    asked, floats = request.sampling, arrays["sampling_floats"][slot]
    floats[penalty.REPETITION] = asked.repetition_penalty
    floats[penalty.PRESENCE], floats[penalty.FREQUENCY] = asked.presence_penalty, asked.frequency_penalty
    bias, counts = (arrays[name][slot].reshape(-1) for name in ("logit_bias", "known_counts"))
    bias[list(asked.logit_bias)] = list(asked.logit_bias.values())
    prompt = len(request.known) - request.output
    counts[list(request.known[:prompt])] = penalty.IN_PROMPT
    np.add.at(counts, list(request.known[prompt:]), penalty.ONE_OUTPUT)


def _blame(model: LoadedModel, layer: int) -> str:
    config = model.config
    prefix, where = f"model.layers.{layer}.", f"layer {layer}"
    if layer < config.num_hidden_layers:
        where += f" ({config.layer_kind(layer).upper()}, {'MoE' if config.is_moe(layer) else 'dense'})"
    else:
        prefix, where = "", "the final norm or the LM head"
    message = f"NaN or infinity in {where} of {config.name}"
    if model.container is not None:
        return f"{message}; look for damage: python -m megakernel check {model.container.folder}"
    names = [*(name for name in model.weights if name.startswith(prefix)), "model.embed_tokens.weight"]
    try:
        if isinstance(model.weights, Checkpoint):
            model.weights.verify_finite(names)
        else:
            _verify_finite(model, names)
    except CheckpointError as error:
        return f"{message}: {error}"
    return f"{message}; its weights are finite, so an activation overflowed"


def _verify_finite(model: LoadedModel, names: Sequence[str]) -> None:
    for name in names:
        tensor = model.weights[name]
        if tensor.dtype != np.uint8 and not np.isfinite(np.asarray(tensor, np.float32)).all():
            raise CheckpointError(f"tensor {name} holds NaN or infinity")
