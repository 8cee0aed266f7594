"""One training run: forward pass with export rounding, balancing of experts, optimiser step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model.quantize import round_to_mxfp4
from model.reference import Model, forward
from training.data import Stream
from training.evaluate import token_losses
from training.optimizer import Optimizer, Params

BIAS = "e_score_correction_bias"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Numbers of a run; the defaults are those of the shipped checkpoint."""

    steps: int = 6468
    batch: int = 32
    length: int = 1024
    rate: float = 8e-3
    adam_rate: float = 6e-3
    weight_decay: float = 0.3
    warmup: int = 100
    decay_from: float = 0.3
    quantize_from: float = 0.6
    paragraph_share: float = 0.5
    bias_rate: float = 2e-3
    chunk: int = 32
    seed: int = 0


class Skeleton:
    """The model's tree without its numbers: flat float32 master weights <-> a model that can run."""

    def __init__(self, model: Model) -> None:
        leaves, self.tree = jax.tree_util.tree_flatten_with_path(model)
        self.names = [jax.tree_util.keystr(path) for path, _ in leaves]
        self.dtypes = {name: leaf.dtype for name, (_, leaf) in zip(self.names, leaves, strict=True)}

    def flatten(self, model: Model) -> Params:
        return dict(zip(self.names, (leaf.astype(jnp.float32) for leaf in jax.tree.leaves(model)), strict=True))

    def model(self, params: Params, quantize: bool | jax.Array) -> Model:
        """Rounds to what the checkpoint will hold: BF16, and MXFP4 experts if `quantize`."""

        def rounded(name: str) -> jax.Array:
            param = params[name]
            if ".block_sparse_moe.w" in name:
                param = jnp.where(quantize, round_to_mxfp4(param), param)
            return param.astype(self.dtypes[name])

        return jax.tree.unflatten(self.tree, [rounded(name) for name in self.names])


def is_matrix(name: str) -> bool:
    """Hidden matrices, which Muon trains; embeddings, the router, score vectors and the like are Adam's."""
    others = (".b_proj", "conv1d", "res_proj", ".gate.", "norm", "A_log", "dt_bias")
    return "layers" in name and not any(part in name for part in others)


def schedule(step: int, recipe: Recipe) -> float:
    """Share of the full rate: warm-up, plateau, linear decay to zero."""
    decay_steps = recipe.steps * (1 - recipe.decay_from)
    return max(0.0, min(1.0, (step + 1) / recipe.warmup, (recipe.steps - step) / decay_steps))


class Trainer:
    """One run: parameters, optimiser state, and the compiled steps."""

    def __init__(self, initial: Model, recipe: Recipe, stream: Stream) -> None:
        self.config, self.recipe, self.stream = initial.config, recipe, stream
        self.skeleton = Skeleton(initial)
        self.params = self.skeleton.flatten(initial)
        self.optimizer = Optimizer(is_matrix, lambda name: is_matrix(name) or "embed" in name, recipe.weight_decay)
        self.state = self.optimizer.init(self.params)
        self.tokens = jnp.asarray(stream.tokens)
        self.biases = [name for name in self.skeleton.names if BIAS in name]
        self._jit_step = jax.jit(self._step, donate_argnums=(0, 1))

    def step(self, starts: np.ndarray, fresh: np.ndarray, rate: float, quantize: bool) -> tuple[jax.Array, jax.Array]:
        """One optimiser step on the windows of `Stream.epoch`; returns loss and loads `[MoE layers, E]`, unfinished."""
        self.params, self.state, loss, loads = self._jit_step(
            self.params, self.state, self.tokens, starts, fresh, rate, quantize
        )
        return loss, loads

    def model(self, quantize: bool = True) -> Model:
        return self.skeleton.model(self.params, quantize)

    def _windows(self, tokens: jax.Array, starts: jax.Array, fresh: jax.Array) -> jax.Array:
        offset = jnp.arange(self.recipe.length + 1)
        index = starts[:, None] + offset - fresh[:, None]
        return jnp.where((offset == 0) & fresh[:, None], self.stream.eos, tokens[index])

    def _loss(self, params: Params, windows: jax.Array, quantize: jax.Array) -> tuple[jax.Array, jax.Array]:
        trace: dict[str, list[jax.Array]] = {}
        model = self.skeleton.model(params, quantize)
        logits = forward(model, windows[:, :-1], chunk=self.recipe.chunk, trace=trace)
        experts = jnp.arange(self.config.num_experts)
        loads = jnp.stack([jnp.mean(chosen[..., None] == experts, (0, 1, 2)) for chosen in trace["topk_idx"]])
        return jnp.mean(token_losses(logits, windows[:, 1:])), loads

    def _step(
        self,
        params: Params,
        state: Any,
        tokens: jax.Array,
        starts: jax.Array,
        fresh: jax.Array,
        rate: jax.Array,
        quantize: jax.Array,
    ) -> tuple[Params, Any, jax.Array, jax.Array]:
        windows = self._windows(tokens, starts, fresh)
        (loss, loads), grads = jax.value_and_grad(self._loss, has_aux=True)(params, windows, quantize)
        biases = {name: params[name] for name in self.biases}
        params, state = self.optimizer.update(
            params, grads, state, rate * self.recipe.rate, rate * self.recipe.adam_rate
        )
        for layer, name in enumerate(self.biases):
            push = self.recipe.bias_rate * rate * jnp.sign(1 / self.config.num_experts - loads[layer])
            params[name] = biases[name] + push - jnp.mean(push)
        return params, state, loss, loads

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        rng = np.random.default_rng(self.recipe.seed)
        while True:
            starts, fresh = self.stream.epoch(rng, self.recipe.length, self.recipe.paragraph_share)
            for begin in range(0, len(starts) - self.recipe.batch + 1, self.recipe.batch):
                part = slice(begin, begin + self.recipe.batch)
                yield starts[part], fresh[part]
