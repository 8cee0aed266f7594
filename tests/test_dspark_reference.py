"""The drafter's reference against outputs of the released `speculators` classes, and each classic mistake against the
tolerance; loading and saving.

`tests/data/dspark` is a small random drafter with the public tensor names, for a target of 128 numbers a position, and
what an independent implementation computes from `taps` for blocks anchored at several positions: the first one, within
the window of 16, just past it, and at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import spec_decode.dspark.reference as dspark
from model.config import ConfigError
from model.primitives import linear, rms_norm
from spec_decode.dspark.checkpoint import DrafterError, load_drafter, save_drafter
from spec_decode.dspark.config import DSparkConfig, dspark_specs

DRAFTER = Path(__file__).parent / "data" / "dspark"
ANCHORS = (1, 15, 17, 36)
BASE: DSparkConfig = DSparkConfig.from_file(DRAFTER)

# Roundings of a sum of n terms add up like a random walk: sqrt(n) unit roundoffs. Along the longest path: fc; in each
# layer a norm, a projection to heads, scores, the weighted sum, the output projection and three of the FFN; the head.
_WINDOW = BASE.sliding_window + BASE.block_size
_LAYER = 4 * BASE.hidden_size + 2 * BASE.head_dim + _WINDOW + BASE.num_heads * BASE.head_dim + BASE.intermediate_size
_TERMS = len(BASE.tap_layers) * BASE.target_hidden_size + BASE.num_layers * _LAYER + 2 * BASE.hidden_size
TOLERANCE = float(np.sqrt(2 * _TERMS)) * 2.0**-24  # two implementations; 5e-6
# With bfloat16: unit roundoff 2^-8, about 16 roundings a layer and 4 outside; one of the two sides rounds.
TOLERANCE_BF16 = float(np.sqrt(16 * BASE.num_layers + 4)) * 2.0**-8  # 2.8e-2


def error(ours: object, official: np.ndarray) -> float:
    """rms of the difference over rms of the official values."""
    official = np.asarray(official, np.float64)
    return float(np.sqrt(np.mean((np.asarray(ours, np.float64) - official) ** 2) / np.mean(official**2)))


@functools.cache
def official() -> dict[str, np.ndarray]:
    return load_file(DRAFTER / "ref.safetensors")


@functools.cache
def params(dtype: str = "float32") -> dict[str, jax.Array]:
    config, tensors = load_drafter(DRAFTER)
    return dspark.drafter_params(config, tensors, dtype)


def context(dtype: str = "float32") -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys, values and positions of all 37 positions of the prompt: blocks must not look at rows from p on."""
    ctx = dspark.context_features(params(dtype), BASE, jnp.asarray(official()["taps"]))
    positions = jnp.arange(len(ctx))
    return *dspark.context_kv(params(dtype), BASE, ctx, positions), positions


def block(anchor: int, dtype: str = "float32") -> jax.Array:
    token = jnp.asarray(official()["ids"][anchor])
    return dspark.block_hidden(params(dtype), BASE, token, jnp.asarray(anchor), *context(dtype))


def test_context_features() -> None:
    ctx = dspark.context_features(params(), BASE, jnp.asarray(official()["taps"]))
    assert error(ctx, official()["ctx"]) < TOLERANCE


@pytest.mark.parametrize("anchor", ANCHORS)
def test_drafts(anchor: int) -> None:
    expected = {name: official()[f"a{anchor}.{name}"] for name in ("hidden", "base_logits", "logits", "drafts")}
    token = jnp.asarray(official()["ids"][anchor])
    hidden = block(anchor)
    drafts, logits = dspark.draft(params(), BASE, token, jnp.asarray(anchor), *context())
    assert error(hidden, expected["hidden"]) < TOLERANCE
    assert error(dspark.base_logits(params(), hidden), expected["base_logits"]) < TOLERANCE
    assert error(logits, expected["logits"]) < TOLERANCE
    np.testing.assert_array_equal(drafts, expected["drafts"])

    before = jnp.concatenate([token[None], drafts[:-1]])
    assert error(dspark.confidence(params(), hidden, before), official()[f"a{anchor}.confidence"]) < TOLERANCE


@pytest.mark.parametrize("anchor", ANCHORS)
def test_bfloat16(anchor: int) -> None:
    assert error(block(anchor, "bfloat16").astype(jnp.float32), official()[f"a{anchor}.hidden"]) < TOLERANCE_BF16


def test_context_rows_may_lie_anywhere() -> None:
    """A ring: rows in another order, rows that hold nothing, rows of rejected drafts at p and after it."""
    keys, values, positions = context()
    order = np.random.default_rng(0).permutation(len(positions))
    empty = jnp.full((BASE.num_layers, 5, *keys.shape[2:]), 1e3)
    shuffled = [jnp.concatenate([rows[:, order], empty], axis=1) for rows in (keys, values)]
    where = jnp.concatenate([positions[order], -jnp.arange(1, 6)])
    token = jnp.asarray(official()["ids"][17])
    ours = dspark.block_hidden(params(), BASE, token, jnp.asarray(17), *shuffled, where)
    assert error(ours, official()["a17.hidden"]) < TOLERANCE


