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


def pack(plan: Plan, weights: Weights, draft_weights: Weights | None = None, *, core: int = 0) -> dict[str, np.ndarray]:
    """Lays a checkpoint's tensors out for one core; arrays by name, as in `memory.weight_buffers`.

    Args:
      core: index on the mesh axis `tp`.
      weights: tensors by the names of `model.layout`, [out, in]; read one at a time.
      draft_weights: tensors of the plan's drafter, if it has any.
    """
    buffers = weight_buffers(plan)
    packed = {name: np.zeros(buffer.shape, _NUMPY[buffer.dtype]) for name, buffer in buffers.items()}
    drafts = _with_target(plan, weights, draft_weights or {})
    _pack_tape(plan, weights, drafts, core, packed["tape"])
    if plan.drafter:
        plan.drafter.pack(plan, drafts, packed, core)
    _pack_vectors(plan, weights, core, packed)
    own = weights["model.embed_tokens.weight"][:, core * plan.split.hidden : (core + 1) * plan.split.hidden]
    packed["embedding"][: plan.config.vocab_size, : own.shape[1]] = own
    if plan.moe_layers:
        pack_bank(plan, weights, core, packed["bank_in"], packed["bank_out"])
    return {name: a.view(np.uint16) if buffers[name].dtype == "uint16" else a for name, a in packed.items()}


# ---- tape ----


def _with_target(plan: Plan, weights: Weights, draft_weights: Weights) -> Weights:
    """The drafter's tensors and what of the target's it may share."""
    embedding = weights["model.embed_tokens.weight"]
    head = embedding if plan.config.tie_word_embeddings else weights["lm_head.weight"]
    return {**draft_weights, "target.embed_tokens": embedding, "target.lm_head": head}


def _pack_tape(plan: Plan, weights: Weights, drafts: Weights, core: int, tape: np.ndarray) -> None:
    block = 0
    for source, prefix, section in _tape_order(plan, weights, drafts):
        blocks = plan.section_blocks(section)
        rows = tape[block : block + blocks].reshape(-1, plan.block_lanes)
        for matrix in plan.sections[section]:
            lay_matrix(plan, matrix, _dense_matrix(plan, source, prefix, matrix, core), rows)
        block += blocks
    assert block == len(tape), f"{block} blocks packed, {len(tape)} planned"


def _tape_order(plan: Plan, weights: Weights, drafts: Weights) -> Iterator[tuple[Weights, str, str]]:
    *layers, head = program.section_order(plan.config)
    for i, section in enumerate(layers):
        yield weights, f"model.layers.{i // 2}.", section
    yield weights, "", head
    if "draft" in plan.sections:
        yield drafts, "", "draft"


def _dense_matrix(plan: Plan, weights: Weights, prefix: str, matrix: Matrix, core: int) -> np.ndarray:
    """One core's part of a product's weights with padded columns.  # [groups, k, n]"""
    dense = np.zeros((matrix.groups, matrix.k, matrix.n), _NUMPY[plan.weights])
    for column in matrix.columns:
        start = matrix.offset(column.name)
        for group in range(matrix.groups):
            tensor = column_rows(plan, weights, prefix, column, core, group)
            if matrix.own_inputs:
                tensor = tensor[:, core * matrix.k : (core + 1) * matrix.k]
            elif column.part in _WHOLE:
                place = core // column.shared_by
                tensor = tensor[place * column.width : (place + 1) * column.width]
            if len(tensor):
                dense[group, : tensor.shape[1], start : start + len(tensor)] = tensor.T
    return dense


_WHOLE = ("all", "low")
"""Parts whose rows are divided evenly over cores; the others are picked head by head."""


