"""A model ready to decode: configuration, tensors or a container, tokenizer, and what has been packed of it so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megakernel.container import Check, Container, is_container, open_container
from model.checkpoint import CheckpointError, open_checkpoint
from model.config import ModelConfig
from model.tokenizer import Tokenizer

SHIPPED = Path(__file__).parent.parent / "model" / "checkpoints"


@dataclasses.dataclass
class LoadedModel:
    """See `load`.

    Attributes:
      weights: tensors by the names of `model.layout`; with a container, asking for one raises CheckpointError.
      container: what is already packed.
      derived: packed arrays and reference models by what they were made for.
    """

    config: ModelConfig
    weights: Mapping[str, np.ndarray]
    tokenizer: Tokenizer | None = None
    container: Container | None = None
    derived: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)


class Packed(Mapping[str, np.ndarray]):
    """The tensors of a model of which only a container is there: none."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __getitem__(self, name: str) -> np.ndarray:
        raise CheckpointError(
            f"{self._folder}: tensor {name!r}: a container holds packed arrays only; the reference model, and drafters "
            "that share tensors with their target, need the checkpoint itself"
        )

    def __contains__(self, name: object) -> bool:
        return False

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def load(source: str | Path, check: Check = "quick") -> LoadedModel:
    """Opens a model; tensors are read when they are first packed, a container's arrays when they are first used.

    Args:
      source: a folder in the official Hugging Face layout, a container (`python -m megakernel pack`), or the name of a
        shipped model ("k3-nano").
      check: of a container, before a core's arrays are used: "quick" compares sizes and completeness, "full" also
        hashes every byte.

    Raises:
      ContainerError: a container that is damaged or of another version.
      ModelNotFoundError: there is no such folder and no such shipped model.
      CheckpointError, ConfigError, TokenizerError (`model`): the folder is damaged or asks for something that is not
        implemented.
    """
    folder = Path(source)
    if not folder.is_dir():
        folder = SHIPPED / str(source)
        if not folder.is_dir():
            shipped = ", ".join(sorted(path.name for path in SHIPPED.iterdir() if path.is_dir()))
            raise ModelNotFoundError(f"{str(source)!r} is neither a folder nor a shipped model; shipped: {shipped}")
    if is_container(folder):
        container = open_container(folder, check)
        config = container.manifest.config
        return LoadedModel(config, Packed(folder), _tokenizer(folder, config), container)
    checkpoint = open_checkpoint(folder)
    return LoadedModel(checkpoint.config, checkpoint, _tokenizer(folder, checkpoint.config))


def _tokenizer(folder: Path, config: ModelConfig) -> Tokenizer | None:
    if not (folder / "tiktoken.model").is_file():
        return None
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelNotFoundError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size}"
        )
    return tokenizer


class ModelNotFoundError(ValueError):
    """No usable model at the given place."""
