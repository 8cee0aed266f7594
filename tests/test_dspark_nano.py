"""The shipped drafter: complete, small enough, and of use on text that it was not trained on."""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.checkpoint import open_checkpoint
from model.config import ModelConfig
from model.reference import Model, load_model
from model.tokenizer import Tokenizer
from spec_decode.dspark.checkpoint import load_drafter
from spec_decode.dspark.config import DSparkConfig
from spec_decode.dspark.reference import context_features, context_kv, draft, drafter_params

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # training/ is not part of the installed package
from training.data import SEPARATOR  # noqa: E402
from training.k3_nano_dspark import (  # noqa: E402
    CONFIG,
    Chains,
    Recipe,
    accepted,
    target_pass,
    tokens_per_round,
    write,
)

TARGET = ROOT / "model" / "checkpoints" / "k3-nano"
DRAFTER = ROOT / "spec_decode" / "checkpoints" / "k3-nano-dspark"
EXCERPT = Path(__file__).parent / "data" / "valid_excerpt.txt"


def test_folder_is_complete_and_under_4_mib() -> None:
    config, _ = load_drafter(DRAFTER)
    assert config == CONFIG
    files = list(DRAFTER.iterdir())
    assert {file.name for file in files} == {"PROVENANCE.md", "config.json", "model.safetensors"}
    assert sum(file.stat().st_size for file in files) <= 4 * 2**20


def test_fits_its_target() -> None:
    drafter, target = DSparkConfig.from_file(DRAFTER), ModelConfig.from_file(TARGET)
    assert drafter.shares_embeddings
    assert drafter.target_hidden_size == drafter.hidden_size == target.hidden_size
    assert drafter.vocab_size == target.vocab_size
    assert max(drafter.tap_layers) == target.num_hidden_layers
    assert drafter.mask_token_id in target.eos_token_ids  # a generation ends there, so no block is anchored at it


def test_tokens_per_round_plays_round_by_round() -> None:
    counts = np.array([[2, 7, 7, 0, 1, 7], [0, 0, 0, 0, 0, 0]])  # from 0 to 3, 4 and 6; six rounds of nothing
    assert tokens_per_round(counts, 7) == {
        "tokens_per_round": round(3 / 9 + 1, 3),
        "by_position": [round(2 / 9, 3), 0.5, 0.0, 0.0, 0.0, 0.0, 0.0],
    }
    assert tokens_per_round(counts[:1], 7, tokens=3)["tokens_per_round"] == 3.0


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(open_checkpoint(TARGET), ModelConfig.from_file(TARGET), jnp.bfloat16)


@pytest.mark.slow
def test_held_out_tokens_per_round(model: Model) -> None:
    """Greedy continuations of 8 beginnings of held-out paragraphs, 96 tokens each; measured: 5.0."""
    tokenizer = Tokenizer.from_folder(TARGET)
    recipe = Recipe(prefix=24, written=96)
    paragraphs = [text for text in EXCERPT.read_text().replace(SEPARATOR, "").split("\n\n") if len(text) > 200]
    ids = np.array([[4095, *tokenizer.encode(text)[: recipe.prefix - 1]] for text in paragraphs[:8]], np.int32)
    rows = len(ids)
    tokens = jnp.pad(jnp.asarray(ids), ((0, 0), (0, recipe.written)))
    chains = Chains(tokens, jnp.full(rows, recipe.prefix), jnp.zeros(rows))
    chains = jax.jit(functools.partial(write, recipe))(model, chains, jax.random.key(0))
    config, tensors = load_drafter(DRAFTER)
    table = model.embed_tokens[...]
    params = drafter_params(config, tensors, jnp.bfloat16, (table, table))
    counts = jax.jit(functools.partial(accepted, recipe, config))(params, model, chains)
    measured = tokens_per_round(np.asarray(counts), config.block_size - 1)
    print(measured)
    assert measured["tokens_per_round"] > 2.5

    # the same drafts one block at a time, with nothing in sight but what a decoder would have
    chain = dataclasses.replace(chains, tokens=chains.tokens[:1])
    taps, _ = target_pass(recipe, config, model, chain.tokens)
    for place in (0, 40):
        p = recipe.prefix + place
        positions = jnp.arange(p)
        keys, values = context_kv(params, config, context_features(params, config, taps[0, :p]), positions)
        drafts, _ = draft(params, config, chain.tokens[0, p], jnp.asarray(p), keys, values, positions)
        right = np.cumprod(np.asarray(drafts[:-1]) == np.asarray(chain.tokens[0, p + 1 : p + config.block_size]))
        assert abs(int(right.sum()) - int(counts[0, place])) <= 1  # other shapes round otherwise
