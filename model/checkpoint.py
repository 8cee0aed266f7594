"""Checkpoints in the official Hugging Face layout: `config.json` and safetensors files.

Opening reads headers only; a tensor is read from its file when it is asked for. Reading and writing go one tensor,
or one shard, at a time, so a checkpoint larger than the memory can be streamed.

Names are those of `model.layout.tensor_specs`. In files they may carry the prefix `language_model.` (Kimi K3) or not
(Kimi-Linear). Tensors of the vision tower and its projector are left alone. This module does not import JAX.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from model.config import ModelConfig
from model.layout import TensorSpec, tensor_specs

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TEXT_PREFIX = "language_model."
OTHER_MODALITIES = ("vision_tower.", "mm_projector.")

NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32), "U8": np.dtype(np.uint8)}
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names file, tensor, what was expected and what was found."""


class Checkpoint(Mapping[str, np.ndarray]):
    """The text tensors of an opened checkpoint: a read-only mapping from names to arrays (see `open_checkpoint`).

    Each look-up reads the tensor from its file into a new array of the shape and dtype in `specs`; keep the array if
    it is needed twice. BF16 tensors have the dtype `ml_dtypes.bfloat16`.

    Attributes:
      config: the model's configuration.
      folder: the folder that was opened.
      specs: shape and dtype of every array, as returned. `A_log` has the shape [kda_num_heads].
    """

    def __init__(self, folder: Path, config: ModelConfig, specs: Mapping[str, TensorSpec], stored: Mapping[str, Any]):
        self.config = config
        self.folder = folder
        self.specs = specs
        self._stored = stored  # name -> (file, safe_open handle, name in the file)

    def __getitem__(self, name: str) -> np.ndarray:
        """Reads one tensor.

        Raises:
          KeyError: a name that is not in `specs`.
          CheckpointError: `A_log` with something else than zeros after the last head.
        """
        file, handle, name_in_file = self._stored[name]
        tensor = handle.get_tensor(name_in_file)
        spec = self.specs[name]
        if _is_a_log(name):
            tensor = self._cut_a_log(name, file, tensor.reshape(-1))
        return tensor.astype(NUMPY_DTYPES[spec.dtype], copy=False).reshape(spec.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __contains__(self, name: object) -> bool:
        return name in self.specs

    def __repr__(self) -> str:
        return f"<Checkpoint {str(self.folder)!r}: {self.config.name}, {len(self)} tensors, {self.nbytes:,} bytes>"

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays together, as returned."""
        return sum(spec_nbytes(spec) for spec in self.specs.values())

    def file_of(self, name: str) -> Path:
        """The safetensors file that holds a tensor."""
        return self._stored[name][0]

    def verify_finite(self, names: Iterable[str] | None = None) -> None:
        """Reads tensors (all of them by default) and checks that each number is finite.

        An MXFP4 scale byte of 0 or 255 counts as not finite.

        Raises:
          CheckpointError: for the first tensor that holds NaN or infinity, with their count and the first index.
        """
        for name in self.specs if names is None else names:
            tensor = self[name]
            if tensor.dtype == np.uint8:
                bad = (tensor == 0) | (tensor == 255) if name.endswith(".weight_scale") else np.zeros(1, bool)
                expected = "MXFP4 scale bytes from 1 to 254"
            else:
                bad = ~np.isfinite(tensor)
                expected = "finite numbers"
            if bad.any():
                where = tuple(int(i) for i in np.argwhere(bad)[0])
                raise CheckpointError(
                    f"{self.file_of(name)}: tensor {name!r}: expected {expected}; found {int(bad.sum())} others of "
                    f"{tensor.size}, the first one {tensor[where]} at {list(where)}"
                )

    def _cut_a_log(self, name: str, file: Path, values: np.ndarray) -> np.ndarray:
        heads = self.config.kda_num_heads
        tail = values[heads:]
        if tail.any():
            where = heads + int(np.flatnonzero(tail)[0])
            raise CheckpointError(
                f"{file}: tensor {name!r}: expected {heads} values (one a head), then zeros; found {values[where]} "
                f"at [{where}]"
            )
        return values[:heads]


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Opens a checkpoint and checks names, shapes and types of its tensors against its configuration.

    Reads `config.json`, the index (if there is one) and the header of each file that holds a text tensor; no tensor
    data. A tensor that the official layout holds in F32 may be stored in BF16 (some tools convert a whole checkpoint);
    it is widened on reading, which is exact. No other conversion is made.

    Args:
      folder: holds `config.json` and either `model.safetensors.index.json` with its shards or `model.safetensors`.

    Raises:
      ConfigError: a configuration that the library does not implement.
      CheckpointError: a missing or damaged file, a missing, unknown or doubled tensor, a wrong shape or dtype.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a checkpoint folder; found {_kind(folder)}")
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"{folder / CONFIG_FILE}: expected the model's configuration; found {_kind(folder)}")
    config = ModelConfig.from_file(folder)
    specs = tensor_specs(config)
    stored: dict[str, Any] = {}
    files = _files(folder)
    for file, indexed in files.items():
        handle = _open_file(file)
        names = handle.keys()
        if indexed is not None:
            _check_index(folder / INDEX_FILE, file, indexed, set(names))
        for name_in_file in names:
            if name_in_file.startswith(OTHER_MODALITIES):
                continue
            name = name_in_file.removeprefix(TEXT_PREFIX)
            if name not in specs:
                raise CheckpointError(
                    f"{file}: tensor {name_in_file!r}: expected only tensors of {folder / CONFIG_FILE}, "
                    f"which has no such tensor; do configuration and weights belong together?"
                )
            if name in stored:
                raise CheckpointError(
                    f"{file}: tensor {name_in_file!r}: expected once; found before in {stored[name][0]}"
                )
            view = handle.get_slice(name_in_file)
            _check_stored(file, name_in_file, config, specs[name], tuple(view.get_shape()), view.get_dtype())
            stored[name] = (file, handle, name_in_file)
    missing = [name for name in specs if name not in stored]
    if missing:
        spec = specs[missing[0]]
        raise CheckpointError(
            f"{folder}: tensor {missing[0]!r}: expected {spec.dtype} {list(spec.shape)}; found in none of "
            f"{', '.join(file.name for file in files)} ({len(missing)} of {len(specs)} tensors are missing)"
        )
    returned = {name: _returned(config, name, spec) for name, spec in specs.items()}
    return Checkpoint(folder, config, MappingProxyType(returned), stored)


def spec_nbytes(spec: TensorSpec) -> int:
    """Bytes of an array of this shape and dtype."""
    size = NUMPY_DTYPES[spec.dtype].itemsize
    for extent in spec.shape:
        size *= extent
    return size


def _returned(config: ModelConfig, name: str, spec: TensorSpec) -> TensorSpec:
    return TensorSpec((config.kda_num_heads,), spec.dtype) if _is_a_log(name) else spec


def _is_a_log(name: str) -> bool:
    return name.endswith(".A_log")


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The safetensors files to open, each with the names that the index places there (None without an index)."""
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / SINGLE_FILE).is_file():
            raise CheckpointError(f"{folder}: expected {INDEX_FILE} with its shards, or {SINGLE_FILE}; found neither")
        return {folder / SINGLE_FILE: None}
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        named: dict[Path, set[str] | None] = {}
        for name, shard in weight_map.items():
            names = named.setdefault(folder / shard, set())
            assert names is not None
            names.add(name)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index}: expected a JSON object with a weight_map from tensor names to file names; found {error!r}"
        ) from error
    text = {
        file: names for file, names in named.items() if not all(n.startswith(OTHER_MODALITIES) for n in names or ())
    }
    for file, names in text.items():
        if not file.is_file():
            name = min(n for n in names or () if not n.startswith(OTHER_MODALITIES))
            raise CheckpointError(f"{file}: tensor {name!r}: expected in this file by {index}; found {_kind(file)}")
    return text


