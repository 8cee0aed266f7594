"""Parameters -> the arrays a launch reads: tape, vector tables, embedding and expert bank of one core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np

from megakernel import program
from megakernel.memory import weight_buffers
from megakernel.pack_experts import pack_bank
from megakernel.plan import Plan
from megakernel.program import Column, Matrix, kda_vectors

Weights = Mapping[str, np.ndarray]
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_NUMPY = {"float32": np.dtype(np.float32), "bfloat16": _BFLOAT16, "uint16": _BFLOAT16, "uint32": np.dtype(np.uint32)}
"""What arrays are filled as; "uint16" holds the bits of bfloat16."""


def pack(plan: Plan, weights: Weights, draft_weights: Weights | None = None) -> dict[str, np.ndarray]:
    """Lays a checkpoint's tensors out for one core; arrays by name, as in `memory.weight_buffers`.

    Args:
      weights: tensors by the names of `model.layout`, [out, in]; read one at a time.
      draft_weights: tensors of the plan's drafter, if it has any.
    """
    buffers = weight_buffers(plan)
    packed = {name: np.zeros(buffer.shape, _NUMPY[buffer.dtype]) for name, buffer in buffers.items()}
    drafts = _with_target(plan, weights, draft_weights or {})
    _pack_tape(plan, weights, drafts, packed["tape"])
    if plan.drafter:
        plan.drafter.pack(plan, drafts, packed)
    _pack_vectors(plan, weights, packed["vector_tables"])
    packed["embedding"][: plan.config.vocab_size] = weights["model.embed_tokens.weight"]
    if plan.moe_layers:
        pack_bank(plan, weights, packed["bank_in"], packed["bank_out"])
    return {name: a.view(np.uint16) if buffers[name].dtype == "uint16" else a for name, a in packed.items()}


# ---- tape ----


def _with_target(plan: Plan, weights: Weights, draft_weights: Weights) -> Weights:
    """The drafter's tensors and what of the target's it may share."""
    embedding = weights["model.embed_tokens.weight"]
    head = embedding if plan.config.tie_word_embeddings else weights["lm_head.weight"]
    return {**draft_weights, "target.embed_tokens": embedding, "target.lm_head": head}


def _pack_tape(plan: Plan, weights: Weights, drafts: Weights, tape: np.ndarray) -> None:
    block = 0
    for source, prefix, matrix in _tape_order(plan, weights, drafts):
        blocks = matrix_blocks(plan, matrix, _dense_matrix(plan, source, prefix, matrix))
        tape[block : block + len(blocks)] = blocks
        block += len(blocks)
    assert block == len(tape), f"{block} blocks packed, {len(tape)} planned"


def _tape_order(plan: Plan, weights: Weights, drafts: Weights) -> Iterator[tuple[Weights, str, Matrix]]:
    config = plan.config
    for layer in range(config.num_hidden_layers):
        for matrix in (*program.attention_matrices(config, layer), *program.ffn_matrices(config, layer)):
            yield weights, f"model.layers.{layer}.", matrix
    for matrix in program.head_matrices(config):
        yield weights, "", matrix
    for matrix in plan.drafter.matrices() if plan.drafter else ():
        yield drafts, "", matrix


def _dense_matrix(plan: Plan, weights: Weights, prefix: str, matrix: Matrix) -> np.ndarray:
    """The product's weights with padded columns.  # [groups, k, n]"""
    dense = np.zeros((matrix.groups, matrix.k, matrix.n), _NUMPY[plan.weights])
    for column in matrix.columns:
        tensor = weights[prefix + column.tensor]
        start = matrix.offset(column.name)
        for group in range(matrix.groups):
            dense[group, :, start : start + column.width] = _column(plan, tensor, column, group)
    return dense


def _column(plan: Plan, tensor: np.ndarray, column: Column, group: int) -> np.ndarray:
    """One column range as [k, width]; see `model.layout` for how the tensors order their rows."""
    config = plan.config
    if column.part == "all":
        return tensor.T
    if column.tensor.endswith("kv_a_proj_with_mqa.weight"):
        return (tensor[: config.kv_lora_rank] if column.part == "nope" else tensor[config.kv_lora_rank :]).T
    if column.part in ("key", "value"):
        heads = tensor.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        key, value = np.split(heads[group], [config.qk_nope_head_dim])
        return key if column.part == "key" else value.T
    heads = tensor.reshape(config.num_attention_heads, config.qk_head_dim, -1)
    if column.part == "nope":
        return heads[:, : config.qk_nope_head_dim].reshape(-1, heads.shape[-1]).T
    return heads[int(column.name.removeprefix("extra")), config.qk_nope_head_dim :].T


