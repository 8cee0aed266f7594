"""Checkpoints: what is written is read back, files are read lazily, and each kind of damage is named."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model.checkpoint import Checkpoint, CheckpointError, open_checkpoint, spec_nbytes
from model.checkpoint_save import save_checkpoint
from model.config import ConfigError, ModelConfig
from model.layout import tensor_specs

DTYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "U8": np.uint8}
K3 = dataclasses.replace(
    ModelConfig.preset("k3-mini"), name="k3", vocab_size=64, num_experts=4, moe_intermediate_size=32, kda_head_dim=32
)
KIMI_LINEAR = dataclasses.replace(
    ModelConfig.preset("kimi-linear-48b"),
    name="kimi-linear",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=5,
    num_experts=4,
    num_experts_per_token=2,
    moe_intermediate_size=32,
    routed_expert_hidden_size=32,
    num_attention_heads=2,
    kv_lora_rank=32,
    kda_num_heads=3,
    kda_head_dim=32,
    mla_layers=(3, 4),
    eos_token_ids=(1,),
)
CONFIGS = pytest.mark.parametrize("config", [K3, KIMI_LINEAR], ids=lambda config: config.name)
A_LOG = "model.layers.1.self_attn.A_log"


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    weights = {}
    for name, spec in tensor_specs(config).items():
        shape = (config.kda_num_heads,) if name.endswith(".A_log") else spec.shape
        if spec.dtype == "U8":
            weights[name] = rng.integers(1, 255, shape).astype(np.uint8)
        else:
            weights[name] = rng.standard_normal(shape).astype(DTYPES[spec.dtype])
    return weights


def assert_holds(checkpoint: Checkpoint, weights: dict[str, np.ndarray]) -> None:
    assert list(checkpoint) == list(weights)
    assert len(checkpoint) == len(weights)
    for name, expected in weights.items():
        found = checkpoint[name]
        assert found.dtype == expected.dtype, name
        np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8), err_msg=name)
        assert found.shape == expected.shape == checkpoint.specs[name].shape


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], Any], file: str = "model.safetensors") -> None:
    """Changes the tensors of one file as a foreign tool would."""
    tensors = dict(load_file(folder / file))
    change(tensors)
    save_file(tensors, folder / file)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A Kimi K3 checkpoint in a single file."""
    save_checkpoint(tmp_path / "saved", K3, random_weights(K3))
    return tmp_path / "saved"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "sharded", K3, random_weights(K3), max_shard_bytes=200_000)
    return tmp_path / "sharded"


@CONFIGS
@pytest.mark.parametrize("max_shard_bytes", [None, 1, 100_000])
def test_round_trip(tmp_path: Path, config: ModelConfig, max_shard_bytes: int | None):
    weights = random_weights(config)
    save_checkpoint(tmp_path / config.name, config, weights, max_shard_bytes)
    checkpoint = open_checkpoint(str(tmp_path / config.name))
    assert checkpoint.config == config
    assert checkpoint.folder == tmp_path / config.name
    assert_holds(checkpoint, weights)
    assert checkpoint.nbytes == sum(w.nbytes for w in weights.values())
    checkpoint.verify_finite()
    assert [p.name for p in tmp_path.iterdir()] == [config.name], "nothing temporary may stay"


def test_kimi_k3_layout(saved: Path):
    tensors = load_file(saved / "model.safetensors")
    weights = random_weights(K3)
    assert set(tensors) == {f"language_model.{name}" for name in weights}
    stored = tensors[f"language_model.{A_LOG}"]
    np.testing.assert_array_equal(stored, np.pad(weights[A_LOG], (0, 30)))
    config = json.loads((saved / "config.json").read_text())
    assert config["model_type"] == "kimi_k3"
    assert config["text_config"]["num_hidden_layers"] == 5


