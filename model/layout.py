"""Names, shapes and types of a checkpoint's tensors: the contract between loader, reference and packer.

Names are the official ones without the `language_model.` prefix. Shapes are `[out, in]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from model.config import ModelConfig

DType = Literal["BF16", "F32", "U8"]
MXFP4_GROUP = 32


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """`shape` as stored; a 0 in `A_log`'s shape means "at least the number of heads" (see `tensor_specs`)."""

    shape: tuple[int, ...]
    dtype: DType


def tensor_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor that a checkpoint of `config` holds, in forward order."""
    return dict(_globals_first(config)) | {
        f"model.layers.{layer}.{name}": spec
        for layer in range(config.num_hidden_layers)
        for name, spec in layer_specs(config, layer)
    }


def layer_specs(config: ModelConfig, layer: int) -> Iterator[tuple[str, TensorSpec]]:
    """Tensors of one layer, named relative to `model.layers.N.`."""
    yield from _norms(config)
    yield from _kda(config) if config.layer_kind(layer) == "kda" else _mla(config)
    yield from _moe(config) if config.is_moe(layer) else _ffn("mlp", config.hidden_size, config.intermediate_size)


def expert_name(layer: int, expert: int, matrix: Literal["w1", "w2", "w3"]) -> str:
    """Name stem of a routed expert's matrix: w1 = gate, w3 = up, w2 = down."""
    return f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}"


def _bf16(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "BF16")


def _f32(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "F32")


def _globals_first(config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", _bf16(config.vocab_size, hidden)
    yield "model.norm.weight", _bf16(hidden)
    if config.attn_res_block_size:
        yield "model.output_attn_res_norm.weight", _bf16(hidden)
        yield "model.output_attn_res_proj.weight", _bf16(1, hidden)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", _bf16(config.vocab_size, hidden)


def _norms(config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    hidden = config.hidden_size
    yield "input_layernorm.weight", _bf16(hidden)
    yield "post_attention_layernorm.weight", _bf16(hidden)
    if config.attn_res_block_size:
        for read in ("self_attention_res", "mlp_res"):
            yield f"{read}_norm.weight", _bf16(hidden)
            yield f"{read}_proj.weight", _bf16(1, hidden)


def _kda(config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    hidden, width, head_dim = config.hidden_size, config.kda_width, config.kda_head_dim
    for stream in ("q", "k", "v"):
        yield f"self_attn.{stream}_proj.weight", _bf16(width, hidden)
        yield f"self_attn.{stream}_conv1d.weight", _f32(width, 1, config.short_conv_kernel_size)
    yield "self_attn.f_a_proj.weight", _bf16(head_dim, hidden)
    yield "self_attn.f_b_proj.weight", _bf16(width, head_dim)
    yield "self_attn.b_proj.weight", _bf16(config.kda_num_heads, hidden)
    if config.use_full_rank_gate:
        yield "self_attn.g_proj.weight", _bf16(width, hidden)
    else:
        yield "self_attn.g_a_proj.weight", _bf16(head_dim, hidden)
        yield "self_attn.g_b_proj.weight", _bf16(width, head_dim)
    yield "self_attn.A_log", _f32(0)
    yield "self_attn.dt_bias", _f32(width)
    yield "self_attn.o_norm.weight", _f32(head_dim)
    yield "self_attn.o_proj.weight", _bf16(hidden, width)


def _mla(config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
    if rank is None:
        yield "self_attn.q_proj.weight", _bf16(heads * config.qk_head_dim, hidden)
    else:
        yield "self_attn.q_a_proj.weight", _bf16(rank, hidden)
        yield "self_attn.q_a_layernorm.weight", _bf16(rank)
        yield "self_attn.q_b_proj.weight", _bf16(heads * config.qk_head_dim, rank)
    yield "self_attn.kv_a_proj_with_mqa.weight", _bf16(config.mla_latent_width, hidden)
    yield "self_attn.kv_a_layernorm.weight", _bf16(config.kv_lora_rank)
    yield (
        "self_attn.kv_b_proj.weight",
        _bf16(heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
    )
    if config.mla_use_output_gate:
        yield "self_attn.g_proj.weight", _bf16(heads * config.v_head_dim, hidden)
    yield "self_attn.o_proj.weight", _bf16(hidden, heads * config.v_head_dim)


def _ffn(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, TensorSpec]]:
    yield f"{prefix}.gate_proj.weight", _bf16(width, hidden)
    yield f"{prefix}.up_proj.weight", _bf16(width, hidden)
    yield f"{prefix}.down_proj.weight", _bf16(hidden, width)


def _moe(config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    moe, hidden, latent = "block_sparse_moe", config.hidden_size, config.routed_expert_hidden_size
    yield f"{moe}.gate.weight", _bf16(config.num_experts, hidden)
    yield f"{moe}.gate.e_score_correction_bias", _f32(config.num_experts)
    if config.latent_experts:
        yield f"{moe}.routed_expert_down_proj.weight", _bf16(latent, hidden)
        yield f"{moe}.routed_expert_up_proj.weight", _bf16(hidden, latent)
    if config.latent_moe_use_norm:
        yield f"{moe}.routed_expert_norm.weight", _bf16(latent)
    if config.num_shared_experts:
        yield from _ffn(f"{moe}.shared_experts", hidden, config.shared_intermediate_size)
    width = config.moe_intermediate_size
    for expert in range(config.num_experts):
        for matrix, (out, into) in {"w1": (width, latent), "w2": (latent, width), "w3": (width, latent)}.items():
            stem = f"{moe}.experts.{expert}.{matrix}"
            if config.expert_format == "mxfp4":
                yield f"{stem}.weight_packed", TensorSpec((out, into // 2), "U8")
                yield f"{stem}.weight_scale", TensorSpec((out, into // MXFP4_GROUP), "U8")
            else:
                yield f"{stem}.weight", _bf16(out, into)