def test_blocks_in_parallel() -> None:
    at = jnp.asarray(ANCHORS)
    together = jax.vmap(dspark.draft, (None, None, 0, 0, None, None, None))
    drafts, _ = together(params(), BASE, jnp.asarray(official()["ids"])[at], at, *context())
    np.testing.assert_array_equal(drafts, np.stack([official()[f"a{anchor}.drafts"] for anchor in ANCHORS]))


# Mistakes


def interleaved_rotation(patch: pytest.MonkeyPatch) -> None:
    right = dspark.rotate

    def wrong(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
        pairs = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
        return right(pairs, positions, theta).reshape(*x.shape[:-1], 2, -1).mT.reshape(x.shape)

    patch.setattr(dspark, "rotate", wrong)


def rotation_before_the_head_norm(patch: pytest.MonkeyPatch) -> None:
    def wrong(p: dspark.Params, config: DSparkConfig, layer: int, x: jax.Array, at: jax.Array):
        prefix = f"layers.{layer}.self_attn"
        keys = linear(x, p[f"{prefix}.k_proj.weight"]).reshape(len(x), -1, config.head_dim)
        keys = rms_norm(dspark.rotate(keys, at, config.rope_theta), p[f"{prefix}.k_norm.weight"], config.rms_norm_eps)
        return keys, linear(x, p[f"{prefix}.v_proj.weight"]).reshape(keys.shape)

    patch.setattr(dspark, "keys_and_values", wrong)


def bidirectional_block(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dspark, "block_mask", lambda slots: jnp.ones((slots, slots), bool))


def input_norm_on_the_context(patch: pytest.MonkeyPatch) -> None:
    right = dspark.keys_and_values

    def wrong(p: dspark.Params, config: DSparkConfig, layer: int, x: jax.Array, at: jax.Array):
        if len(x) > config.block_size:
            x = rms_norm(x, p[f"layers.{layer}.input_layernorm.weight"], config.rms_norm_eps)
        return right(p, config, layer, x, at)

    patch.setattr(dspark, "keys_and_values", wrong)


def context_up_to_the_anchor(patch: pytest.MonkeyPatch) -> None:
    right = dspark.context_mask
    patch.setattr(dspark, "context_mask", lambda at, p, window: right(at, p, window) | (at == p))


def window_one_longer(patch: pytest.MonkeyPatch) -> None:
    right = dspark.context_mask
    patch.setattr(dspark, "context_mask", lambda at, p, window: right(at, p, window + 1))


def window_one_shorter(patch: pytest.MonkeyPatch) -> None:
    right = dspark.context_mask
    patch.setattr(dspark, "context_mask", lambda at, p, window: right(at, p, window - 1))


def window_of_each_slot(patch: pytest.MonkeyPatch) -> None:
    right = dspark.attend

    def wrong(queries, keys, values, visible):
        rows, slots = jnp.arange(visible[0].shape[-1]), jnp.arange(queries.shape[0])
        oldest = jnp.argmax(visible[0][0])  # of slot 0; later slots see fewer rows
        return right(queries, keys, values, (visible[0] & (rows >= oldest + slots[:, None]), visible[1]))

    patch.setattr(dspark, "attend", wrong)


def masks_all_at_the_anchor(patch: pytest.MonkeyPatch) -> None:
    right = dspark.rotate

    def wrong(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
        return right(x, positions if len(x) > BASE.block_size else positions[:1], theta)

    patch.setattr(dspark, "rotate", wrong)


def no_markov_bias(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dspark, "markov_bias", lambda p, previous: jnp.zeros(()))


def markov_tables_swapped(patch: pytest.MonkeyPatch) -> None:
    right = dspark.markov_bias
    w1, w2 = (f"markov_head.markov_w{i}.weight" for i in (1, 2))
    patch.setattr(dspark, "markov_bias", lambda p, previous: right({w1: p[w2], w2: p[w1]}, previous))


def markov_chain_sees_the_anchor_only(patch: pytest.MonkeyPatch) -> None:
    def wrong(p: dspark.Params, base: jax.Array, anchor: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = base + dspark.markov_bias(p, anchor)
        return jnp.argmax(logits, -1), logits

    patch.setattr(dspark, "markov_chain", wrong)


MISTAKES: dict[Callable[[pytest.MonkeyPatch], None], int] = {  # and an anchor at which it must show
    interleaved_rotation: 1,
    rotation_before_the_head_norm: 15,
    bidirectional_block: 1,
    input_norm_on_the_context: 1,
    context_up_to_the_anchor: 36,
    window_one_longer: 17,
    window_one_shorter: 17,
    window_of_each_slot: 17,
    masks_all_at_the_anchor: 15,
    no_markov_bias: 1,
    markov_tables_swapped: 1,
    markov_chain_sees_the_anchor_only: 15,
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistake_shows(mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    anchor = MISTAKES[mistake]
    mistake(monkeypatch)
    _, logits = dspark.draft(params(), BASE, jnp.asarray(official()["ids"][anchor]), jnp.asarray(anchor), *context())
    assert error(logits, official()[f"a{anchor}.logits"]) > 100 * TOLERANCE


def test_mixture_instead_of_prefix_is_another_tap() -> None:
    trace = {"prefix_sum": [jnp.full((3, 128), float(layer)) for layer in range(9)]}
    taps = dspark.target_taps(BASE, trace)
    np.testing.assert_array_equal(taps[0, ::128], np.array(BASE.tap_layers) - 1)


# Embeddings


def test_shared_embeddings() -> None:
    config, tensors = load_drafter(DRAFTER)
    shared = dataclasses.replace(config, shares_embeddings=True)
    own = {name: tensors.pop(name) for name in ("embed_tokens.weight", "lm_head.weight")}
    ours = dspark.drafter_params(shared, tensors, jnp.float32, tuple(own.values()))
    token = jnp.asarray(official()["ids"][15])
    drafts, _ = dspark.draft(ours, shared, token, jnp.asarray(15), *context())
    np.testing.assert_array_equal(drafts, official()["a15.drafts"])
    with pytest.raises(ValueError, match="needs the target's embeddings"):
        dspark.drafter_params(shared, tensors, jnp.float32)
    with pytest.raises(ValueError, match="has embeddings of its own"):
        dspark.drafter_params(config, tensors | own, jnp.float32, tuple(own.values()))
    narrow = own["embed_tokens.weight"], own["lm_head.weight"][:, :64]
    with pytest.raises(ValueError, match=r"lm_head.weight of the target has shape \(512, 64\); expected \(512, 128\)"):
        dspark.drafter_params(shared, tensors, jnp.float32, narrow)


# Files


def test_round_trip(tmp_path: Path) -> None:
    config, tensors = load_drafter(DRAFTER)
    save_drafter(tmp_path / "copy", config, tensors)
    again, copies = load_drafter(tmp_path / "copy")
    assert again == dataclasses.replace(config, name="copy")
    assert copies.keys() == dspark_specs(config).keys()
    for name, tensor in tensors.items():
        assert copies[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(copies[name], tensor)


def spoil(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> Path:
    """A copy of the drafter with changed tensors."""
    shutil.copytree(DRAFTER, folder, dirs_exist_ok=True)
    tensors = dict(load_drafter(DRAFTER)[1])
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def wrong_number(tensors: dict[str, np.ndarray]) -> None:
    tensors["norm.weight"] = tensors["norm.weight"].copy()
    tensors["norm.weight"][3] = np.nan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), r"'fc.weight': expected by the configuration; found 41 others"),
        (lambda t: t.update({"d2t": np.zeros(1)}), r"'d2t': expected only tensors of the configuration; found it too"),
        (
            lambda t: t.update({"norm.weight": t["norm.weight"][:64]}),
            r"'norm.weight': expected BF16 \[128\]; found BF16 \[64\]",
        ),
        (
            lambda t: t.update({"norm.weight": t["norm.weight"].astype(np.float32)}),
            r"'norm.weight': expected BF16 \[128\]; found F32 \[128\]",
        ),
        (wrong_number, r"'norm.weight': expected finite numbers; found 1 others of 128, the first one nan at \[3\]"),
    ],
)
def test_refused_files(tmp_path: Path, change: Callable[[dict[str, np.ndarray]], object], message: str) -> None:
    with pytest.raises(DrafterError, match=r"model\.safetensors: tensor " + message):
        load_drafter(spoil(tmp_path, change))


def test_missing_and_cut_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a drafter's folder holds a config\.json"):
        load_drafter(tmp_path)
    shutil.copy(DRAFTER / "config.json", tmp_path)
    with pytest.raises(DrafterError, match=r"model\.safetensors: expected a safetensors file; found nothing"):
        load_drafter(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((DRAFTER / "model.safetensors").read_bytes()[:500000])
    with pytest.raises(DrafterError, match="expected a whole safetensors file; found 500000 bytes"):
        load_drafter(tmp_path)


def test_refused_tensors_are_not_written(tmp_path: Path) -> None:
    config, tensors = load_drafter(DRAFTER)
    with pytest.raises(DrafterError, match=r"'norm.weight': expected \[128\]; found \[64\]"):
        save_drafter(tmp_path / "new", config, tensors | {"norm.weight": tensors["norm.weight"][:64]})
    with pytest.raises(DrafterError, match="'x': expected only tensors"):
        save_drafter(tmp_path / "new", config, tensors | {"x": tensors["norm.weight"]})
    assert not (tmp_path / "new").exists()
