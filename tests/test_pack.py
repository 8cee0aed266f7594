"""The packer against the tensors it packs: every weight comes back, once, from the arrays of one or several cores."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from launching import DATA

from megakernel import Plan, find_target, make_plan
from megakernel.bank import down_scales
from megakernel.memory import weight_buffers
from megakernel.pack import pack
from megakernel.phases.mxfp4 import decode_mxfp4 as decode_in_kernel
from megakernel.program import Column, Matrix
from megakernel.timeline import tape_sections
from model.config import ModelConfig
from model.layout import expert_name, tensor_specs
from model.quantize import decode_mxfp4
from model.reference import random_weights

MINI, NANO = ModelConfig.preset("k3-mini"), ModelConfig.preset("k3-nano")
TINY, KLINEAR = ModelConfig.from_file(DATA / "tiny_stable_mxfp4"), ModelConfig.from_file(DATA / "klinear_config.json")
WIDE = dataclasses.replace(MINI, name="wide", kv_lora_rank=320, num_attention_heads=3)
UNEVEN = dataclasses.replace(
    WIDE, name="uneven", q_lora_rank=200, routed_expert_hidden_size=384, kda_num_heads=3, intermediate_size=300,
    num_experts=7, vocab_size=301, hidden_size=384, use_full_rank_gate=False, moe_intermediate_size=96,
)  # fmt: skip
MODELS = {"k3-mini": MINI, "k3-nano": NANO, "tiny": TINY, "klinear": KLINEAR, "wide": WIDE, "uneven": UNEVEN}
"""`wide` has several panels in each group of its block-diagonal products; few sizes of `uneven` are powers of two."""
DIVISIONS = [
    ("k3-mini", 2, None), ("k3-mini", 2, 2), ("k3-mini", 3, None), ("k3-mini", 4, None), ("k3-mini", 8, None),
    ("k3-mini", 8, 4), ("k3-nano", 2, 1), ("k3-nano", 4, None), ("k3-nano", 8, 2),
    ("wide", 2, None), ("wide", 3, None), ("wide", 4, 2), ("wide", 8, None),
    ("uneven", 2, None), ("uneven", 3, None), ("uneven", 3, 1), ("uneven", 4, None), ("uneven", 8, None),
    ("klinear", 2, None), ("klinear", 3, None), ("klinear", 4, None),
]  # fmt: skip
"""Model, cores, groups of experts."""
divided = pytest.mark.parametrize(("name", "cores", "groups"), DIVISIONS)


@functools.cache
def weights_of(name: str) -> dict[str, np.ndarray]:
    return random_weights(MODELS[name], 0)


def packed_cores(name: str, cores: int, groups: int | None, **knobs) -> tuple[Plan, list[dict[str, np.ndarray]]]:
    plan = make_plan(MODELS[name], find_target("cpu"), cores=cores, expert_groups=groups, context=64, **knobs)
    return plan, [pack(plan, weights_of(name), core=core) for core in range(cores)]


# ---- the tape ----


def unpacked(plan: Plan, matrix: Matrix, rows: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """The product's weights [groups, k, n] from its section [rows, lanes], as the kernel meets them cut by cut.

    Part i of a folded panel lies in the i-th share of the lanes and has the i-th share of the inputs. `seen` notes what
    was read; nothing may be read twice.
    """
    tiling = plan.tilings[matrix.name]
    dense = np.zeros((matrix.groups, tiling.k_padded, tiling.group_lanes), rows.dtype)
    for panel in tiling.panels:
        share, width = sum(cut.rows for cut in panel.cuts), plan.block_lanes // panel.fold
        for part, cut in itertools.product(range(panel.fold), panel.cuts):
            first, lanes = cut.block * plan.block_rows + cut.row, slice(part * width, (part + 1) * width)
            count = max(0, min(cut.rows, tiling.k_padded - (part * share + cut.k)))
            assert not seen[first : first + count, lanes].any()
            seen[first : first + count, lanes] = True
            inputs = slice(part * share + cut.k, part * share + cut.k + count)
            dense[panel.group, inputs, panel.lane : panel.lane + width] = rows[first : first + count, lanes]
    assert not dense[:, matrix.k :].any()
    assert not dense[:, :, matrix.n :].any()
    return dense[:, : matrix.k, : matrix.n]


def unpacked_tape(plan: Plan, packed: dict[str, np.ndarray]) -> Iterator[tuple[str, Matrix, np.ndarray]]:
    """(prefix of the layer's tensors, matrix, weights) along the tape; what no product reads is zero."""
    tape = packed["tape"].view(ml_dtypes.bfloat16)
    end = 0
    for section, layer, block in tape_sections(plan):
        assert block == end
        end = block + plan.section_blocks(section)
        rows = tape[block:end].reshape(-1, plan.block_lanes)
        seen = np.zeros(rows.shape, bool)
        for matrix in plan.sections[section]:
            prefix = f"model.layers.{layer}." if section != "head" else ""
            yield prefix, matrix, unpacked(plan, matrix, rows, seen)
        assert not rows[~seen].any()
    assert end == plan.tape_blocks == len(tape)


def expected(config: ModelConfig, weights: dict[str, np.ndarray], prefix: str, column: Column) -> np.ndarray:
    """All outputs of a column over all cores and groups, from the layout of the official code.  # [k, out]

    Outputs that go by heads follow each other head by head.
    """
    tensor = weights[prefix + column.tensor]
    heads, nope, extra = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    if column.part in ("key", "value"):  # per head: keys, then values
        per_head = [tensor[h * (nope + config.v_head_dim) :][: nope + config.v_head_dim] for h in range(heads)]
        return np.concatenate([h[:nope] if column.part == "key" else h[nope:].T for h in per_head], axis=1)
    if column.part in ("nope", "extra"):  # queries: per head the content part, then the extra part
        per_head = [tensor[h * (nope + extra) :][: nope + extra] for h in range(heads)]
        return np.concatenate([h[:nope] if column.part == "nope" else h[nope:] for h in per_head]).T
    if column.part == "low":  # latent, query and extra key, each padded to whole tiles
        parts = [tensor[: config.kv_lora_rank], tensor[config.kv_lora_rank :]]
        if config.q_lora_rank is not None:
            parts.insert(1, weights[f"{prefix}self_attn.q_a_proj.weight"])
        return np.concatenate([np.pad(part, ((0, -len(part) % 128), (0, 0))) for part in parts]).T
    return tensor.T


def gathered(matrix: Matrix, column: Column, cores: list[np.ndarray]) -> np.ndarray:
    """All cores' parts of a column put together.  # cores [groups, k, n] each -> [k, out]"""

    def lanes(dense: np.ndarray, group: int, name: str, width: int) -> np.ndarray:
        first = matrix.offset(name)
        return dense[group, :, first : first + width]

    if matrix.own_inputs:
        return np.concatenate([lanes(dense, 0, column.name, column.width) for dense in cores], axis=0)
    names = [c.name for c in matrix.columns if c.part == "extra"] if column.part == "extra" else [column.name]
    groups = itertools.product(cores, range(matrix.groups), names)
    return np.concatenate([lanes(dense, group, name, column.width) for dense, group, name in groups], axis=1)


def check_tape(name: str, plan: Plan, packed: list[dict[str, np.ndarray]]) -> None:
    """Every weight is found where it belongs, and all other numbers on the tapes are zero."""
    config, weights = MODELS[name], weights_of(name)
    for found in zip(*(unpacked_tape(plan, arrays) for arrays in packed), strict=True):
        prefix, matrix, _ = found[0]
        cores = [dense for _, _, dense in found]
        known = sum(np.count_nonzero(dense) for dense in cores)
        for column in matrix.columns:
            if column.part == "extra" and column.name != "extra0":
                continue  # all heads are put together at once
            all_cores, whole = gathered(matrix, column, cores), expected(config, weights, prefix, column)
            np.testing.assert_array_equal(all_cores[: len(whole), : whole.shape[1]], whole)
            known -= np.count_nonzero(whole)
        assert known == 0


@pytest.mark.parametrize("block", [None, (128, 128), (512, 256), (384, 128), (1024, 1024)])
@pytest.mark.parametrize("name", MODELS)
def test_unpacking_the_tape_gives_the_weights_back(name: str, block: tuple[int, int] | None) -> None:
    plan, packed = packed_cores(name, 1, None, block=block, ring_depth=2)
    check_tape(name, plan, packed)
    folds = {panel.fold for tiling in plan.tilings.values() for panel in tiling.panels}
    if block == (1024, 1024):
        assert max(folds) > 1


@pytest.mark.parametrize("block", [None, (128, 256), (1024, 512)])
@divided
def test_the_tapes_of_all_cores_hold_every_weight_once(
    name: str, cores: int, groups: int | None, block: tuple[int, int] | None
) -> None:
    plan, packed = packed_cores(name, cores, groups, block=block, ring_depth=2)
    check_tape(name, plan, packed)


def test_some_folded_panels_have_an_empty_share() -> None:
    """In one of the round trips above: fewer shares of the inputs than of the lanes."""
    plan = make_plan(UNEVEN, cores=8, context=64, block=(128, 256), ring_depth=2)
    shares = []
    for matrix in plan.matrices.values():
        for panel in plan.tilings[matrix.name].panels:
            used = -(-matrix.k // sum(cut.rows for cut in panel.cuts))
            shares.append((used, panel.fold))
    assert any(1 < used < fold for used, fold in shares)


@pytest.mark.parametrize("name", MODELS)
def test_tape_holds_every_matrix_once(name: str) -> None:
    """Counted from the tensors of the checkpoint: all of them, but for vectors, convolutions, experts and embedding."""
    config, plan = MODELS[name], make_plan(MODELS[name], context=64)
    beside = ("norm", "conv1d", "A_log", "dt_bias", "_res_proj", "experts.", "e_score", "embed_tokens")
    on_tape = {
        tensor: math.prod(spec.shape)
        for tensor, spec in tensor_specs(config).items()
        if "shared_experts" in tensor or not any(part in tensor for part in beside)
    }
    if config.tie_word_embeddings:
        on_tape["model.embed_tokens.weight"] = config.vocab_size * config.hidden_size
    assert plan.tape_parameters == sum(on_tape.values())
    for matrices in plan.sections.values():
        assert sum(matrix.parameters for matrix in matrices) > 0
    packed = pack(plan, weights_of(name))
    assert packed["tape"].nbytes == plan.tape_bytes
    assert np.count_nonzero(packed["tape"]) <= plan.tape_parameters
    assert plan.tape_blocks * plan.block_bytes == plan.tape_bytes


@pytest.mark.parametrize(("name", "cores", "groups"), [*((name, 1, None) for name in MODELS), *DIVISIONS])
def test_arrays_have_the_shapes_of_their_buffers(name: str, cores: int, groups: int | None) -> None:
    plan, packed = packed_cores(name, cores, groups)
    for arrays, (array, buffer) in itertools.product(packed, weight_buffers(plan).items()):
        assert arrays[array].shape == buffer.shape
        assert arrays[array].nbytes == buffer.bytes


# ---- what lies beside the tape ----


@pytest.mark.parametrize(("name", "cores", "groups"), [*((name, 1, None) for name in MODELS), *DIVISIONS])
def test_vectors_come_back_from_the_tables(name: str, cores: int, groups: int | None) -> None:
    """Wide vectors whole on every core; those of KDA heads divided over the cores."""
    config, weights = MODELS[name], weights_of(name)
    plan, packed = packed_cores(name, cores, groups)

    def row(layer: int, vector: str, width: int) -> np.ndarray:
        table, at = plan.vector_places[vector]
        rows = [arrays[f"{table}_tables"][layer, at] for arrays in packed]
        if table == "heads":
            own = plan.split.kda_width
            assert not any(found[own:].any() for found in rows)
            rows = [np.concatenate([found[:own] for found in rows])]
        for found in rows:
            assert not found[width:].any()
            np.testing.assert_array_equal(found, rows[0])
        return rows[0][:width]

    def mixed(stem: str) -> np.ndarray:
        norm, projection = (weights[f"{stem}_{part}.weight"].astype(np.float32) for part in ("norm", "proj"))
        return norm * projection[0]

    hidden, width = config.hidden_size, config.kda_width
    np.testing.assert_array_equal(row(-1, "final_norm", hidden), weights["model.norm.weight"])
    if config.attn_res_block_size:
        np.testing.assert_array_equal(row(-2, "next_mix", hidden), mixed("model.output_attn_res"))
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        np.testing.assert_array_equal(row(layer, "attn_norm", hidden), weights[f"{prefix}input_layernorm.weight"])
        np.testing.assert_array_equal(
            row(layer, "ffn_norm", hidden), weights[f"{prefix}post_attention_layernorm.weight"]
        )
        if config.attn_res_block_size:
            if layer:
                np.testing.assert_array_equal(row(layer - 1, "next_mix", hidden), mixed(f"{prefix}self_attention_res"))
            np.testing.assert_array_equal(row(layer, "ffn_mix", hidden), mixed(f"{prefix}mlp_res"))
        if config.is_moe(layer):
            bias = weights[f"{prefix}block_sparse_moe.gate.e_score_correction_bias"]
            np.testing.assert_array_equal(row(layer, "router_bias", config.num_experts), bias)
            if config.latent_moe_use_norm:
                norm = weights[f"{prefix}block_sparse_moe.routed_expert_norm.weight"]
                np.testing.assert_array_equal(row(layer, "latent_norm", config.routed_expert_hidden_size), norm)
        attention = f"{prefix}self_attn."
        if config.layer_kind(layer) == "mla":
            norm = weights[f"{attention}kv_a_layernorm.weight"]
            np.testing.assert_array_equal(row(layer, "kv_norm", config.kv_lora_rank), norm)
            if config.q_lora_rank is not None:
                norm = weights[f"{attention}q_a_layernorm.weight"]
                np.testing.assert_array_equal(row(layer, "query_norm", config.q_lora_rank), norm)
            continue
        for stream, tap in itertools.product("qkv", range(config.short_conv_kernel_size)):
            taps = weights[f"{attention}{stream}_conv1d.weight"][:, 0, tap]
            np.testing.assert_array_equal(row(layer, f"conv_{stream}{tap}", width), taps)
        a_log = weights[f"{attention}A_log"].reshape(-1)[: config.kda_num_heads].astype(np.float32)
        np.testing.assert_array_equal(row(layer, "decay_rate", width), np.exp(a_log).repeat(config.kda_head_dim))
        np.testing.assert_array_equal(row(layer, "decay_bias", width), weights[f"{attention}dt_bias"].reshape(-1))
        out_norm = np.concatenate([weights[f"{attention}o_norm.weight"]] * config.kda_num_heads)
        np.testing.assert_array_equal(row(layer, "out_norm", width), out_norm)


BANKS = ("bank_in", "bank_out")


def expert_matrices(plan: Plan, both: np.ndarray, down: np.ndarray) -> dict[str, np.ndarray]:
    """One core's part of the three matrices of one expert, [k, out], decoded as the kernel decodes them."""
    config = plan.config
    latent, inner = config.routed_expert_hidden_size, plan.split.expert_width
    if config.expert_format == "bf16":
        gate_up, w2 = (array.view(ml_dtypes.bfloat16).astype(np.float32) for array in (both, down))
    else:
        codes, scales = latent // 8, -(-latent // 128)
        gate_up = np.asarray(decode_in_kernel(both[:codes], both[codes : codes + scales]))
        below = np.concatenate([both[rows, lanes] for rows, lanes in down_scales(plan.split)], axis=1)
        w2 = np.asarray(decode_in_kernel(down[: inner // 8], below))
    return {"w1": gate_up[:, :inner], "w3": gate_up[:, inner : 2 * inner], "w2": w2[:, :latent]}


@pytest.mark.parametrize(("name", "cores", "groups"), [*((name, 1, None) for name in MODELS), *DIVISIONS])
def test_experts_come_back_from_the_banks(name: str, cores: int, groups: int | None) -> None:
    """Every expert of every layer, decoded as the kernel decodes it, from the cores that hold its parts."""
    config, weights = MODELS[name], weights_of(name)
    plan, packed = packed_cores(name, cores, groups)
    split = plan.split
    moe_layers = [layer for layer in range(config.num_hidden_layers) if config.is_moe(layer)]
    for (i, layer), expert in itertools.product(enumerate(moe_layers), range(config.num_experts)):
        group, place = divmod(expert, split.experts)
        owners = range(group * split.expert_parts, (group + 1) * split.expert_parts)
        entry = i * split.experts + place
        parts = [expert_matrices(plan, *(packed[core][name][entry] for name in BANKS)) for core in owners]
        found = {
            matrix: np.concatenate([part[matrix] for part in parts], axis=0 if matrix == "w2" else 1)
            for matrix in ("w1", "w3", "w2")
        }
        for matrix, dense in found.items():
            stem = expert_name(layer, expert, matrix)  # type: ignore[arg-type]
            if config.expert_format == "bf16":
                whole = weights[f"{stem}.weight"]
            else:
                whole = decode_mxfp4(weights[f"{stem}.weight_packed"], weights[f"{stem}.weight_scale"])
            np.testing.assert_array_equal(dense, np.asarray(whole, np.float32).T)
    entries = len(moe_layers) * split.experts
    assert all(len(arrays[bank]) == entries for arrays in packed for bank in BANKS)


@pytest.mark.parametrize(("name", "cores", "groups"), [*((name, 1, None) for name in MODELS), *DIVISIONS])
def test_the_embedding_comes_back_by_columns(name: str, cores: int, groups: int | None) -> None:
    _, packed = packed_cores(name, cores, groups)
    whole = weights_of(name)["model.embed_tokens.weight"]
    found = np.concatenate([arrays["embedding"].view(ml_dtypes.bfloat16) for arrays in packed], axis=1)
    np.testing.assert_array_equal(found[: len(whole), : whole.shape[1]], whole)
    assert np.count_nonzero(found) == np.count_nonzero(whole)


def test_a_tied_head_is_the_embedding() -> None:
    assert NANO.tie_word_embeddings
    plan, (packed,) = packed_cores("k3-nano", 1, None)
    *_, (_, head, dense) = unpacked_tape(plan, packed)
    assert head.name == "head"
    np.testing.assert_array_equal(dense[0].T, weights_of("k3-nano")["model.embed_tokens.weight"])


@pytest.mark.parametrize("cores", [1, 2])
def test_one_changed_weight_changes_the_pack(cores: int) -> None:
    """Every tensor of a checkpoint is packed: none may be left out, but what scores the snapshots that the first layer
    does not have yet."""
    plan, packed = packed_cores("k3-mini", cores, None)
    weights = weights_of("k3-mini")
    for name, tensor in weights.items():
        if name.startswith("model.layers.0.self_attention_res"):
            continue
        if name.startswith("model.layers.1.block_sparse_moe.experts.") and ".experts.3." not in name:
            continue  # one expert stands for all
        if not re.search(r"layers\.[0134]\.", name) and name.startswith("model.layers."):
            continue
        if cores > 1 and ".experts." in name and ".experts.3." not in name:
            continue
        changed = tensor.copy()
        flat = changed.reshape(-1)
        flat[-1] = flat[-1] ^ 1 if changed.dtype == np.uint8 else flat[-1] + 1
        others = [pack(plan, {**weights, name: changed}, core=core) for core in range(cores)]
        pairs = zip(packed, others, strict=True)
        assert any((other[array] != own[array]).any() for own, other in pairs for array in own), name
