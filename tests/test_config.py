"""Configurations: official files are read, presets survive a round trip, what is not implemented is refused by key."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from model.config import ConfigError, ModelConfig
from model.config_json import from_official
from model.layout import expert_name, layer_specs, tensor_specs
from model.presets import PRESETS

# What Kimi K3's config.json says, in the order of its documentation.
OFFICIAL_K3: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config"},
    "model_type": "kimi_k3",
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "ignore_index": -100,
    "media_placeholder_token_id": 163605,
    "image_placeholder": "<|kimi_image_placeholder|>",
    "tie_word_embeddings": False,
    "vision_config": {"patch_size": 14},
    "text_config": {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "vocab_size": 163840,
        "tie_word_embeddings": False,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "rms_norm_eps": 1e-5,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "intermediate_size": 33792,
        "first_k_dense_replace": 1,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "num_shared_experts": 2,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "moe_layer_freq": 1,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "attn_res_block_size": 12,
        "max_position_embeddings": 1048576,
        "initializer_range": 0.02,
        "dtype": "bfloat16",
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
        "transformers_version": "4.56.2",
        "temperature": 1.0,
        "top_k": 50,
        "max_length": 20,
        "linear_attn_config": {
            "head_dim": 128,
            "num_heads": 96,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "full_attn_layers": [*range(4, 93, 4), 93],
            "kda_layers": [i for i in range(1, 92) if i % 4],
        },
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {
                "group_0": {
                    "input_activations": None,
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "float",
                        "strategy": "group",
                        "group_size": 32,
                        "symmetric": True,
                        "dynamic": False,
                        "observer": "minmax",
                        "scale_dtype": "torch.uint8",
                    },
                }
            },
            "ignore": ["re:.*self_attn.*"],
            "kv_cache_scheme": None,
        },
    },
}
MISSING = object()


def changed(path: str, value: Any) -> dict[str, Any]:
    """The official configuration with one key of `text_config` set to another value, or taken away."""
    config = copy.deepcopy(OFFICIAL_K3)
    section = config["text_config"]
    *parents, key = path.split(".")
    for parent in parents:
        section = section[parent]
    if value is MISSING:
        del section[key]
    else:
        section[key] = value
    config["eos_token_id"] = config["text_config"].get("eos_token_id")  # both levels have to agree
    return config


def text_bytes(config: ModelConfig, a_log_entries: int) -> int:
    size = {"BF16": 2, "F32": 4, "U8": 1}
    return sum(
        size[spec.dtype] * (a_log_entries if name.endswith(".A_log") else math.prod(spec.shape))
        for name, spec in tensor_specs(config).items()
    )


def test_official_configuration_is_the_preset():
    assert ModelConfig.from_dict(OFFICIAL_K3, "kimi-k3") == ModelConfig.preset("kimi-k3")


def test_flat_configuration():
    assert ModelConfig.from_dict(OFFICIAL_K3["text_config"], "kimi-k3") == ModelConfig.preset("kimi-k3")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_survive_a_round_trip(name: str):
    config = ModelConfig.preset(name)
    assert config.name == name
    through_json = json.loads(json.dumps(config.to_dict()))
    assert ModelConfig.from_dict(through_json, name) == config
    assert from_official(through_json, name) == config
    nested = "text_config" in through_json
    assert nested == (config.attn_res_block_size > 0)


def test_layer_map_of_kimi_k3():
    config = ModelConfig.preset("kimi-k3")
    assert config.mla_layers == (*range(3, 92, 4), 92)
    assert len(config.kda_layers) == 69
    assert [config.layer_kind(i) for i in (0, 3, 90, 91, 92)] == ["kda", "mla", "kda", "mla", "mla"]
    assert [i for i in range(93) if config.writes_snapshot(i)] == [0, 12, 24, 36, 48, 60, 72, 84]
    assert config.num_snapshots == 8
    assert [config.is_moe(i) for i in (0, 1, 92)] == [False, True, True]
    assert (config.kda_width, config.qk_head_dim, config.mla_latent_width) == (12288, 192, 576)
    assert config.shared_intermediate_size == 6144


def test_layer_map_of_kimi_linear():
    config = ModelConfig.preset("kimi-linear-48b")
    assert config.mla_layers == (3, 7, 11, 15, 19, 23, 26)
    assert len(config.kda_layers) == 20
    assert config.num_snapshots == 0
    assert not any(config.writes_snapshot(i) for i in range(27))


def test_bytes_of_kimi_k3():
    """The official index counts 1,560,860,324,864 bytes with 802,428,928 of vision and 92,289,024 of projector."""
    total = text_bytes(ModelConfig.preset("kimi-k3"), a_log_entries=128)
    assert total == 1_559_965_606_912
    assert total + 802_428_928 + 92_289_024 == 1_560_860_324_864


@pytest.mark.parametrize(
    ("layer", "experts", "size"),
    [
        (0, 0, 887_800_832 + 86_016 + 1_453_326_336),
        (1, 896, 887_800_832 + 86_016 + 379_857_408 + 896 * 17_547_264),
        (92, 896, 464_392_192 + 86_016 + 379_857_408 + 896 * 17_547_264),
    ],
)
def test_bytes_of_one_layer(layer: int, experts: int, size: int):
    size_of = {"BF16": 2, "F32": 4, "U8": 1}
    specs = dict(layer_specs(ModelConfig.preset("kimi-k3"), layer))
    total = sum(size_of[s.dtype] * (128 if n.endswith("A_log") else math.prod(s.shape)) for n, s in specs.items())
    assert total == size
    assert sum(name.endswith(".w1.weight_packed") for name in specs) == experts


def test_tensors_of_kimi_linear():
    specs = tensor_specs(ModelConfig.preset("kimi-linear-48b"))
    expected = {
        "model.layers.0.self_attn.g_a_proj.weight": ("BF16", (128, 2304)),
        "model.layers.0.self_attn.g_b_proj.weight": ("BF16", (4096, 128)),
        "model.layers.0.self_attn.q_conv1d.weight": ("F32", (4096, 1, 4)),
        "model.layers.3.self_attn.q_proj.weight": ("BF16", (6144, 2304)),
        "model.layers.3.self_attn.kv_b_proj.weight": ("BF16", (8192, 512)),
        f"{expert_name(26, 255, 'w2')}.weight": ("BF16", (2304, 1024)),
        "model.layers.1.block_sparse_moe.shared_experts.gate_proj.weight": ("BF16", (1024, 2304)),
    }
    assert {name: (specs[name].dtype, specs[name].shape) for name in expected} == expected
    absent = ("res_norm", "res_proj", "routed_expert", "weight_packed", "q_a_proj", "self_attn.g_proj")
    assert not [name for name in specs if any(part in name for part in absent)]


def test_tied_embeddings_have_no_head():
    assert "lm_head.weight" not in tensor_specs(ModelConfig.preset("k3-nano"))
    assert "lm_head.weight" in tensor_specs(ModelConfig.preset("k3-mini"))


def test_several_stop_tokens():
    config = ModelConfig.from_dict(changed("eos_token_id", [163586, 163585]))
    assert config.eos_token_ids == (163586, 163585)
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_configuration_without_quantisation_has_bf16_experts():
    assert ModelConfig.from_dict(changed("quantization_config", MISSING)).expert_format == "bf16"


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim", "rms_norm_eps", "hidden_act", "intermediate_size", "first_k_dense_replace",
        "num_experts", "num_experts_per_token", "moe_intermediate_size", "moe_renormalize", "eos_token_id",
        "linear_attn_config", "linear_attn_config.num_heads", "linear_attn_config.head_dim",
        "linear_attn_config.full_attn_layers", "linear_attn_config.short_conv_kernel_size", "mla_use_nope",
    ],
)  # fmt: skip
def test_missing_key_is_named(key: str):
    with pytest.raises(ConfigError, match=f"^{key} is missing"):
        ModelConfig.from_dict(changed(key, MISSING))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("mla_use_nope", False, "mla_use_nope = False is not implemented; the only implemented value is True"),
        ("moe_router_activation_func", "softmax", "moe_router_activation_func = 'softmax'"),
        ("moe_layer_freq", 2, "moe_layer_freq = 2"),
        ("num_expert_group", 8, "num_expert_group = 8"),
        ("topk_group", 4, "topk_group = 4"),
        ("topk_method", "greedy", "topk_method = 'greedy'"),
        ("num_nextn_predict_layers", 1, "num_nextn_predict_layers = 1"),
        ("rope_scaling", {"type": "yarn"}, "rope_scaling = .*yarn"),
        ("attention_bias", True, "attention_bias = True"),
        ("hidden_act", "gelu", "hidden_act = 'gelu' is not implemented; implemented: situ, silu"),
        ("num_key_value_heads", 8, "num_key_value_heads = 8 is not implemented; .* num_attention_heads = 96"),
        ("sliding_window", 128, "sliding_window = 128 is not a key this library knows"),
        ("linear_attn_config.chunk", 64, "linear_attn_config.chunk = 64 is not known"),
        ("hidden_size", 0, "hidden_size = 0; expected a positive integer"),
        ("hidden_size", 7168.0, r"hidden_size = 7168\.0; expected a positive integer"),
        ("num_experts", True, "num_experts = True; expected a positive integer"),
        ("q_lora_rank", -1, "q_lora_rank = -1; expected a positive integer"),
        ("rms_norm_eps", 0, "rms_norm_eps = 0; expected a positive number"),
        ("activation_situ_beta", 0.0, r"activation_situ_beta = 0\.0; expected a positive number"),
        ("routed_scaling_factor", "2", "routed_scaling_factor = '2'; expected a positive number"),
        ("num_experts_per_token", 897, "num_experts_per_token = 897 is more than num_experts = 896"),
        ("linear_attn_config.gate_lower_bound", -6.0, r"gate_lower_bound = -6\.0 is outside \[-5, 0\)"),
        ("linear_attn_config.gate_lower_bound", 0.0, r"gate_lower_bound = 0\.0 is outside"),
        ("linear_attn_config.full_attn_layers", [0, 4], "full_attn_layers holds 0; expected 1 to .* = 93"),
        ("linear_attn_config.full_attn_layers", [4, 94], "full_attn_layers holds 94"),
        ("linear_attn_config.full_attn_layers", [4, 4], "names a layer twice"),
        ("linear_attn_config.full_attn_layers", ["4"], "expected a list of layer numbers"),
        ("linear_attn_config.kda_layers", [1, 2, 3], "does not cover layers 1 to 93 once each"),
        ("routed_expert_hidden_size", None, "latent_moe_use_norm = true needs routed_expert_hidden_size"),
        ("moe_intermediate_size", 3080, "moe_intermediate_size = 3080 is not a multiple of the MXFP4 group size 32"),
        ("eos_token_id", 163840, "eos_token_id = 163840 is outside the vocabulary of 163840"),
        ("quantization_config.format", "int4", "quantization_config.format = 'int4'"),
        ("quantization_config.kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme = .* is not implemented"),
        (
            "quantization_config.config_groups.group_0.weights.group_size",
            16,
            "group_0.weights.group_size = 16 is not implemented; expected 32",
        ),
        (
            "quantization_config.config_groups.group_0.input_activations",
            {"num_bits": 8},
            "group_0.input_activations = .* is not implemented; expected null",
        ),
    ],
)
def test_refused_value_is_named(key: str, value: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(changed(key, value))


def test_levels_must_agree():
    with pytest.raises(ConfigError, match=r"pad_token_id = 5 contradicts text_config\.pad_token_id = 163839"):
        ModelConfig.from_dict(OFFICIAL_K3 | {"pad_token_id": 5})


def test_from_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "some-model"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        ModelConfig.from_file(folder)
    (folder / "config.json").write_text(json.dumps(OFFICIAL_K3))
    config = ModelConfig.from_file(folder)
    assert config.name == "some-model"
    assert ModelConfig.from_file(folder / "config.json") == config
    monkeypatch.chdir(folder)
    assert ModelConfig.from_file(".") == config
    (folder / "config.json").write_text('{"hidden_size": }')
    with pytest.raises(ConfigError, match=r"config\.json: not valid JSON"):
        ModelConfig.from_file(folder)


def test_unknown_preset():
    with pytest.raises(
        ConfigError, match="preset 'k4' is not known; known: k3-mini, k3-nano, kimi-k3, kimi-linear-48b"
    ):
        ModelConfig.preset("k4")
