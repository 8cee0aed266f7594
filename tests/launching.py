"""How tests run the kernel: the one place that knows the launch interface."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from megakernel import LoadedModel, SamplingParams, make_plan
from megakernel.backends import Backend, simulator
from megakernel.loading import SHIPPED
from megakernel.mesh import core_mesh, on_mesh, shapes
from megakernel.plan import Plan
from megakernel.program import LANES, round_up
from megakernel.session import Session, SlotRequest
from megakernel.target import find_target
from model.config import ModelConfig
from model.reference import random_weights

DATA = Path(__file__).parent / "data"
GREEDY = SamplingParams()
needs_nano = pytest.mark.skipif(
    not (SHIPPED / "k3-nano" / "model.safetensors").is_file(), reason="this checkout has no weights of k3-nano"
)


@dataclasses.dataclass(frozen=True)
class Ask:
    """What one slot is asked for; `position` other than 0 goes on from what the slot holds."""

    tokens: Sequence[int]
    new: int = 8
    sampling: SamplingParams = GREEDY
    seed: int = 0
    position: int = 0

    def request(self) -> SlotRequest:
        return SlotRequest(
            given=list(self.tokens),
            position=self.position,
            known=list(self.tokens),
            wanted=self.new,
            sampling=self.sampling,
            seed=self.seed,
        )


@dataclasses.dataclass(frozen=True)
class Ran:
    """What one slot did. `fed`: every token that ran; `logits`: after each of them, [len(fed), vocab] f32."""

    fed: list[int]
    tokens: list[int]
    logprobs: list[float]
    logits: np.ndarray


@functools.cache
def random_model(name: str = "k3-mini", seed: int = 0, **changes: Any) -> LoadedModel:
    """A preset, changed in some fields, with random weights. Shared: do not change it."""
    config = dataclasses.replace(ModelConfig.preset(name), **changes)
    return LoadedModel(config, random_weights(config, seed))


def anew(model: LoadedModel) -> LoadedModel:
    """The same weights with nothing compiled or packed yet: for tests that replace parts of the kernel."""
    return LoadedModel(model.config, model.weights, model.tokenizer)


def open_session(
    model: LoadedModel,
    sequences: int = 1,
    *,
    target: str = "cpu",
    simulate: str | None = None,
    stop: Sequence[int] = (),
    context: int = 64,
    launch_steps: int = 64,
    **knobs: Any,
) -> Session:
    """A session that keeps logits. `simulate`: a DMA execution mode of the simulator; None interprets plainly."""
    machine = find_target(target)
    plan = make_plan(
        model.config,
        machine,
        sequences=sequences,
        context=context,
        launch_steps=launch_steps,
        keep_logits=True,
        **knobs,
    )
    backend = Backend(f"simulate {simulate}", machine, simulator(simulate)) if simulate else interpreted(machine.name)
    return Session(model, plan, backend, stop)


def interpreted(target: str = "cpu") -> Backend:
    return Backend("interpret", find_target(target), True)


def launch_once(session: Session, asks: Sequence[Ask | None]) -> list[Ran | None]:
    """One launch; plain decoding, so each round takes every slot on by one token."""
    results = session.launch([ask and ask.request() for ask in asks])
    logits = session.results["step_logits"]
    ran: list[Ran | None] = []
    for slot, (ask, result) in enumerate(zip(asks, results, strict=False)):
        if ask is None or result is None:
            ran.append(None)
            continue
        fed = [*ask.tokens, *result.tokens][: result.steps]
        kept = logits[: result.steps, slot, : session.plan.config.vocab_size]
        ran.append(Ran(fed, result.tokens, result.logprobs, kept))
    return ran


def run(model: LoadedModel, *asks: Ask, **how: Any) -> list[Ran]:
    """A fresh session, one launch."""
    return [ran for ran in launch_once(open_session(model, len(asks), **how), asks) if ran]


def slot_caches(session: Session, slot: int, length: int) -> dict[str, list[np.ndarray]]:
    """One slot's caches in the reference's layout: by name a list over layers; the first `length` latents."""
    config = session.plan.config
    caches = {name: np.asarray(value, np.float32) for name, value in session.caches.items()}
    found: dict[str, list[np.ndarray]] = {"kda_state": [], "conv_tail": [], "latents": []}
    if config.kda_layers:
        found["kda_state"] = list(caches["states"][:, :, slot])
        found["conv_tail"] = list(caches["conv_tails"][:, :, slot])
    if config.mla_layers:
        split, rank, extra = round_up(config.kv_lora_rank, LANES), config.kv_lora_rank, config.qk_rope_head_dim
        rows = caches["latents"][:, slot, :length]
        found["latents"] = list(np.concatenate([rows[..., :rank], rows[..., split : split + extra]], axis=-1))
    return found


def launch_jaxpr(plan: Plan, interpret: Any = True) -> Any:
    """The launch as JAX traces it."""
    mesh = core_mesh(plan.split.cores)
    return jax.make_jaxpr(on_mesh(plan, mesh, interpret))(*shapes(plan, mesh))


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation, those of jaxprs inside other equations included."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in equation.params.values():
            for value in parameter if isinstance(parameter, list | tuple) else [parameter]:
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def pallas_calls(jaxpr: Any) -> list[Any]:
    return [equation for equation in equations(jaxpr) if equation.primitive.name == "pallas_call"]


def relative_error(ours: Any, expected: Any) -> float:
    """rms of the difference over rms of the expected values."""
    ours, expected = np.asarray(ours, np.float64), np.asarray(expected, np.float64)
    return float(np.sqrt(np.mean((ours - expected) ** 2) / np.mean(expected**2)))


def perturbed(weights: Mapping[str, np.ndarray], relative: float, seed: int) -> dict[str, np.ndarray]:
    """Every float weight times (1 + relative * u), u uniform in [-1, 1]: the shape of rounding errors. Float32."""
    rng = np.random.default_rng(seed)
    return {
        name: tensor
        if tensor.dtype == np.uint8
        else np.asarray(tensor, np.float32) * (1 + relative * rng.uniform(-1, 1, tensor.shape)).astype(np.float32)
        for name, tensor in weights.items()
    }
