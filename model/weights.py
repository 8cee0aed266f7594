"""Tensors by name <-> parameters of the reference model, and random weights for tests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from model.config import ModelConfig
from model.layout import TensorSpec, tensor_specs
from model.quantize import decode_mxfp4, encode_mxfp4
from model.source import Source

if TYPE_CHECKING:
    from model.reference import Model

_EXPERT = re.compile(r"(?P<moe>.*)\.experts\.(?P<expert>\d+)\.(?P<matrix>w[123])\.(?P<part>weight\w*)")


def source_of(weights: Mapping[str, np.ndarray], config: ModelConfig, dtype: DTypeLike) -> Source:
    """Checks `weights` against the contract of `model.layout` and serves them to the modules.

    Tensors stored as BF16 come in `dtype`, F32 ones in float32; `experts.w1` and its like stack all experts.
    """
    specs = tensor_specs(config)
    _check(weights, specs, config)

    def tensor(name: str) -> jax.Array:
        if ".experts.w" in name:
            stem, matrix = name.rsplit(".", 1)
            stack = np.stack([_expert(weights, f"{stem}.{e}.{matrix}") for e in range(config.num_experts)])
            return jnp.asarray(stack, dtype)
        if name.endswith(".A_log"):  # stored padded (K3) or with axes of length one (Kimi Linear)
            return jnp.asarray(weights[name], jnp.float32).reshape(-1)[: config.kda_num_heads]
        return jnp.asarray(weights[name], jnp.float32 if specs[name].dtype == "F32" else dtype)

    return tensor


def model_weights(model: Model) -> dict[str, np.ndarray]:
    """The model's tensors as a checkpoint stores them: BF16 rounded, experts encoded as the configuration says."""
    weights: dict[str, np.ndarray] = {}
    stacks: dict[str, np.ndarray] = {}
    for name, spec in tensor_specs(model.config).items():
        expert = _EXPERT.fullmatch(name)
        if not expert:
            weights[name] = np.asarray(parameter(model, name)[...]).astype(_numpy_dtype(spec))
            continue
        stack = f"{expert['moe']}.{expert['matrix']}"
        if stack not in stacks:
            stacks[stack] = np.asarray(parameter(model, stack)[...], np.float32)
        matrix = stacks[stack][int(expert["expert"])]
        if expert["part"] == "weight":
            weights[name] = matrix.astype(ml_dtypes.bfloat16)
        elif expert["part"] == "weight_packed":
            packed, scale = encode_mxfp4(matrix)
            weights[name], weights[name.replace("_packed", "_scale")] = packed, scale
    return {name: weights[name] for name in tensor_specs(model.config)}


def parameter(model: Model, name: str) -> nnx.Param:
    """The parameter that holds a tensor: the official name is the path of attributes."""
    node = model
    for part in name.removeprefix("model.").removesuffix(".weight").split("."):
        node = node[int(part)] if part.isdigit() else getattr(node, part)  # type: ignore[index]
    return node if isinstance(node, nnx.Param) else node.weight  # type: ignore[attr-defined]


def random_weights(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Random tensors for tests, the same for the same seed.

    Every linear map keeps the scale of its input, decays spread over the whole range from long to short memory, and
    norms and biases differ from their neutral values, so that leaving one out shows.
    """
    rng = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}
    for name, spec in tensor_specs(config).items():
        if name.endswith("weight_scale"):
            continue
        if name.endswith("weight_packed"):
            out, into = spec.shape[0], spec.shape[1] * 2
            matrix = rng.standard_normal((out, into), np.float32) / np.float32(into) ** 0.5
            weights[name], weights[name.replace("_packed", "_scale")] = encode_mxfp4(matrix)
        else:
            weights[name] = _random_tensor(rng, name, spec, config).astype(_numpy_dtype(spec))
    return {name: weights[name] for name in tensor_specs(config)}


def _random_tensor(rng: np.random.Generator, name: str, spec: TensorSpec, config: ModelConfig) -> np.ndarray:
    if name.endswith(".A_log"):
        return rng.uniform(-0.5, 0.5, config.kda_num_heads)
    if name.endswith(".dt_bias"):
        return rng.uniform(-6.0, 0.0, spec.shape)
    if name.endswith("e_score_correction_bias"):
        return rng.normal(0.0, 0.1, spec.shape)
    if name.endswith("conv1d.weight"):
        return rng.normal(0.0, 0.5, spec.shape) + (np.arange(spec.shape[-1]) == spec.shape[-1] - 1)
    if name.endswith(".embed_tokens.weight"):
        return rng.standard_normal(spec.shape)
    if len(spec.shape) == 1:  # norms
        return 1 + rng.normal(0.0, 0.1, spec.shape)
    return rng.standard_normal(spec.shape) / spec.shape[-1] ** 0.5


def _check(weights: Mapping[str, np.ndarray], specs: Mapping[str, TensorSpec], config: ModelConfig) -> None:
    missing, unknown = specs.keys() - weights.keys(), weights.keys() - specs.keys()
    if missing or unknown:
        problem, names = ("missing", missing) if missing else ("not part of this model", unknown)
        raise ValueError(f"{config.name}: {len(names)} tensors are {problem}, the first is {min(names)}")
    for name, spec in specs.items():
        shape = weights[name].shape
        if name.endswith(".A_log"):
            if np.prod(shape) < config.kda_num_heads:
                raise ValueError(f"{name} holds {np.prod(shape)} numbers; expected at least {config.kda_num_heads}")
        elif shape != spec.shape:
            raise ValueError(f"{name} has shape {shape}; expected {spec.shape}")


def _expert(weights: Mapping[str, np.ndarray], stem: str) -> np.ndarray:
    if f"{stem}.weight" in weights:
        return np.asarray(weights[f"{stem}.weight"], np.float32)
    return decode_mxfp4(weights[f"{stem}.weight_packed"], weights[f"{stem}.weight_scale"])


def _numpy_dtype(spec: TensorSpec) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if spec.dtype == "BF16" else np.float32)