def matrix_blocks(plan: Plan, matrix: Matrix, dense: np.ndarray) -> np.ndarray:
    """Cuts a product's weights into tape blocks.  # [groups, k, n] -> [blocks, block_k, block_n]"""
    tiling = plan.tiling(matrix)
    n_padded = tiling.tiles_per_group * plan.block_n
    k_missing, n_missing = tiling.k_padded - matrix.k, n_padded - matrix.n
    dense = np.pad(dense, ((0, 0), (0, k_missing), (0, n_missing)))
    if tiling.fold == 1:
        cut = dense.reshape(matrix.groups, tiling.k_tiles, plan.block_k, tiling.tiles_per_group, plan.block_n)
        return cut.transpose(0, 3, 1, 2, 4).reshape(-1, plan.block_k, plan.block_n)
    cut = dense.reshape(matrix.groups, tiling.k_padded, tiling.tiles_per_group, plan.block_n)
    tiles = cut.transpose(0, 2, 1, 3).reshape(-1, tiling.k_padded, plan.block_n)
    tiles = np.pad(tiles, ((0, tiling.blocks * tiling.fold - len(tiles)), (0, 0), (0, 0)))
    return tiles.reshape(tiling.blocks, plan.block_k, plan.block_n)


# ---- small vectors ----


def _pack_vectors(plan: Plan, weights: Weights, tables: np.ndarray) -> None:
    config, rows = plan.config, plan.vector_rows

    def put(table: np.ndarray, name: str, vector: np.ndarray) -> None:
        flat = np.asarray(vector, np.float32).reshape(-1)
        table[rows[name], : len(flat)] = flat

    for layer in range(config.num_hidden_layers):
        for name, vector in _layer_vectors(plan, weights, layer):
            put(tables[layer], name, vector)
    put(tables[-1], "final_norm", weights["model.norm.weight"])
    if config.attn_res_block_size:
        put(tables[-1], "final_mix", _mix_weight(weights, "model.output_attn_res"))


def _mix_weight(weights: Weights, stem: str) -> np.ndarray:
    norm, projection = (np.asarray(weights[f"{stem}_{part}.weight"], np.float32) for part in ("norm", "proj"))
    return norm * projection[0]


def _layer_vectors(plan: Plan, weights: Weights, layer: int) -> Iterator[tuple[str, np.ndarray]]:
    config, prefix = plan.config, f"model.layers.{layer}."
    yield "attn_norm", weights[f"{prefix}input_layernorm.weight"]
    yield "ffn_norm", weights[f"{prefix}post_attention_layernorm.weight"]
    if config.attn_res_block_size:
        yield "attn_mix", _mix_weight(weights, f"{prefix}self_attention_res")
        yield "ffn_mix", _mix_weight(weights, f"{prefix}mlp_res")
    if config.is_moe(layer):
        yield "router_bias", weights[f"{prefix}block_sparse_moe.gate.e_score_correction_bias"]
        if config.latent_moe_use_norm:
            yield "latent_norm", weights[f"{prefix}block_sparse_moe.routed_expert_norm.weight"]
    attention = f"{prefix}self_attn."
    if config.layer_kind(layer) == "kda":
        yield from _kda_vectors(plan, weights, attention)
        return
    yield "kv_norm", weights[f"{attention}kv_a_layernorm.weight"]
    if config.q_lora_rank is not None:
        yield "query_norm", weights[f"{attention}q_a_layernorm.weight"]


def _kda_vectors(plan: Plan, weights: Weights, attention: str) -> Iterator[tuple[str, np.ndarray]]:
    config = plan.config
    heads, dim, taps = config.kda_num_heads, config.kda_head_dim, config.short_conv_kernel_size
    for i, name in enumerate(kda_vectors(config)[: 3 * taps]):
        stream, tap = "qkv"[i // taps], i % taps
        yield name, weights[f"{attention}{stream}_conv1d.weight"][:, 0, tap]
    rate = np.exp(np.asarray(weights[f"{attention}A_log"], np.float32).reshape(-1)[:heads])
    yield "decay_rate", np.repeat(rate, dim)
    yield "decay_bias", weights[f"{attention}dt_bias"]
    yield "out_norm", np.tile(weights[f"{attention}o_norm.weight"], heads)
