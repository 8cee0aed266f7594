"""What one decode step reads, in the order of use: the matrices of the tape and the small vectors of each layer.

The packer, the kernel and the byte counts all walk these lists, so they cannot disagree.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Literal

from model.config import ModelConfig

LANES = 128
"""Minor width of a TPU vector register and of every memory tile."""

Part = Literal["all", "nope", "extra", "key", "value"]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class Column:
    """A named range of output columns, taken from one checkpoint tensor and padded to whole lanes."""

    name: str
    width: int
    tensor: str
    part: Part = "all"

    @property
    def padded(self) -> int:
        return round_up(self.width, LANES)


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One streamed product `[rows, groups * k] -> [rows, groups * n]`; narrow matrices share it side by side.

    With `groups > 1` the product is block diagonal: group g maps its own k inputs to its own columns.
    """

    name: str
    k: int
    columns: tuple[Column, ...]
    groups: int = 1

    @cached_property
    def n(self) -> int:
        return sum(column.padded for column in self.columns)

    def offset(self, column_name: str) -> int:
        """First output lane of a column within its group."""
        offset = 0
        for column in self.columns:
            if column.name == column_name:
                return offset
            offset += column.padded
        raise KeyError(f"matrix {self.name} has no column {column_name!r}")

    @property
    def parameters(self) -> int:
        return self.groups * self.k * sum(column.width for column in self.columns)


def kda_matrices(config: ModelConfig) -> tuple[Matrix, ...]:
    hidden, width, dim = config.hidden_size, config.kda_width, config.kda_head_dim
    inputs = [Column(name, width, f"self_attn.{name}_proj.weight") for name in ("q", "k", "v")]
    inputs += [
        Column("beta", config.kda_num_heads, "self_attn.b_proj.weight"),
        Column("decay_low", dim, "self_attn.f_a_proj.weight"),
    ]
    if config.use_full_rank_gate:
        inputs.append(Column("gate", width, "self_attn.g_proj.weight"))
        gate_up: tuple[Matrix, ...] = ()
    else:
        inputs.append(Column("gate_low", dim, "self_attn.g_a_proj.weight"))
        gate_up = (Matrix("kda_gate", dim, (Column("gate", width, "self_attn.g_b_proj.weight"),)),)
    return (
        Matrix("kda_in", hidden, tuple(inputs)),
        Matrix("kda_decay", dim, (Column("decay", width, "self_attn.f_b_proj.weight"),)),
        *gate_up,
        Matrix("kda_out", width, (Column("out", hidden, "self_attn.o_proj.weight"),)),
    )


def mla_matrices(config: ModelConfig) -> tuple[Matrix, ...]:
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
    kv, nope, extra, value = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    latent = "self_attn.kv_a_proj_with_mqa.weight"
    inputs = [Column("latent", kv, latent, "nope"), Column("extra", extra, latent, "extra")]
    if config.mla_use_output_gate:
        inputs.append(Column("gate", heads * value, "self_attn.g_proj.weight"))
    query_tensor = "self_attn.q_proj.weight" if rank is None else "self_attn.q_b_proj.weight"
    query = [Column("nope", heads * nope, query_tensor, "nope")]
    query += [Column(f"extra{head}", extra, query_tensor, "extra") for head in range(heads)]
    if rank is None:
        inputs += query
    else:
        inputs.append(Column("query_low", rank, "self_attn.q_a_proj.weight"))
    return (
        Matrix("mla_in", hidden, tuple(inputs)),
        *(() if rank is None else (Matrix("mla_query", rank, tuple(query)),)),
        Matrix("mla_absorb", nope, (Column("key", kv, "self_attn.kv_b_proj.weight", "key"),), groups=heads),
        Matrix("mla_value", kv, (Column("value", value, "self_attn.kv_b_proj.weight", "value"),), groups=heads),
        Matrix("mla_out", heads * value, (Column("out", hidden, "self_attn.o_proj.weight"),)),
    )