def test_kimi_linear_layout(tmp_path: Path):
    save_checkpoint(tmp_path, KIMI_LINEAR, random_weights(KIMI_LINEAR))
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == set(random_weights(KIMI_LINEAR))
    assert tensors[A_LOG].shape == (1, 1, 3, 1)
    assert "text_config" not in json.loads((tmp_path / "config.json").read_text())


def test_shards_and_index(sharded: Path):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    shards = sorted(sharded.glob("model-*.safetensors"))
    assert len(shards) > 3
    assert [p.name for p in shards] == [
        f"model-{i:05d}-of-{len(shards):06d}.safetensors" for i in range(1, len(shards) + 1)
    ]
    assert set(index["weight_map"].values()) == {p.name for p in shards}
    total = 0
    for shard in shards:
        tensors = load_file(shard)
        size = sum(t.nbytes for t in tensors.values())
        assert size <= 200_000
        assert {name for name, file in index["weight_map"].items() if file == shard.name} == set(tensors)
        total += size
    assert index["metadata"]["total_size"] == total


def test_a_name_may_lack_its_prefix(saved: Path):
    def strip(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("language_model.")] = tensors.pop(name)

    rewrite(saved, strip)
    assert_holds(open_checkpoint(saved), random_weights(K3))


def test_other_modalities_are_skipped(saved: Path, sharded: Path):
    vision = {"vision_tower.encoder.blocks.0.wo": np.zeros(2), "mm_projector.post_norm": np.zeros(2)}
    rewrite(saved, lambda tensors: tensors.update(vision))
    assert_holds(open_checkpoint(saved), random_weights(K3))
    # A shard without any text tensor need not even be there.
    edit_index(
        sharded, lambda weight_map: weight_map.update(dict.fromkeys(vision, "model-99999-of-099999.safetensors"))
    )
    assert_holds(open_checkpoint(sharded), random_weights(K3))


def test_longer_a_log_is_cut(saved: Path):
    rewrite(saved, lambda tensors: tensors.update({f"language_model.{A_LOG}": np.array([1, 2, 0, 0, 0], np.float32)}))
    np.testing.assert_array_equal(open_checkpoint(saved)[A_LOG], [1, 2])


def test_f32_tensor_stored_in_bf16_is_widened(saved: Path):
    name = "model.layers.0.self_attn.dt_bias"
    narrow = random_weights(K3)[name].astype(ml_dtypes.bfloat16)
    rewrite(saved, lambda tensors: tensors.update({f"language_model.{name}": narrow}))
    found = open_checkpoint(saved)[name]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, narrow.astype(np.float32))


def test_weights_may_be_a_checkpoint(sharded: Path, tmp_path: Path):
    checkpoint = open_checkpoint(sharded)
    save_checkpoint(tmp_path / "copy", checkpoint.config, checkpoint)
    assert_holds(open_checkpoint(tmp_path / "copy"), random_weights(K3))


def test_saving_over_a_checkpoint(sharded: Path):
    (sharded / "tiktoken.model").write_text("stays")
    again = random_weights(K3, seed=1)
    save_checkpoint(sharded, K3, again)
    assert sorted(p.name for p in sharded.iterdir()) == ["config.json", "model.safetensors", "tiktoken.model"]
    assert_holds(open_checkpoint(sharded), again)


def test_failed_save_changes_nothing(saved: Path):
    before = {p.name: p.read_bytes() for p in saved.iterdir()}
    last = list(tensor_specs(K3))[-1]
    with pytest.raises(CheckpointError, match="found float64"):
        save_checkpoint(saved, K3, random_weights(K3, seed=1) | {last: np.zeros(3)}, max_shard_bytes=10_000)
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before
    assert [p.name for p in saved.parent.iterdir()] == ["saved"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "'model.norm.weight': expected in weights"),
        ({"model.extra": np.zeros(1)}, "'model.extra': expected only tensors of the configuration"),
        ({"model.norm.weight": np.zeros(128, np.float32)}, r"expected bfloat16 \[128\]; found float32 \[128\]"),
        ({A_LOG: np.zeros(32, np.float32)}, r"A_log': expected float32 \[2\]; found float32 \[32\]"),
    ],
)
def test_refused_weights(tmp_path: Path, change: dict[str, Any], message: str):
    weights = {k: v for k, v in (random_weights(K3) | change).items() if v is not None}
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path / "x", K3, weights)
    assert not list(tmp_path.iterdir())


