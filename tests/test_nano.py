"""The shipped checkpoint: complete, small enough, and as good on held-out text as its PROVENANCE says."""

from __future__ import annotations

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from model.checkpoint import open_checkpoint
from model.config import ModelConfig
from model.reference import Model, init_cache, jit_prefill, jit_step, load_model
from model.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # training/ is not part of the installed package
from training.data import SEPARATOR  # noqa: E402
from training.evaluate import bits_per_byte  # noqa: E402

FOLDER = ROOT / "model" / "checkpoints" / "k3-nano"
EXCERPT = Path(__file__).parent / "data" / "valid_excerpt.txt"


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(open_checkpoint(FOLDER), ModelConfig.from_file(FOLDER), jnp.float32)


def documents() -> list[str]:
    return [text.strip() for text in EXCERPT.read_text().split(SEPARATOR) if text.strip()]


def test_folder_is_complete_and_under_14_mib() -> None:
    assert ModelConfig.from_file(FOLDER) == ModelConfig.preset("k3-nano")
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 14 * 2**20
    assert {"PROVENANCE.md", "config.json", "model.safetensors", "tiktoken.model", "tokenizer_config.json"} <= {
        file.name for file in files
    }
    assert len(list((FOLDER / "LICENSES").iterdir())) == 11


def test_held_out_bits_per_byte(model: Model) -> None:
    """Five documents that were not trained on; measured: 1.0705."""
    bits = bits_per_byte(model, documents(), Tokenizer.from_folder(FOLDER), eos=4095, batch=4)
    assert bits < 1.075


def test_writes_text_from_nothing_and_from_a_prompt(model: Model) -> None:
    tokenizer = Tokenizer.from_folder(FOLDER)
    ids = [4095, *tokenizer.encode("The President of the United")]
    logits, cache = jit_prefill(
        model, jnp.asarray([ids]), jnp.asarray([len(ids)]), init_cache(model.config, 1, len(ids) + 8)
    )
    assert tokenizer.decode([int(np.argmax(logits[0]))]) == " States"
    for _ in range(8):
        logits, cache = jit_step(model, jnp.argmax(logits, axis=-1), cache)
        assert np.isfinite(np.asarray(logits)).all()