def column_rows(plan: Plan, weights: Weights, prefix: str, column: Column, core: int, group: int) -> np.ndarray:
    """The rows of a checkpoint tensor that a column names.  # [out, in]; see `model.layout` for how tensors order them

    Rows of parts that go by heads are already this core's own; a head past the last has none.
    """
    config, split, tensor = plan.config, plan.split, weights[prefix + column.tensor]
    if column.part == "all":
        return tensor
    if column.part == "low":
        return _low_rank_rows(plan, weights, prefix)
    nope = config.qk_nope_head_dim
    if column.part in ("key", "value"):
        head = core * split.heads + group
        if head >= config.num_attention_heads:
            return tensor[:0]
        key, value = np.split(tensor.reshape(config.num_attention_heads, -1, config.kv_lora_rank)[head], [nope])
        return key.T if column.part == "key" else value
    heads = tensor.reshape(config.num_attention_heads, config.qk_head_dim, -1)[core * split.heads :][: split.heads]
    if column.part == "nope":
        return heads[:, :nope].reshape(-1, heads.shape[-1])
    return heads[int(column.name.removeprefix("extra")) :][:1, nope:].reshape(-1, heads.shape[-1])


def _low_rank_rows(plan: Plan, weights: Weights, prefix: str) -> np.ndarray:
    """Everything of an MLA layer that is gathered before use, as `Split.low_offsets` lays it out.  # [low, hidden]"""
    config, offsets = plan.config, plan.split.low_offsets
    latent, extra = np.split(weights[f"{prefix}self_attn.kv_a_proj_with_mqa.weight"], [config.kv_lora_rank])
    rows = np.zeros((plan.split.low_width, config.hidden_size), latent.dtype)
    parts = {"latent": latent, "extra": extra}
    if config.q_lora_rank is not None:
        parts["query"] = weights[f"{prefix}self_attn.q_a_proj.weight"]
    for name, part in parts.items():
        rows[offsets[name] : offsets[name] + len(part)] = part
    return rows


def lay_matrix(plan: Plan, matrix: Matrix, dense: np.ndarray, rows: np.ndarray) -> None:
    """Writes a product's weights to its section.  # dense [groups, k, n]; rows [section rows, block_lanes]"""
    tiling = plan.tilings[matrix.name]
    for panel in tiling.panels:
        size, width = sum(cut.rows for cut in panel.cuts), plan.block_lanes // panel.fold
        columns = dense[panel.group, :, panel.lane : panel.lane + width]
        for part in range(panel.fold):
            at = part * width
            for cut in panel.cuts:
                piece = columns[part * size + cut.k : min(part * size + cut.k + cut.rows, (part + 1) * size)]
                first = cut.block * plan.block_rows + cut.row
                rows[first : first + len(piece), at : at + piece.shape[1]] = piece


# ---- small vectors ----


def _pack_vectors(plan: Plan, weights: Weights, core: int, packed: dict[str, np.ndarray]) -> None:
    config = plan.config

    def put(layer: int, name: str, vector: np.ndarray) -> None:
        table, row = plan.vector_places[name]
        flat = np.asarray(vector, np.float32).reshape(-1)
        packed[f"{table}_tables"][layer, row, : len(flat)] = flat

    for layer in range(config.num_hidden_layers):
        for name, vector in _layer_vectors(plan, weights, layer, core):
            put(layer, name, vector)
    put(-1, "final_norm", weights["model.norm.weight"])
    if config.attn_res_block_size:
        put(-1, "final_mix", _mix_weight(weights, "model.output_attn_res"))


def _mix_weight(weights: Weights, stem: str) -> np.ndarray:
    norm, projection = (np.asarray(weights[f"{stem}_{part}.weight"], np.float32) for part in ("norm", "proj"))
    return norm * projection[0]


def _layer_vectors(plan: Plan, weights: Weights, layer: int, core: int) -> Iterator[tuple[str, np.ndarray]]:
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
        own = slice(core * plan.split.kda_width, (core + 1) * plan.split.kda_width)
        yield from ((name, vector[own]) for name, vector in _kda_vectors(plan, weights, attention))
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
    yield "decay_bias", weights[f"{attention}dt_bias"].reshape(-1)
    yield "out_norm", np.tile(weights[f"{attention}o_norm.weight"], heads)