def test_refused_arguments_of_save(saved: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match="max_shard_bytes = 0"):
        save_checkpoint(tmp_path, K3, random_weights(K3), max_shard_bytes=0)
    with pytest.raises(CheckpointError, match="expected a folder"):
        save_checkpoint(saved / "config.json", K3, random_weights(K3))


def test_missing_files(saved: Path, sharded: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match="nowhere: expected a checkpoint folder; found nothing there"):
        open_checkpoint(tmp_path / "nowhere")
    (saved / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"or model\.safetensors; found neither"):
        open_checkpoint(saved)
    (saved / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: expected the model's configuration"):
        open_checkpoint(saved)
    shard = sorted(sharded.glob("model-*.safetensors"))[2]
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name}: tensor 'language_model.*': expected in this file by"):
        open_checkpoint(sharded)


def test_configuration_error_passes_through(saved: Path):
    (saved / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        open_checkpoint(saved)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_damaged_index(sharded: Path, text: str):
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json: expected a JSON object with a weight_map"):
        open_checkpoint(sharded)


def edit_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def test_index_and_shards_disagree(sharded: Path):
    first = sorted(sharded.glob("model-*.safetensors"))[0].name
    edit_index(sharded, lambda weight_map: weight_map.update({f"language_model.{A_LOG}": first}))
    with pytest.raises(CheckpointError, match=rf"{first}: tensor 'language_model.{A_LOG}': expected in this file by"):
        open_checkpoint(sharded)


def test_shard_holds_more_than_its_index(sharded: Path):
    edit_index(sharded, lambda weight_map: weight_map.pop(f"language_model.{A_LOG}"))
    with pytest.raises(CheckpointError, match=rf"'language_model.{A_LOG}': expected in the weight_map of"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -70_000])
def test_truncated_file(saved: Path, keep: int):
    file = saved / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    if keep < 0:
        message = rf"tensor 'language_model\..*': expected a file of {len(data)} bytes; found {len(data) + keep}"
    else:
        message = "the file is cut off"
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{message}"):
        open_checkpoint(saved)


def test_truncation_names_the_first_tensor_that_is_cut(saved: Path):
    file = saved / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    begin, end = header["language_model.model.norm.weight"]["data_offsets"]
    file.write_bytes(data[: 8 + length + (begin + end) // 2])
    with pytest.raises(CheckpointError, match=r"tensor 'language_model\.model\.norm\.weight'"):
        open_checkpoint(saved)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((20).to_bytes(8, "little") + b"x" * 40, "expected a safetensors header; found something else"),
        (b"version https://git-lfs.github.com/spec/v1\n" * 3, "the file is cut off"),
    ],
)
def test_file_of_another_kind(saved: Path, data: bytes, message: str):
    (saved / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(saved)


def test_file_with_a_tail(saved: Path):
    with (saved / "model.safetensors").open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(CheckpointError, match="expected to end the file at byte"):
        open_checkpoint(saved)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", np.zeros((1, 128), ml_dtypes.bfloat16), r"expected shape \[128\]; found \[1, 128\]"),
        ("model.norm.weight", np.zeros(128, np.float32), "expected dtype BF16; found F32"),
        ("model.layers.0.self_attn.dt_bias", np.zeros(64, np.float16), "expected dtype F32; found F16"),
        (A_LOG, np.zeros(1, np.float32), r"expected shape \[n\] with n >= 2 heads, .*; found \[1\]"),
        (A_LOG, np.zeros((1, 1, 4, 1), np.float32), r"expected shape .* or \[1, 1, 2, 1\]; found \[1, 1, 4, 1\]"),
    ],
)
def test_wrong_tensor(saved: Path, name: str, tensor: np.ndarray, message: str):
    rewrite(saved, lambda tensors: tensors.update({f"language_model.{name}": tensor}))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor 'language_model\.{name}': {message}"):
        open_checkpoint(saved)


