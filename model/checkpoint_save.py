"""Writing a checkpoint in the official Hugging Face layout: the inverse of `model.checkpoint.open_checkpoint`."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from model.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    NUMPY_DTYPES,
    SINGLE_FILE,
    TEXT_PREFIX,
    CheckpointError,
    spec_nbytes,
)
from model.config import ModelConfig
from model.layout import TensorSpec, tensor_specs

_SHARD = re.compile(r"model-\d{5}-of-\d{6}\.safetensors")


def save_checkpoint(
    folder: str | Path, config: ModelConfig, weights: Mapping[str, Any], max_shard_bytes: int | None = None
) -> None:
    """Writes `config.json` and the weights, replacing the checkpoint in `folder` if there is one.

    A model with attention residuals is written as Kimi K3 is: nested configuration, names with the prefix
    `language_model.`, `A_log` zero-padded to the next multiple of `kda_head_dim`. Any other model is written as
    Kimi-Linear is: flat configuration, bare names, `A_log` as [1, 1, heads, 1].

    All files are first written beside the final ones and then renamed, so an error while writing leaves `folder` as it
    was. Other files in the folder (a tokenizer) stay.

    Args:
      folder: created if need be.
      config: the model's configuration.
      weights: exactly the names of `model.layout.tensor_specs(config)`, as numpy or JAX arrays of those shapes and
        dtypes; `A_log` has the shape [kda_num_heads]. Each is looked up once, shard by shard.
      max_shard_bytes: the most tensor bytes in one file (a larger tensor gets a file of its own); None writes one file.

    Raises:
      CheckpointError: `folder` is a file, a missing or unknown tensor, a wrong shape or dtype, or
        `max_shard_bytes` < 1.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a folder, or nothing; found a file")
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes = {max_shard_bytes}; expected at least 1, or None for a single file")
    specs = {name: _stored(config, name, spec) for name, spec in tensor_specs(config).items()}
    for name in specs:
        if name not in weights:
            raise CheckpointError(f"{folder}: tensor {name!r}: expected in weights; found {len(weights)} others")
    for name in weights:
        if name not in specs:
            raise CheckpointError(
                f"{folder}: tensor {name!r}: expected only tensors of the configuration; found it too"
            )
    shards = _plan_shards(specs, max_shard_bytes)
    prefix = TEXT_PREFIX if config.attn_res_block_size else ""

    staging = folder.resolve().parent / f".{folder.resolve().name}.writing-{uuid.uuid4().hex}"
    staging.mkdir(parents=True)
    try:
        for file, names in shards.items():
            tensors = {prefix + name: _to_store(folder, config, name, specs[name], weights[name]) for name in names}
            save_file(tensors, staging / file, metadata={"format": "pt"})
        (staging / CONFIG_FILE).write_text(json.dumps(config.to_dict(), indent=2) + "\n")
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(spec_nbytes(spec) for spec in specs.values())},
                "weight_map": {prefix + name: file for file, names in shards.items() for name in names},
            }
            (staging / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        _publish(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _plan_shards(specs: Mapping[str, TensorSpec], max_bytes: int | None) -> dict[str, list[str]]:
    """File name -> tensor names, in forward order."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, spec in specs.items():
        size = spec_nbytes(spec)
        if max_bytes is not None and shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):06d}.safetensors": names for i, names in enumerate(shards, start=1)}


def _stored(config: ModelConfig, name: str, spec: TensorSpec) -> TensorSpec:
    if not name.endswith(".A_log"):
        return spec
    heads, head_dim = config.kda_num_heads, config.kda_head_dim
    if not config.attn_res_block_size:
        return TensorSpec((1, 1, heads, 1), spec.dtype)
    return TensorSpec((-(-heads // head_dim) * head_dim,), spec.dtype)


def _to_store(folder: Path, config: ModelConfig, name: str, spec: TensorSpec, weight: Any) -> np.ndarray:
    array = np.asarray(weight)
    is_a_log = name.endswith(".A_log")
    shape = (config.kda_num_heads,) if is_a_log else spec.shape
    if array.dtype != NUMPY_DTYPES[spec.dtype] or array.shape != shape:
        raise CheckpointError(
            f"{folder}: tensor {name!r}: expected {NUMPY_DTYPES[spec.dtype]} {list(shape)}; "
            f"found {array.dtype} {list(array.shape)}"
        )
    if not is_a_log:
        return np.ascontiguousarray(array)
    padded = np.zeros(spec.shape, array.dtype)
    padded.reshape(-1)[: array.size] = array
    return padded


def _publish(staging: Path, folder: Path) -> None:
    """Renames the written files into `folder`, the index last, and removes the files of an earlier checkpoint."""
    if not folder.exists():
        staging.rename(folder)
        return
    written = sorted((path.name for path in staging.iterdir()), key=lambda name: (name == INDEX_FILE, name))
    for name in written:
        os.replace(staging / name, folder / name)
    for path in folder.iterdir():
        stale = path.name in (INDEX_FILE, SINGLE_FILE) or _SHARD.fullmatch(path.name)
        if stale and path.name not in written:
            path.unlink()