def dense_matrices(config: ModelConfig) -> tuple[Matrix, ...]:
    return _ffn_matrices("dense", "mlp", config.hidden_size, config.intermediate_size)


def moe_matrices(config: ModelConfig) -> tuple[Matrix, ...]:
    hidden, latent, moe = config.hidden_size, config.routed_expert_hidden_size, "block_sparse_moe"
    route = [Column("router", config.num_experts, f"{moe}.gate.weight")]
    if config.latent_experts:
        route.append(Column("latent", latent, f"{moe}.routed_expert_down_proj.weight"))
    matrices = [Matrix("route", hidden, tuple(route))]
    if config.num_shared_experts:
        matrices += _ffn_matrices("shared", f"{moe}.shared_experts", hidden, config.shared_intermediate_size)
    if config.latent_experts:
        matrices.append(Matrix("routed_up", latent, (Column("out", hidden, f"{moe}.routed_expert_up_proj.weight"),)))
    return tuple(matrices)


def head_matrices(config: ModelConfig) -> tuple[Matrix, ...]:
    tensor = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return (Matrix("head", config.hidden_size, (Column("logits", config.vocab_size, tensor),)),)


def _ffn_matrices(name: str, prefix: str, hidden: int, width: int) -> tuple[Matrix, ...]:
    gate_up = (Column("gate", width, f"{prefix}.gate_proj.weight"), Column("up", width, f"{prefix}.up_proj.weight"))
    return (
        Matrix(f"{name}_in", hidden, gate_up),
        Matrix(f"{name}_out", width, (Column("out", hidden, f"{prefix}.down_proj.weight"),)),
    )


def attention_matrices(config: ModelConfig, layer: int) -> tuple[Matrix, ...]:
    return kda_matrices(config) if config.layer_kind(layer) == "kda" else mla_matrices(config)


def ffn_matrices(config: ModelConfig, layer: int) -> tuple[Matrix, ...]:
    return moe_matrices(config) if config.is_moe(layer) else dense_matrices(config)


def all_matrices(config: ModelConfig) -> dict[str, Matrix]:
    """Every distinct matrix by name; a layer kind that the model lacks adds none."""
    found: dict[str, Matrix] = {}
    for layer in range(config.num_hidden_layers):
        for matrix in (*attention_matrices(config, layer), *ffn_matrices(config, layer)):
            found.setdefault(matrix.name, matrix)
    return found | {matrix.name: matrix for matrix in head_matrices(config)}


# Rows of the vector table that each layer streams beside the tape. A layer is KDA or MLA, so the two share rows.
_SHARED_ROWS = ("attn_norm", "ffn_norm", "attn_mix", "ffn_mix", "router_bias", "latent_norm")
_KDA_STREAMS = ("q", "k", "v")


def kda_vectors(config: ModelConfig) -> tuple[str, ...]:
    taps = [f"conv_{stream}{tap}" for stream in _KDA_STREAMS for tap in range(config.short_conv_kernel_size)]
    return (*taps, "decay_rate", "decay_bias", "out_norm")


def mla_vectors(config: ModelConfig) -> tuple[str, ...]:
    return ("query_norm", "kv_norm")


def vector_rows(config: ModelConfig) -> dict[str, int]:
    """Row of each small vector in a layer's table; the last table holds the final norm and the output mix."""
    rows = {name: row for row, name in enumerate(_SHARED_ROWS)}
    for names in (kda_vectors(config), mla_vectors(config)):
        rows |= {name: len(_SHARED_ROWS) + row for row, name in enumerate(names)}
    return rows | {"final_norm": 0, "final_mix": 2}


def vector_width(config: ModelConfig) -> int:
    widest = max(
        config.hidden_size,
        config.kda_width,
        config.num_experts,
        config.q_lora_rank or 0,
        config.kv_lora_rank,
        config.routed_expert_hidden_size,
    )
    return round_up(widest, LANES)