def _open_file(file: Path) -> Any:
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: {_why_unreadable(file)} ({error})") from error


def _why_unreadable(file: Path) -> str:
    """Says what is wrong with a file that `safetensors` refuses: 8 bytes of header length, JSON header, data."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or 8 + length > size:
            return f"expected a safetensors header of {length} bytes; the file is cut off, found {size} bytes in all"
        try:
            header = json.loads(stream.read(length))
            ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
            last = max(ends, key=lambda name: ends[name])
        except (ValueError, KeyError, TypeError, AttributeError):
            return "expected a safetensors header; found something else"
    needed = 8 + length + ends[last]
    cut = [name for name, end in ends.items() if 8 + length + end > size]
    if cut:
        return f"tensor {min(cut, key=lambda name: ends[name])!r}: expected a file of {needed} bytes; found {size}"
    return f"tensor {last!r}: expected to end the file at byte {needed}; found {size} bytes"


def _check_index(index: Path, file: Path, indexed: set[str], found: set[str]) -> None:
    if indexed - found:
        name = min(indexed - found)
        raise CheckpointError(f"{file}: tensor {name!r}: expected in this file by {index}; found {len(found)} others")
    if found - indexed:
        name = min(found - indexed)
        raise CheckpointError(f"{file}: tensor {name!r}: expected in the weight_map of {index}; found in the file only")


def _check_stored(
    file: Path, name: str, config: ModelConfig, spec: TensorSpec, shape: tuple[int, ...], dtype: str
) -> None:
    if dtype != spec.dtype and (dtype, spec.dtype) != ("BF16", "F32"):
        raise CheckpointError(f"{file}: tensor {name!r}: expected dtype {spec.dtype}; found {dtype}")
    if _is_a_log(name):
        heads = config.kda_num_heads
        if shape != (1, 1, heads, 1) and not (len(shape) == 1 and shape[0] >= heads):
            raise CheckpointError(
                f"{file}: tensor {name!r}: expected shape [n] with n >= {heads} heads, or [1, 1, {heads}, 1]; "
                f"found {list(shape)}"
            )
    elif shape != spec.shape:
        raise CheckpointError(f"{file}: tensor {name!r}: expected shape {list(spec.shape)}; found {list(shape)}")


def _kind(path: Path) -> str:
    if path.is_dir():
        return f"a folder with {', '.join(sorted(p.name for p in path.iterdir())[:8]) or 'nothing in it'}"
    return "a file" if path.exists() else "nothing there"