def test_unknown_missing_and_doubled_tensors(saved: Path):
    rewrite(saved, lambda tensors: tensors.update({"language_model.model.bias": np.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"'language_model\.model\.bias': expected only tensors of"):
        open_checkpoint(saved)
    rewrite(saved, lambda tensors: tensors.pop("language_model.model.bias"))
    rewrite(saved, lambda tensors: tensors.pop("language_model.model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight': expected BF16 \[128\]; found in none of"):
        open_checkpoint(saved)
    both = dict.fromkeys(["model.norm.weight", "language_model.model.norm.weight"], np.zeros(128, ml_dtypes.bfloat16))
    rewrite(saved, lambda tensors: tensors.update(both))
    with pytest.raises(CheckpointError, match="expected once; found before in"):
        open_checkpoint(saved)


def test_a_log_with_a_tail(saved: Path):
    stored = np.zeros(32, np.float32)
    stored[9] = 0.5
    rewrite(saved, lambda tensors: tensors.update({f"language_model.{A_LOG}": stored}))
    checkpoint = open_checkpoint(saved)
    with pytest.raises(CheckpointError, match=rf"'{A_LOG}': expected 2 values .* then zeros; found 0\.5 at \[9\]"):
        checkpoint[A_LOG]


def test_unknown_name(saved: Path):
    checkpoint = open_checkpoint(saved)
    assert "model.nothing" not in checkpoint
    with pytest.raises(KeyError, match=r"model\.nothing"):
        checkpoint["model.nothing"]


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("model.layers.2.mlp_res_norm.weight", np.nan, "nan"),
        ("model.layers.2.self_attn.dt_bias", -np.inf, "-inf"),
        ("model.layers.3.block_sparse_moe.experts.1.w2.weight_scale", 255, "255"),
        ("model.layers.3.block_sparse_moe.experts.1.w2.weight_scale", 0, "0"),
    ],
)
def test_verify_finite_names_the_tensor(tmp_path: Path, name: str, value: float, found: str):
    weights = random_weights(K3)
    weights[name].reshape(-1)[[3, 7]] = value
    save_checkpoint(tmp_path, K3, weights)
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.verify_finite(set(weights) - {name})
    with pytest.raises(CheckpointError, match=rf"'{name}': expected .*; found 2 others of .* first one {found} at"):
        checkpoint.verify_finite()


def test_opening_reads_headers_only(tmp_path: Path):
    """A checkpoint of 64 GiB of holes opens at once, and one small tensor costs no more than itself."""
    config = dataclasses.replace(K3, vocab_size=1 << 27)
    header: dict[str, Any] = {}
    end = 0
    for name, spec in tensor_specs(config).items():
        shape = (32,) if name.endswith(".A_log") else spec.shape
        begin, end = end, end + spec_nbytes(dataclasses.replace(spec, shape=shape))
        header[f"language_model.{name}"] = {"dtype": spec.dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        try:
            stream.truncate(8 + len(text) + end)
        except OSError as error:
            pytest.skip(f"no sparse file of {end} bytes: {error}")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    code = f"""
import resource
from model.checkpoint import open_checkpoint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
checkpoint = open_checkpoint({str(tmp_path)!r})
assert checkpoint.nbytes > 64 << 30
assert not checkpoint["model.norm.weight"].any()
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "more than 64 MiB were read"
"""
    no_device = os.environ | {"JAX_PLATFORMS": "no-such-device"}  # a device that was asked for would raise
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=no_device)
