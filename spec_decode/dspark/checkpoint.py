"""A drafter's folder: `config.json` and `model.safetensors`, with the public tensor names, all BF16."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from spec_decode.dspark.config import DSparkConfig, dspark_specs

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
BF16 = np.dtype(ml_dtypes.bfloat16)


class DrafterError(ValueError):
    """A drafter that cannot be used; the message names file, tensor, what was expected and what was found."""


def load_drafter(folder: str | Path) -> tuple[DSparkConfig, dict[str, np.ndarray]]:
    """Reads a drafter: its configuration and every tensor of `dspark_specs(config)`, as `ml_dtypes.bfloat16`.

    Raises:
      ConfigError: a configuration that is not implemented.
      DrafterError: a missing or unreadable file; a missing, unknown, misshapen or mistyped tensor; a number that is
        not finite.
    """
    config = DSparkConfig.from_file(folder)
    file = Path(folder) / WEIGHTS_FILE
    if not file.is_file():
        raise DrafterError(f"{file}: expected a safetensors file; found {'a folder' if file.is_dir() else 'nothing'}")
    specs = dspark_specs(config)
    tensors: dict[str, np.ndarray] = {}
    try:
        with safe_open(file, framework="numpy") as stored:
            _check_names(file, set(specs), set(stored.keys()))
            for name, spec in specs.items():
                part = stored.get_slice(name)
                shape, dtype = tuple(part.get_shape()), part.get_dtype()
                if (shape, dtype) != (spec.shape, spec.dtype):
                    expected = f"{spec.dtype} {list(spec.shape)}"
                    raise DrafterError(f"{file}: tensor {name!r}: expected {expected}; found {dtype} {list(shape)}")
                tensors[name] = stored.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise DrafterError(
            f"{file}: expected a whole safetensors file; found {file.stat().st_size} bytes: {error}"
        ) from None
    for name, tensor in tensors.items():
        _check_finite(file, name, tensor)
    return config, tensors


def save_drafter(folder: str | Path, config: DSparkConfig, tensors: Mapping[str, Any]) -> None:
    """Writes `config.json` and `model.safetensors` into `folder`, which is created if need be; other files stay.

    Args:
      folder: where to.
      config: the drafter's configuration.
      tensors: exactly the names and shapes of `dspark_specs(config)`; any float type, rounded to BF16.

    Raises:
      DrafterError: a missing, unknown or misshapen tensor, or a number that is not finite; nothing is written then.
    """
    folder = Path(folder)
    file = folder / WEIGHTS_FILE
    specs = dspark_specs(config)
    _check_names(file, set(specs), set(tensors))
    rounded: dict[str, np.ndarray] = {}
    for name, spec in specs.items():
        tensor = np.ascontiguousarray(np.asarray(tensors[name]).astype(BF16))
        if tensor.shape != spec.shape:
            raise DrafterError(f"{file}: tensor {name!r}: expected {list(spec.shape)}; found {list(tensor.shape)}")
        _check_finite(file, name, tensor)
        rounded[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    save_file(rounded, file, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config.to_dict(), indent=2) + "\n")


def _check_names(file: Path, expected: set[str], found: set[str]) -> None:
    if expected - found:
        name = min(expected - found)
        raise DrafterError(f"{file}: tensor {name!r}: expected by the configuration; found {len(found)} others")
    if found - expected:
        name = min(found - expected)
        raise DrafterError(f"{file}: tensor {name!r}: expected only tensors of the configuration; found it too")


def _check_finite(file: Path, name: str, tensor: np.ndarray) -> None:
    bad = ~np.isfinite(tensor.astype(np.float32))
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise DrafterError(
            f"{file}: tensor {name!r}: expected finite numbers; found {int(bad.sum())} others of {tensor.size}, "
            f"the first one {tensor[where]} at {list(where)}"
        )
