"""A model ready to decode: configuration, tensors, tokenizer, and what has been packed of it so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from model.checkpoint import open_checkpoint
from model.config import ModelConfig
from model.tokenizer import Tokenizer

SHIPPED = Path(__file__).parent.parent / "model" / "checkpoints"


@dataclasses.dataclass
class LoadedModel:
    """See `load`. `derived` keeps packed arrays and reference models by what they were made for."""

    config: ModelConfig
    weights: Mapping[str, np.ndarray]
    tokenizer: Tokenizer | None = None
    derived: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)


def load(source: str | Path) -> LoadedModel:
    """Opens a model; tensors are read when they are first packed.

    Args:
      source: a folder in the official Hugging Face layout, or the name of a shipped model ("k3-nano").

    Raises:
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
    checkpoint = open_checkpoint(folder)
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tiktoken.model").is_file() else None
    if tokenizer is not None and tokenizer.vocab_size > checkpoint.config.vocab_size:
        raise ModelNotFoundError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, the model {checkpoint.config.vocab_size}"
        )
    return LoadedModel(checkpoint.config, checkpoint, tokenizer)


class ModelNotFoundError(ValueError):
    """No usable model at the given place."""
