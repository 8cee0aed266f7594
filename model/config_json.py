"""`config.json` <-> `ModelConfig`: which official keys exist, which values are implemented."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.config import ConfigError, ModelConfig

# Keys whose only implemented value is the one given: another value changes the maths.
_ONLY = {
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "topk_method": "noaux_tc",
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
}
# Keys without effect on the maths of decoding.
_INERT = {
    "architectures", "auto_map", "dtype", "torch_dtype", "model_type", "transformers_version", "initializer_range",
    "use_grouped_topk", "use_cache", "head_dim", "rope_theta", "model_max_length", "num_key_value_heads",
    "pretraining_tp", "output_attentions", "output_hidden_states", "return_dict", "_name_or_path",
}  # fmt: skip
# Generation defaults that Hugging Face writes into a text config; sampling is asked for at decode time.
_GENERATION = {
    "temperature", "top_k", "top_p", "typical_p", "max_length", "min_length", "do_sample", "early_stopping",
    "num_beams", "num_beam_groups", "diversity_penalty", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "chunk_size_feed_forward",
    "is_encoder_decoder", "is_decoder", "cross_attention_hidden_size", "add_cross_attention", "tie_encoder_decoder",
    "finetuning_task", "id2label", "label2id", "tokenizer_class", "prefix", "sep_token_id", "decoder_start_token_id",
    "task_specific_params", "problem_type", "pruned_heads", "tf_legacy_loss", "use_bfloat16", "torchscript",
}  # fmt: skip
_LINEAR_ATTN_KEYS = {
    "full_attn_layers", "kda_layers", "head_dim", "num_heads", "short_conv_kernel_size", "gate_lower_bound",
    "use_full_rank_gate",
}  # fmt: skip
_MODEL_KEYS = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
    "activation_situ_beta", "activation_situ_linear_beta", "rms_norm_eps", "tie_word_embeddings", "q_lora_rank",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mla_use_output_gate", "num_experts",
    "num_experts_per_token", "num_shared_experts", "moe_intermediate_size", "routed_expert_hidden_size",
    "latent_moe_use_norm", "routed_scaling_factor", "moe_renormalize", "first_k_dense_replace", "attn_res_block_size",
    "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "linear_attn_config",
    "quantization_config",
}  # fmt: skip

_MXFP4_WEIGHTS = {
    "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False,
}  # fmt: skip


def from_official(config: Mapping[str, Any], name: str) -> ModelConfig:
    text = _merge_text_config(config)
    for key in ("text_config", "vision_config", "ignore_index", "media_placeholder_token_id", "image_placeholder"):
        text.pop(key, None)
    _refuse_unimplemented(text)
    linear = _require(text, "linear_attn_config")
    for key in linear.keys() - _LINEAR_ATTN_KEYS:
        raise ConfigError(f"linear_attn_config.{key} = {linear[key]!r} is not known to this library")

    if text.get("mla_use_nope") is None:
        raise ConfigError("mla_use_nope is missing, which means rotated keys; the only implemented value is true")
    layers = _positive(text, "num_hidden_layers")
    full_attention = _layer_numbers(linear, "full_attn_layers")
    _check_layer_map(full_attention, linear.get("kda_layers"), layers)
    hidden = _positive(text, "hidden_size")
    latent = None
    if text.get("routed_expert_hidden_size") is not None:
        latent = _positive(text, "routed_expert_hidden_size")
    eos = _require(text, "eos_token_id")
    built = ModelConfig(
        name=name,
        vocab_size=_positive(text, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(text, "intermediate_size"),
        num_hidden_layers=layers,
        rms_norm_eps=_positive_float(text, "rms_norm_eps", None),
        max_position_embeddings=text.get("max_position_embeddings") or text.get("model_max_length") or 1 << 20,
        eos_token_ids=tuple(eos) if isinstance(eos, list | tuple) else (int(eos),),
        bos_token_id=text.get("bos_token_id"),
        pad_token_id=text.get("pad_token_id"),
        tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
        hidden_act=_one_of(text, "hidden_act", ("situ", "silu")),
        activation_situ_beta=_positive_float(text, "activation_situ_beta", 4.0),
        activation_situ_linear_beta=_positive_float(text, "activation_situ_linear_beta", 25.0),
        first_k_dense_replace=int(_require(text, "first_k_dense_replace")),
        num_experts=_positive(text, "num_experts"),
        num_experts_per_token=_positive(text, "num_experts_per_token"),
        num_shared_experts=int(text.get("num_shared_experts") or 0),
        moe_intermediate_size=_positive(text, "moe_intermediate_size"),
        routed_expert_hidden_size=latent or hidden,
        latent_experts=latent is not None,
        latent_moe_use_norm=bool(text.get("latent_moe_use_norm", False)),
        moe_renormalize=bool(_require(text, "moe_renormalize")),
        routed_scaling_factor=_positive_float(text, "routed_scaling_factor", 1.0),
        expert_format=_expert_format(text.get("quantization_config")),
        num_attention_heads=_positive(text, "num_attention_heads"),
        q_lora_rank=None if text.get("q_lora_rank") is None else _positive(text, "q_lora_rank"),
        kv_lora_rank=_positive(text, "kv_lora_rank"),
        qk_nope_head_dim=_positive(text, "qk_nope_head_dim"),
        qk_rope_head_dim=_positive(text, "qk_rope_head_dim"),
        v_head_dim=_positive(text, "v_head_dim"),
        mla_use_output_gate=bool(text.get("mla_use_output_gate", False)),
        mla_layers=full_attention,
        kda_num_heads=_positive(linear, "num_heads", "linear_attn_config."),
        kda_head_dim=_positive(linear, "head_dim", "linear_attn_config."),
        short_conv_kernel_size=_positive(linear, "short_conv_kernel_size", "linear_attn_config."),
        gate_lower_bound=linear.get("gate_lower_bound"),
        use_full_rank_gate=bool(linear.get("use_full_rank_gate", False)),
        attn_res_block_size=int(text.get("attn_res_block_size") or 0),
    )
    _check_consistency(built)
    return built


def to_official(config: ModelConfig) -> dict[str, Any]:
    text: dict[str, Any] = {
        key: getattr(config, key)
        for key in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
            "rms_norm_eps", "tie_word_embeddings", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
            "qk_rope_head_dim", "v_head_dim", "mla_use_output_gate", "num_experts", "num_experts_per_token",
            "num_shared_experts", "moe_intermediate_size", "routed_scaling_factor", "moe_renormalize",
            "first_k_dense_replace", "max_position_embeddings", "bos_token_id", "pad_token_id",
        )
    }  # fmt: skip
    text |= {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "num_key_value_heads": config.num_attention_heads,
        "eos_token_id": config.eos_token_ids[0] if len(config.eos_token_ids) == 1 else list(config.eos_token_ids),
        "use_grouped_topk": True,
        **{key: _ONLY[key] for key in ("mla_use_nope", "moe_router_activation_func", "moe_layer_freq")},
        **{key: _ONLY[key] for key in ("num_expert_group", "topk_group", "topk_method", "num_nextn_predict_layers")},
    }
    linear: dict[str, Any] = {
        "full_attn_layers": [i + 1 for i in config.mla_layers],
        "kda_layers": [i + 1 for i in config.kda_layers],
        "head_dim": config.kda_head_dim,
        "num_heads": config.kda_num_heads,
        "short_conv_kernel_size": config.short_conv_kernel_size,
    }
    if config.gate_lower_bound is not None:
        linear["gate_lower_bound"] = config.gate_lower_bound
    if config.use_full_rank_gate:
        linear["use_full_rank_gate"] = True
    text["linear_attn_config"] = linear
    if config.latent_experts:
        text["routed_expert_hidden_size"] = config.routed_expert_hidden_size
        text["latent_moe_use_norm"] = config.latent_moe_use_norm
    if config.hidden_act == "situ":
        text["activation_situ_beta"] = config.activation_situ_beta
        text["activation_situ_linear_beta"] = config.activation_situ_linear_beta
    if config.expert_format == "mxfp4":
        text["quantization_config"] = _mxfp4_section()
    if not config.attn_res_block_size:
        return text
    text["attn_res_block_size"] = config.attn_res_block_size
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        **{key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")},
        "text_config": text,
    }


def _mxfp4_section() -> dict[str, Any]:
    weights = {**_MXFP4_WEIGHTS, "observer": "minmax", "scale_dtype": "torch.uint8"}
    group = {"format": "mxfp4-pack-quantized", "input_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
        ],
        "kv_cache_scheme": None,
    }


def _expert_format(section: Mapping[str, Any] | None) -> Any:
    if section is None:
        return "bf16"
    if section.get("format") != "mxfp4-pack-quantized":
        raise ConfigError(
            f"quantization_config.format = {section.get('format')!r} is not implemented; "
            "implemented: 'mxfp4-pack-quantized', or no quantization_config for bf16 experts"
        )
    for group, entry in section.get("config_groups", {}).items():
        if entry.get("input_activations") is not None:
            raise ConfigError(
                f"quantization_config.config_groups.{group}.input_activations = {entry['input_activations']!r} "
                "is not implemented; expected null (activations stay in the compute type)"
            )
        weights = entry.get("weights", {})
        for key, only in _MXFP4_WEIGHTS.items():
            if weights.get(key) != only:
                raise ConfigError(
                    f"quantization_config.config_groups.{group}.weights.{key} = {weights.get(key)!r} "
                    f"is not implemented; expected {only!r}"
                )
    if section.get("kv_cache_scheme") is not None:
        raise ConfigError(f"quantization_config.kv_cache_scheme = {section['kv_cache_scheme']!r} is not implemented")
    return "mxfp4"


def _refuse_unimplemented(text: Mapping[str, Any]) -> None:
    for key, value in text.items():
        if key in _ONLY:
            if value is not None and value != _ONLY[key]:
                raise ConfigError(f"{key} = {value!r} is not implemented; the only implemented value is {_ONLY[key]!r}")
        elif key not in _MODEL_KEYS | _INERT | _GENERATION:
            raise ConfigError(f"{key} = {value!r} is not a key this library knows; it would be ignored")
    heads, kv_heads = _require(text, "num_attention_heads"), text.get("num_key_value_heads")
    if kv_heads is not None and kv_heads != heads:
        raise ConfigError(
            f"num_key_value_heads = {kv_heads} is not implemented; MLA needs num_attention_heads = {heads}"
        )


def _merge_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """One flat configuration; what both levels say about the model must agree."""
    nested = config.get("text_config") or {}
    for key in _MODEL_KEYS & config.keys() & nested.keys():
        if config[key] != nested[key]:
            raise ConfigError(f"{key} = {config[key]!r} contradicts text_config.{key} = {nested[key]!r}")
    return {**config, **nested}


def _layer_numbers(linear: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """0-based layers of a 1-based list."""
    numbers = _require(linear, key, "linear_attn_config.")
    if not isinstance(numbers, list | tuple) or not all(type(i) is int for i in numbers):
        raise ConfigError(f"linear_attn_config.{key} = {numbers!r}; expected a list of layer numbers from 1")
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"linear_attn_config.{key} = {numbers!r} names a layer twice")
    return tuple(sorted(i - 1 for i in numbers))


def _check_layer_map(mla_layers: tuple[int, ...], kda_one_based: Any, layers: int) -> None:
    for layer in mla_layers:
        if not 0 <= layer < layers:
            raise ConfigError(
                f"linear_attn_config.full_attn_layers holds {layer + 1}; expected 1 to num_hidden_layers = {layers}"
            )
    if kda_one_based is None:
        return
    expected = sorted(set(range(1, layers + 1)) - {i + 1 for i in mla_layers})
    if sorted(kda_one_based) != expected:
        raise ConfigError(
            f"linear_attn_config.kda_layers = {list(kda_one_based)} together with full_attn_layers "
            f"does not cover layers 1 to {layers} once each"
        )


def _check_consistency(config: ModelConfig) -> None:
    if config.num_experts_per_token > config.num_experts:
        raise ConfigError(
            f"num_experts_per_token = {config.num_experts_per_token} is more than num_experts = {config.num_experts}"
        )
    bound = config.gate_lower_bound
    if bound is not None and not -5.0 <= bound < 0.0:
        raise ConfigError(f"linear_attn_config.gate_lower_bound = {bound} is outside [-5, 0)")
    if config.latent_moe_use_norm and not config.latent_experts:
        raise ConfigError("latent_moe_use_norm = true needs routed_expert_hidden_size")
    if config.expert_format == "mxfp4":
        for key in ("routed_expert_hidden_size", "moe_intermediate_size"):
            if getattr(config, key) % 32:
                raise ConfigError(f"{key} = {getattr(config, key)} is not a multiple of the MXFP4 group size 32")
    for token in config.eos_token_ids:
        if not 0 <= token < config.vocab_size:
            raise ConfigError(f"eos_token_id = {token} is outside the vocabulary of {config.vocab_size}")


def _require(section: Mapping[str, Any], key: str, prefix: str = "") -> Any:
    if section.get(key) is None:
        raise ConfigError(f"{prefix}{key} is missing from the configuration")
    return section[key]


def _positive(section: Mapping[str, Any], key: str, prefix: str = "") -> int:
    value = _require(section, key, prefix)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{prefix}{key} = {value!r}; expected a positive integer")
    return value


def _positive_float(section: Mapping[str, Any], key: str, default: float | None) -> float:
    value = default if section.get(key) is None and default is not None else _require(section, key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ConfigError(f"{key} = {value!r}; expected a positive number")
    return float(value)


def _one_of(section: Mapping[str, Any], key: str, allowed: tuple[str, ...]) -> Any:
    value = _require(section, key)
    if value not in allowed:
        raise ConfigError(f"{key} = {value!r} is not implemented; implemented: {', '.join(allowed)}")
    return value
