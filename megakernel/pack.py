"""Parameters -> the arrays a launch reads: tape, vector tables, embedding and expert bank of one core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np

from megakernel.memory import weight_buffers
from megakernel.pack_experts import pack_experts
from megakernel.plan import Plan
from megakernel.program import Column, Matrix, kda_vectors
from megakernel.stages import Stage, stages

Weights = Mapping[str, np.ndarray]
Arrays = dict[str, np.ndarray]
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_NUMPY = {"float32": np.dtype(np.float32), "bfloat16": _BFLOAT16, "uint16": _BFLOAT16, "uint32": np.dtype(np.uint32)}
"""What arrays are filled as; "uint16" holds the bits of bfloat16."""


def pack(plan: Plan, weights: Weights, draft_weights: Weights | None = None, *, core: int = 0) -> Arrays:
    """Lays a checkpoint's tensors out for one core; arrays by name, as in `memory.weight_buffers`.

    Args:
      core: index on the mesh axis `tp`.
      weights: tensors by the names of `model.layout`, [out, in]; read one at a time.
      draft_weights: tensors of the plan's drafter, if it has any.
    """
    packed = {name: zeros(buffer.shape, buffer.dtype) for name, buffer in weight_buffers(plan).items()}
    for stage in stages(plan):
        pack_stage(plan, stage, weights, draft_weights or {}, core, parts_of(packed, stage))
    return {name: as_stored(array, plan) for name, array in packed.items()}


def pack_drafter(plan: Plan, packed: Arrays, weights: Weights, draft_weights: Weights, *, core: int) -> Arrays:
    """Adds what the drafter reads to the arrays that were packed for the same plan without a drafter."""
    (stage,) = (stage for stage in stages(plan) if stage.kind == "draft")
    buffers = weight_buffers(plan)
    added = {span.array: zeros(buffers[span.array].shape, buffers[span.array].dtype) for span in stage.spans}
    if "tape" in added:
        added["tape"][: plan.draft_start] = packed["tape"].view(added["tape"].dtype)
    pack_stage(plan, stage, weights, draft_weights, core, parts_of(added, stage))
    return {**packed, **{name: as_stored(array, plan) for name, array in added.items()}}


def zeros(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """An empty array of the packer; dtype as in `memory.Buffer`."""
    return np.zeros(shape, _NUMPY[dtype])


def as_stored(array: np.ndarray, plan: Plan) -> np.ndarray:
    """A filled array as `memory.weight_buffers` describes it."""
    return array.view(np.uint16) if array.dtype == _BFLOAT16 and plan.storage == "uint16" else array


def parts_of(arrays: Arrays, stage: Stage) -> Arrays:
    """Views of what a stage fills, by the array's name."""
    return {span.array: arrays[span.array][span.first : span.first + span.count] for span in stage.spans}


def pack_stage(plan: Plan, stage: Stage, weights: Weights, drafts: Weights, core: int, parts: Arrays) -> None:
    """Fills one core's part of what a stage makes.

    Args:
      parts: zeros, one array for each span of the stage: the span's entries.
    """
    config = plan.config
    prefix = f"model.layers.{stage.layer}." if stage.layer < config.num_hidden_layers else ""
    match stage.kind:
        case "tape":
            _pack_section(plan, weights, prefix, stage.section, core, parts["tape"])
        case "vectors":
            _pack_vectors(plan, weights, stage.layer, core, parts)
        case "experts":
            pack_experts(plan, weights, stage.layer, stage.experts, core, parts["bank_in"], parts["bank_out"])
        case "embedding":
            width = plan.split.hidden
            own = weights["model.embed_tokens.weight"][:, core * width : (core + 1) * width]
            parts["embedding"][: config.vocab_size, : own.shape[1]] = own
        case "draft" if plan.drafter:
            shared = _DraftTensors(plan, weights, drafts)
            if "tape" in parts:
                _pack_section(plan, shared, "", stage.section, core, parts["tape"])
            plan.drafter.pack(plan, shared, parts, core)


# ---- tape ----


class _DraftTensors(dict[str, np.ndarray]):
    """The drafter's tensors, and what of the target's it may share, which is read when it is asked for."""

    def __init__(self, plan: Plan, weights: Weights, drafts: Weights):
        super().__init__(drafts)
        embedding = "model.embed_tokens.weight"
        head = embedding if plan.config.tie_word_embeddings else "lm_head.weight"
        self._weights, self._shared = weights, {"target.embed_tokens": embedding, "target.lm_head": head}

    def __missing__(self, name: str) -> np.ndarray:
        return self._weights[self._shared[name]]


def _pack_section(plan: Plan, weights: Weights, prefix: str, section: str, core: int, blocks: np.ndarray) -> None:
    rows = blocks.reshape(-1, plan.block_lanes)
    for matrix in plan.sections[section]:
        lay_matrix(plan, matrix, _dense_matrix(plan, weights, prefix, matrix, core), rows)


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


def _pack_vectors(plan: Plan, weights: Weights, layer: int, core: int, parts: Arrays) -> None:
    named = _layer_vectors if layer < plan.config.num_hidden_layers else _final_vectors
    for name, vector in named(plan, weights, layer, core):
        table, row = plan.vector_places[name]
        flat = np.asarray(vector, np.float32).reshape(-1)
        parts[f"{table}_tables"][0, row, : len(flat)] = flat


def _final_vectors(plan: Plan, weights: Weights, layer: int, core: int) -> Iterator[tuple[str, np.ndarray]]:
    yield "final_norm", weights["model.norm.weight"]


def _mix_weight(weights: Weights, stem: str) -> np.ndarray:
    norm, projection = (np.asarray(weights[f"{stem}_{part}.weight"], np.float32) for part in ("norm", "proj"))
    return norm * projection[0]


def _layer_vectors(plan: Plan, weights: Weights, layer: int, core: int) -> Iterator[tuple[str, np.ndarray]]:
    config, prefix = plan.config, f"model.layers.{layer}."
    yield "attn_norm", weights[f"{prefix}input_layernorm.weight"]
    yield "ffn_norm", weights[f"{prefix}post_attention_layernorm.weight"]
    if config.attn_res_block_size:
        is_last = layer + 1 == config.num_hidden_layers
        following = "model.output_attn_res" if is_last else f"model.layers.{layer + 1}.self_attention_res"
        yield "ffn_mix", _mix_weight(weights, f"{prefix}mlp_res")
        yield "next_mix", _mix_weight(weights, following)
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
