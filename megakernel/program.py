"""What one decode step reads, in the order of use: the matrices of the tape and the small vectors of each layer.

The packer, the kernel and the byte counts all walk these lists, so they cannot disagree.
"""

from __future__ import annotations

import dataclasses
import re
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from model.config import ModelConfig

if TYPE_CHECKING:
    from megakernel.split import Split

LANES = 128
"""Minor width of a TPU vector register and of every memory tile."""

Part = Literal["all", "nope", "extra", "key", "value", "low"]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def power_of_two(value: int) -> int:
    """Smallest power of two that is not less."""
    return 1 << (value - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class Column:
    """A named range of output columns: this core's part of the rows of a checkpoint tensor.

    Attributes:
      width: columns of one core.
      tensor: name of the tensor, relative to its layer.
      part: which rows of the tensor, see `megakernel.pack`.
      lanes: that the columns take; 0: whole tiles.
      shared_by: neighbouring cores that hold the same rows.
    """

    name: str
    width: int
    tensor: str
    part: Part = "all"
    lanes: int = 0
    shared_by: int = 1

    @property
    def padded(self) -> int:
        return self.lanes or round_up(self.width, LANES)


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One streamed product `[rows, groups * k] -> [rows, groups * n]`; narrow matrices share it side by side.

    With `groups > 1` the product is block diagonal: group g maps its own k inputs to its own columns.

    Attributes:
      own_inputs: the inputs are this core's part of a vector and the outputs partial sums over cores; otherwise the
        inputs are whole and the columns this core's own.
      output: matrices that name the same one share an output buffer; "": one of its own.
    """

    name: str
    k: int
    columns: tuple[Column, ...]
    groups: int = 1
    own_inputs: bool = False
    output: str = ""

    @property
    def output_buffer(self) -> str:
        return f"out_{self.output or self.name}"

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


def kda_matrices(split: Split) -> tuple[Matrix, ...]:
    config, width = split.config, split.kda_heads * split.config.kda_head_dim
    hidden, dim = config.hidden_size, config.kda_head_dim
    narrow = [Column("beta", split.kda_heads, "self_attn.b_proj.weight", lanes=split.narrow_lanes(split.kda_heads))]
    low_rank = {"decay_low": "self_attn.f_a_proj.weight"}
    inputs = [Column(name, width, f"self_attn.{name}_proj.weight") for name in ("q", "k", "v")]
    gate_up: tuple[Matrix, ...] = ()
    if config.use_full_rank_gate:
        inputs.append(Column("gate", width, "self_attn.g_proj.weight"))
    else:
        low_rank["gate_low"] = "self_attn.g_a_proj.weight"
        gate_up = (Matrix("kda_gate", dim, (Column("gate", width, "self_attn.g_b_proj.weight"),)),)
    narrow += [_piece(split, name, dim, tensor) for name, tensor in low_rank.items()]
    return (
        Matrix("kda_narrow", hidden, tuple(narrow)),
        Matrix("kda_in", hidden, tuple(inputs)),
        Matrix("kda_decay", dim, (Column("decay", width, "self_attn.f_b_proj.weight"),)),
        *gate_up,
        Matrix("kda_out", width, (Column("out", hidden, "self_attn.o_proj.weight"),), own_inputs=True),
    )


def mla_matrices(split: Split) -> tuple[Matrix, ...]:
    config, heads, rank = split.config, split.heads, split.config.q_lora_rank
    hidden, value = config.hidden_size, config.v_head_dim
    kv, nope, extra = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
    query_tensor = "self_attn.q_proj.weight" if rank is None else "self_attn.q_b_proj.weight"
    query = [Column("nope", heads * nope, query_tensor, "nope")]
    query += [Column(f"extra{head}", extra, query_tensor, "extra") for head in range(heads)]
    inputs = [Column("gate", heads * value, "self_attn.g_proj.weight")] if config.mla_use_output_gate else []
    if rank is None:
        inputs += query
    kv_b = "self_attn.kv_b_proj.weight"
    low = _piece(split, "low", split.low_width, "self_attn.kv_a_proj_with_mqa.weight", "low")
    return (
        Matrix("mla_low", hidden, (low,)),
        *((Matrix("mla_in", hidden, tuple(inputs)),) if inputs else ()),
        *(() if rank is None else (Matrix("mla_query", rank, tuple(query)),)),
        Matrix("mla_absorb", nope, (Column("key", kv, kv_b, "key"),), groups=heads),
        Matrix("mla_value", kv, (Column("value", value, kv_b, "value"),), groups=heads),
        Matrix("mla_out", heads * value, (Column("out", hidden, "self_attn.o_proj.weight"),), own_inputs=True),
    )


def dense_matrices(split: Split) -> tuple[Matrix, ...]:
    return _ffn_matrices("dense", "mlp", split.config.hidden_size, split.dense_width)


def moe_matrices(split: Split) -> tuple[Matrix, ...]:
    config, moe = split.config, "block_sparse_moe"
    hidden, latent = config.hidden_size, config.routed_expert_hidden_size
    narrow = [_piece(split, "router", config.num_experts, f"{moe}.gate.weight")]
    if config.latent_experts:
        narrow.insert(0, _piece(split, "latent", latent, f"{moe}.routed_expert_down_proj.weight"))
    matrices = [Matrix("router", hidden, tuple(narrow))]
    if config.num_shared_experts:
        shared_in, shared_out = _ffn_matrices("shared", f"{moe}.shared_experts", hidden, split.shared_width)
        if config.latent_experts:
            down = Column("out", split.hidden, f"{moe}.shared_experts.down_proj.weight")
            shared_out = Matrix("shared_out", config.shared_intermediate_size, (down,))
        matrices += [shared_in, shared_out]
    if config.latent_experts:
        up = Column("out", split.hidden, f"{moe}.routed_expert_up_proj.weight")
        matrices.append(Matrix("routed_up", latent, (up,)))
    return tuple(matrices)


def head_matrices(split: Split) -> tuple[Matrix, ...]:
    config = split.config
    tensor = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return (Matrix("head", config.hidden_size, (Column("logits", split.vocabulary, tensor),)),)


def _piece(split: Split, name: str, width: int, tensor: str, part: Part = "all") -> Column:
    """One core's piece of a vector of `width` entries that is gathered."""
    own = split.piece(width)
    return Column(name, own, tensor, part, split.narrow_lanes(own))


def _ffn_matrices(name: str, prefix: str, hidden: int, width: int) -> tuple[Matrix, Matrix]:
    gate_up = tuple(Column(part, width, f"{prefix}.{part}_proj.weight", lanes=width) for part in ("gate", "up"))
    return (
        Matrix(f"{name}_in", hidden, gate_up),
        Matrix(f"{name}_out", width, (Column("out", hidden, f"{prefix}.down_proj.weight"),), own_inputs=True),
    )


def attention_matrices(split: Split, layer: int) -> tuple[Matrix, ...]:
    return kda_matrices(split) if split.config.layer_kind(layer) == "kda" else mla_matrices(split)


def ffn_matrices(split: Split, layer: int) -> tuple[Matrix, ...]:
    return moe_matrices(split) if split.config.is_moe(layer) else dense_matrices(split)


def sections(split: Split) -> dict[str, tuple[Matrix, ...]]:
    """Matrices of each kind of sublayer that the model has, and of the LM head; a section begins with a block."""
    config, found = split.config, {}
    if config.kda_layers:
        found["kda"] = kda_matrices(split)
    if config.mla_layers:
        found["mla"] = mla_matrices(split)
    if config.first_k_dense_replace:
        found["dense"] = dense_matrices(split)
    if config.first_k_dense_replace < config.num_hidden_layers:
        found["moe"] = moe_matrices(split)
    return found | {"head": head_matrices(split)}


def section_order(config: ModelConfig) -> list[str]:
    """Sections of one step, in the order of the tape: attention and FFN of every layer, then the head."""
    layers = ((config.layer_kind(i), "moe" if config.is_moe(i) else "dense") for i in range(config.num_hidden_layers))
    return [*(section for layer in layers for section in layer), "head"]


def tape_tensors(split: Split) -> set[str]:
    """Names, relative to their layer, of the checkpoint's tensors that are on the tape."""
    matrices = [matrix for section in sections(split).values() for matrix in section]
    return {column.tensor for matrix in matrices for column in matrix.columns} | {"self_attn.q_a_proj.weight"}


def relative(tensor: str) -> str:
    """A tensor's name without the layer: `model.layers.7.mlp.up_proj.weight` -> `mlp.up_proj.weight`."""
    return re.sub(r"^model\.layers\.\d+\.", "", tensor)


# Small vectors that each layer streams beside the tape, in two tables: whole ones, and those of this core's KDA heads.
# The last layer's tables are followed by those of the head.
# `next_mix` scores the mixture that is read after the layer: by the next one, or by the head.
_WIDE = ("attn_norm", "ffn_norm", "ffn_mix", "next_mix", "router_bias", "latent_norm", "query_norm", "kv_norm")
_FINAL = ("final_norm",)
_KDA_STREAMS = ("q", "k", "v")


def kda_vectors(config: ModelConfig) -> tuple[str, ...]:
    taps = [f"conv_{stream}{tap}" for stream in _KDA_STREAMS for tap in range(config.short_conv_kernel_size)]
    return (*taps, "decay_rate", "decay_bias", "out_norm")


def vector_places(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """Table and row of each small vector."""
    places = {name: ("wide", row) for names in (_WIDE, _FINAL) for row, name in enumerate(names)}
    return places | {name: ("heads", row) for row, name in enumerate(kda_vectors(config))}


def vector_tables(split: Split) -> dict[str, tuple[int, int]]:
    """Shapes of one layer's tables."""
    config = split.config
    widest = max(
        config.hidden_size,
        config.num_experts,
        config.q_lora_rank or 0,
        config.kv_lora_rank,
        config.routed_expert_hidden_size,
    )
    tables = {"wide": (round_up(len(_WIDE), 8), round_up(widest, LANES))}
    if config.kda_layers:
        tables["heads"] = (round_up(len(kda_vectors(config)), 8), round_up(split.kda_width, LANES))
    return tables
