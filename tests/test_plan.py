"""The plan against the kernel that is built from it, the packer against the tensors it packs, and every refusal."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from launching import DATA, launch_jaxpr

from megakernel import Plan, PlanError, bank, find_target, layers, make_plan, program
from megakernel.kernel import layer_table
from megakernel.memory import weight_buffers
from megakernel.pack import pack
from megakernel.phases.mxfp4 import decode_mxfp4 as decode_in_kernel
from megakernel.plan import MAX_ROWS
from megakernel.program import Matrix
from megakernel.target import CPU
from model.config import ModelConfig
from model.layout import expert_name, tensor_specs
from model.quantize import decode_mxfp4
from model.reference import random_weights

MINI, NANO = ModelConfig.preset("k3-mini"), ModelConfig.preset("k3-nano")
TINY, KLINEAR = ModelConfig.from_file(DATA / "tiny_stable_mxfp4"), ModelConfig.from_file(DATA / "klinear_config.json")
WIDE = dataclasses.replace(MINI, name="wide", kv_lora_rank=320, num_attention_heads=3)
MODELS = {"k3-mini": MINI, "k3-nano": NANO, "tiny": TINY, "klinear": KLINEAR, "wide": WIDE}
"""The last one has several tiles in each group of its block-diagonal products, the last of them not full."""


@functools.cache
def weights_of(name: str) -> dict[str, np.ndarray]:
    return random_weights(MODELS[name], 0)


# ---- maps: what the plan counts is what the kernel allocates ----


def allocated(plan: Plan) -> dict[str, list[Any]]:
    """Shapes and types of every buffer of the traced kernel by memory; an array updated in place counts once."""
    (call,) = launch_jaxpr(plan, interpret=False).jaxpr.eqns
    found: dict[str, list[Any]] = {}
    buffers = [variable.aval for variable in call.params["jaxpr"].invars]
    inputs = len(call.invars)
    in_place = {inputs + output for _, output in call.params["input_output_aliases"]}
    for place, buffer in enumerate(buffers):
        if place not in in_place:
            found.setdefault(str(buffer.memory_space), []).append(buffer.inner_aval)
    return found


def padded_bytes(aval: Any) -> int:
    """Bytes with the last dimension in whole lanes and the one before in whole 4-byte sublanes of 8."""
    size = aval.dtype.itemsize
    *major, rows, lanes = (1, *aval.shape) if len(aval.shape) == 1 else aval.shape
    tile = 8 * 4 // size
    return math.prod(major) * -(-rows // tile) * tile * -(-lanes // 128) * 128 * size


@pytest.mark.parametrize(
    ("name", "target", "knobs"),
    [
        ("k3-mini", "v7x", {"sequences": 3, "context": 256}),
        ("k3-nano", "v5e", {"sequences": 16, "context": 1024, "ring_depth": 3, "expert_slots": 7}),
        ("k3-nano", "v6e", {"context": 64, "page": 16, "keep_logits": True, "launch_steps": 40}),
        ("klinear", "cpu", {"sequences": 5, "context": 128}),
        ("tiny", "cpu", {"sequences": 2, "context": 128, "activations": "bfloat16"}),
    ],
)
def test_maps_are_what_the_kernel_allocates(name: str, target: str, knobs: dict[str, Any]) -> None:
    plan = make_plan(MODELS[name], find_target(target), **knobs)
    found = allocated(plan)
    assert sum(plan.vmem_map.values()) == sum(map(padded_bytes, found["vmem"]))
    smem = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in found["smem"])
    assert sum(plan.smem_map.values()) == smem
    assert sum(plan.hbm_map.values()) == sum(map(padded_bytes, found["any"]))


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
    packed = pack(plan, weights_of(name))
    assert packed["tape"].nbytes == plan.tape_bytes
    assert np.count_nonzero(packed["tape"]) <= plan.tape_parameters
    assert plan.tape_blocks * plan.block_bytes == plan.tape_bytes
    for array, buffer in weight_buffers(plan).items():
        assert packed[array].shape == buffer.shape
        assert packed[array].nbytes == buffer.bytes


def test_step_bytes() -> None:
    plan = make_plan(NANO, find_target("v7x"), sequences=2, context=256, ring_depth=3)
    moved = plan.step_bytes
    assert moved["tape"] == plan.tape_bytes
    assert make_plan(NANO, find_target("v7x"), sequences=2, context=256).step_bytes["tape"] == 0  # resident
    experts = min(NANO.num_experts, 2 * NANO.num_experts_per_token)
    one = sum(pack_one.nbytes for pack_one in expert_pieces(plan))
    assert moved["experts"] == plan.moe_layers * experts * one
    state = 4 * NANO.kda_num_heads * NANO.kda_head_dim**2
    assert moved["KDA states"] == 2 * 2 * len(NANO.kda_layers) * state  # read and written, two sequences


def expert_pieces(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    buffers = weight_buffers(plan)
    return tuple(np.zeros(buffers[bank].shape[1:], np.uint32) for bank in ("bank_in", "bank_out"))  # type: ignore[return-value]


# ---- the tape: order and round trip ----


def in_order(config: ModelConfig) -> list[tuple[str, Matrix]]:
    """Layer by layer attention, then FFN; then the head: the order of a forward pass."""
    found = []
    for layer in range(config.num_hidden_layers):
        for matrix in (*program.attention_matrices(config, layer), *program.ffn_matrices(config, layer)):
            found.append((f"model.layers.{layer}.", matrix))
    return [*found, *(("", matrix) for matrix in program.head_matrices(config))]


def unpacked(plan: Plan, matrix: Matrix, blocks: np.ndarray) -> np.ndarray:
    """The product's weights [groups, k, n] from its tape blocks, element by element as the kernel meets them."""
    tiling = plan.tiling(matrix)
    dense = np.zeros((matrix.groups, tiling.k_padded, tiling.tiles_per_group * plan.block_n), blocks.dtype)
    used = np.zeros(len(blocks) * plan.block_k // tiling.k_padded if tiling.fold > 1 else len(blocks), bool)
    for tile in range(tiling.tiles):
        group, column = divmod(tile, tiling.tiles_per_group)
        lanes = slice(column * plan.block_n, (column + 1) * plan.block_n)
        if tiling.fold > 1:
            block, part = divmod(tile, tiling.fold)
            dense[group, :, lanes] = blocks[block, part * tiling.k_padded : (part + 1) * tiling.k_padded]
            used[tile] = True
            continue
        for step in range(tiling.k_tiles):
            at = tile * tiling.k_tiles + step
            dense[group, step * plan.block_k : (step + 1) * plan.block_k, lanes] = blocks[at]
            used[at] = True
    assert used[: tiling.tiles * tiling.k_tiles].all()
    assert not dense[:, matrix.k :].any()
    assert not dense[:, :, matrix.n :].any()
    return dense[:, : matrix.k, : matrix.n]


def rows_of(config: ModelConfig, tensor: np.ndarray, column: program.Column, group: int) -> np.ndarray:
    """Which rows of a checkpoint tensor [out, in] a column range holds, from the layout of the official code."""
    heads, nope, extra = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    if column.tensor.endswith("kv_b_proj.weight"):  # per head: keys, then values
        start = group * (nope + config.v_head_dim) + (0 if column.part == "key" else nope)
        return tensor[start : start + column.width if column.part == "value" else start + nope]
    if column.tensor.endswith("kv_a_proj_with_mqa.weight"):
        return tensor[: config.kv_lora_rank] if column.part == "nope" else tensor[config.kv_lora_rank :]
    if column.part == "nope":  # queries: per head the content part, then the extra part
        return np.concatenate([tensor[h * (nope + extra) : h * (nope + extra) + nope] for h in range(heads)])
    if column.part == "extra":
        head = int(column.name.removeprefix("extra"))
        return tensor[head * (nope + extra) + nope : (head + 1) * (nope + extra)]
    return tensor


@pytest.mark.parametrize("block", [None, (128, 128), (512, 256), (48, 128), (1024, 1024)])
@pytest.mark.parametrize("name", MODELS)
def test_unpacking_the_tape_gives_the_weights_back(name: str, block: tuple[int, int] | None) -> None:
    config, weights = MODELS[name], weights_of(name)
    plan = make_plan(config, find_target("cpu"), context=64, block=block, ring_depth=2)
    tape = pack(plan, weights)["tape"].view(ml_dtypes.bfloat16)
    at, folds = 0, set()
    starts = {start for pair in plan.layer_starts for start in pair}
    for prefix, matrix in in_order(config):
        tiling = plan.tiling(matrix)
        dense = unpacked(plan, matrix, tape[at : at + tiling.blocks])
        for column in matrix.columns:
            tensor, first = weights[prefix + column.tensor], matrix.offset(column.name)
            for group in range(matrix.groups):
                found = dense[group, :, first : first + column.width]
                expected = rows_of(config, tensor, column, group)
                np.testing.assert_array_equal(found, expected if column.part == "key" else expected.T)
                assert not dense[group, :, first + column.width : first + column.padded].any()
        starts.discard(at)
        at += tiling.blocks
        folds.add(tiling.fold)
    assert at == plan.tape_blocks == len(tape)
    assert not starts  # each layer's attention and FFN start at a matrix
    if block == (1024, 1024):
        assert max(folds) > 1


def test_the_kernel_takes_products_in_the_order_of_the_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    """As traced: KDA, MLA, MoE and dense branch each once, then the head; first blocks come from the layer table."""
    taken: list[str] = []
    linear = layers.linear

    def noting(plan: Plan, tape: Any, index: Any, x: Any, matrix: Matrix, *buffers: Any) -> Any:
        taken.append(matrix.name)
        return linear(plan, tape, index, x, matrix, *buffers)

    monkeypatch.setattr(layers, "linear", noting)
    for config in (MINI, KLINEAR):
        taken.clear()
        plan = make_plan(config, context=64)
        launch_jaxpr(plan)
        branches = (
            program.kda_matrices(config),
            program.mla_matrices(config),
            program.moe_matrices(config),
            program.dense_matrices(config),
            program.head_matrices(config),
        )
        once = list(dict.fromkeys(taken))
        assert once == [matrix.name for branch in branches for matrix in branch]
        table = np.asarray(layer_table(plan))
        assert [tuple(row) for row in table[:, :2].tolist()] == list(plan.layer_starts[:-1])


def test_layer_table() -> None:
    """Layer by layer: index among its kind and among MoE layers, snapshots before it, kind, MoE, writes a snapshot."""
    table = np.asarray(layer_table(make_plan(MINI, context=64)))[:, 2:8]
    assert table.tolist() == [
        [0, 0, 0, 0, 0, 1],
        [1, 0, 1, 0, 1, 0],
        [2, 1, 1, 0, 1, 1],
        [0, 2, 2, 1, 1, 0],
        [1, 3, 2, 1, 1, 1],
    ]


@pytest.mark.parametrize("name", MODELS)
def test_vectors_come_back_from_the_tables(name: str) -> None:
    config, weights = MODELS[name], weights_of(name)
    plan = make_plan(config, context=64)
    tables, rows = pack(plan, weights)["vector_tables"], plan.vector_rows

    def row(layer: int, vector: str, width: int) -> np.ndarray:
        assert not tables[layer, rows[vector], width:].any()
        return tables[layer, rows[vector], :width]

    def mixed(stem: str) -> np.ndarray:
        norm, projection = (weights[f"{stem}_{part}.weight"].astype(np.float32) for part in ("norm", "proj"))
        return norm * projection[0]

    hidden, width = config.hidden_size, config.kda_width
    np.testing.assert_array_equal(row(-1, "final_norm", hidden), weights["model.norm.weight"])
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        np.testing.assert_array_equal(row(layer, "attn_norm", hidden), weights[f"{prefix}input_layernorm.weight"])
        np.testing.assert_array_equal(
            row(layer, "ffn_norm", hidden), weights[f"{prefix}post_attention_layernorm.weight"]
        )
        if config.attn_res_block_size:
            np.testing.assert_array_equal(row(layer, "attn_mix", hidden), mixed(f"{prefix}self_attention_res"))
            np.testing.assert_array_equal(row(layer, "ffn_mix", hidden), mixed(f"{prefix}mlp_res"))
        if config.is_moe(layer):
            bias = weights[f"{prefix}block_sparse_moe.gate.e_score_correction_bias"]
            np.testing.assert_array_equal(row(layer, "router_bias", config.num_experts), bias)
        attention = f"{prefix}self_attn."
        if config.layer_kind(layer) == "mla":
            norm = weights[f"{attention}kv_a_layernorm.weight"]
            np.testing.assert_array_equal(row(layer, "kv_norm", config.kv_lora_rank), norm)
            continue
        for stream, tap in itertools.product("qkv", range(config.short_conv_kernel_size)):
            taps = weights[f"{attention}{stream}_conv1d.weight"][:, 0, tap]
            np.testing.assert_array_equal(row(layer, f"conv_{stream}{tap}", width), taps)
        a_log = weights[f"{attention}A_log"].reshape(-1)[: config.kda_num_heads].astype(np.float32)
        np.testing.assert_array_equal(row(layer, "decay_rate", width), np.exp(a_log).repeat(config.kda_head_dim))
        np.testing.assert_array_equal(row(layer, "decay_bias", width), weights[f"{attention}dt_bias"])
        out_norm = np.concatenate([weights[f"{attention}o_norm.weight"]] * config.kda_num_heads)
        np.testing.assert_array_equal(row(layer, "out_norm", width), out_norm)


def expert_matrices(plan: Plan, both: np.ndarray, down: np.ndarray) -> dict[str, np.ndarray]:
    """The three matrices of one expert, [k, out], decoded as the kernel decodes them."""
    config = plan.config
    latent, inner = config.routed_expert_hidden_size, config.moe_intermediate_size
    if config.expert_format == "bf16":
        gate_up, w2 = both.view(ml_dtypes.bfloat16), down.view(ml_dtypes.bfloat16)
    else:
        codes, scales = latent // 8, -(-latent // 128)
        gate_up = np.asarray(decode_in_kernel(both[:codes], both[codes : codes + scales]))
        below = np.concatenate([both[rows, lanes] for rows, lanes in bank.down_scales(config)], axis=1)
        w2 = np.asarray(decode_in_kernel(down[: inner // 8], below))
    return {"w1": gate_up[:, :inner], "w3": gate_up[:, inner : 2 * inner], "w2": w2[:, :latent]}


@pytest.mark.parametrize("name", MODELS)
def test_experts_come_back_from_the_bank(name: str) -> None:
    """Every expert of every layer."""
    config, weights = MODELS[name], weights_of(name)
    plan = make_plan(config, context=64)
    packed = pack(plan, weights)
    entry = 0
    for layer in range(config.num_hidden_layers):
        if not config.is_moe(layer):
            continue
        for expert in range(config.num_experts):
            found = expert_matrices(plan, packed["bank_in"][entry], packed["bank_out"][entry])
            for matrix, dense in found.items():
                stem = expert_name(layer, expert, matrix)  # type: ignore[arg-type]
                if config.expert_format == "bf16":
                    expected = weights[f"{stem}.weight"]
                else:
                    expected = decode_mxfp4(weights[f"{stem}.weight_packed"], weights[f"{stem}.weight_scale"])
                np.testing.assert_array_equal(dense, expected.T)
            entry += 1
    assert entry == len(packed["bank_in"]) == len(packed["bank_out"])


def test_a_tied_head_is_the_embedding() -> None:
    plan, weights = make_plan(NANO, context=64), weights_of("k3-nano")
    packed = pack(plan, weights)
    head = plan.matrices["head"]
    dense = unpacked(plan, head, packed["tape"][plan.layer_starts[-1][0] :].view(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(dense[0].T, weights["model.embed_tokens.weight"])
    np.testing.assert_array_equal(
        packed["embedding"].view(ml_dtypes.bfloat16)[: NANO.vocab_size], weights["model.embed_tokens.weight"]
    )


def test_one_changed_weight_changes_the_pack() -> None:
    """Every tensor of a checkpoint is packed: none may be left out."""
    plan, weights = make_plan(MINI, context=64), weights_of("k3-mini")
    packed = pack(plan, weights)
    for name, tensor in weights.items():
        if name.startswith("model.layers.1.block_sparse_moe.experts.") and ".experts.3." not in name:
            continue  # one expert stands for all
        if not re.search(r"layers\.[0134]\.", name) and name.startswith("model.layers."):
            continue
        changed = tensor.copy()
        flat = changed.reshape(-1)
        flat[-1] = flat[-1] ^ 1 if changed.dtype == np.uint8 else flat[-1] + 1
        other = pack(plan, {**weights, name: changed})
        assert any((other[array] != packed[array]).any() for array in packed), name


# ---- choices ----


def test_a_plan_is_a_key() -> None:
    """The same request gives an equal plan, another one does not: plans name compiled launches."""
    plan = make_plan(MINI, sequences=2)
    assert plan == make_plan(MINI, sequences=2)
    assert hash(plan) == hash(make_plan(MINI, sequences=2))
    for other in ({"sequences": 3}, {"sequences": 2, "context": 128}, {"sequences": 2, "keep_logits": True}):
        assert plan != make_plan(MINI, **other)


def test_the_ring_is_as_deep_as_memory_allows() -> None:
    whole = make_plan(NANO, find_target("v7x"), context=256)
    assert whole.tape_is_resident
    assert whole.ring_depth == whole.tape_blocks
    used = sum(whole.vmem_map.values()) - whole.ring_depth * whole.block_bytes
    for blocks in (2, 5, 8):
        small = dataclasses.replace(whole.target, vmem_bytes=math.ceil((used + blocks * whole.block_bytes) / 0.9) + 9)
        plan = make_plan(NANO, small, context=256)
        assert not plan.tape_is_resident
        assert plan.ring_depth == blocks
    small = dataclasses.replace(whole.target, vmem_bytes=math.ceil((used + 30 * whole.block_bytes) / 0.9))
    assert make_plan(NANO, small, context=256).ring_depth == 8  # enough to hide latency


def test_the_block_shape_wastes_least() -> None:
    plan = make_plan(NANO, find_target("v7x"), context=256)
    for block in ((128, 128), (1024, 2048), (1024, 128)):
        other = make_plan(NANO, find_target("v7x"), context=256, block=block, ring_depth=2)
        cost, other_cost = (p.tape_bytes + p.tape_blocks * (256 << 10) for p in (plan, other))
        assert cost <= other_cost


@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
def test_rows_and_slots(rows: int) -> None:
    plan = make_plan(MINI, find_target("v7x"), sequences=rows)
    assert plan.rows == 16  # one tile, whatever the batch: see test_row_invariance
    assert plan.expert_slots <= plan.max_distinct_experts <= MINI.num_experts
    assert plan.max_distinct_experts == min(8, 2 * rows)
    assert make_plan(MINI, CPU, sequences=rows).rows == 16


def test_knobs_beyond_use_are_cut() -> None:
    plan = make_plan(MINI, ring_depth=1000, expert_slots=1000)
    assert plan.ring_depth == plan.tape_blocks
    assert plan.expert_slots == plan.max_distinct_experts


# ---- refusals ----

SMALL = dataclasses.replace(find_target("v7x"), vmem_bytes=2 << 20)
TIGHT = dataclasses.replace(find_target("v7x"), hbm_bytes=8 << 20)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"sequences": 0}, r"sequences = 0; one step carries 1 to 16 rows"),
        ({"sequences": 17}, r"sequences = 17; one step carries 1 to 16 rows: split the batch"),
        ({"sequences": 1.0}, r"sequences = 1.0; expected an integer"),
        ({"sequences": True}, r"sequences = True; expected an integer"),
        ({"context": 0}, r"context = 0; k3-mini has positions 1 to 512"),
        ({"context": 513}, r"context = 513; k3-mini has positions 1 to 512"),
        ({"context": "512"}, r"context = '512'; expected an integer"),
        ({"page": 24}, r"page = 24; expected a positive multiple of 16"),
        ({"page": 0}, r"page = 0; expected a positive multiple of 16"),
        ({"page": -16}, r"page = -16; expected a positive multiple of 16"),
        ({"ring_depth": 0}, r"ring_depth = 0; at least 2 blocks must be in flight"),
        ({"ring_depth": 1}, r"ring_depth = 1; at least 2 blocks must be in flight"),
        ({"expert_slots": 0}, r"expert_slots = 0; at least one expert must be in VMEM"),
        ({"launch_steps": 0}, r"launch_steps = 0; expected 1 or more"),
        ({"launch_steps": 1 << 28}, r"launch_steps = 268435456 of 46 blocks overflow .* lower launch_steps"),
        (
            {"launch_steps": 1 << 22},
            r"needs [\d,.]+ MiB of SMEM, 2.0 MiB may be used .*; lower launch_steps or sequences",
        ),
        ({"block": (128, 100)}, r"block = 128x100; rows must be a multiple of 16, lanes of 128"),
        ({"block": (100, 128)}, r"block = 100x128; rows must be a multiple of 16, lanes of 128"),
        ({"block": (0, 0)}, r"block = 0x0; rows must be"),
        ({"activations": "float16"}, r"activations = 'float16'; expected one of float32, bfloat16"),
        ({"draft_tokens": 2}, r"draft_tokens = 2 without a drafter"),
        (
            {"target": SMALL, "ring_depth": 40},
            r"k3-mini on one core of v7x needs [\d,.]+ MiB of VMEM, 1.8 MiB may be used \(largest: ring, 5.0 MiB\); "
            r"lower ring_depth, expert_slots or sequences",
        ),
        (
            {"target": TIGHT, "sequences": 16},
            r"needs [\d,.]+ MiB of HBM, 8.0 MiB may be used \(largest: \w+, [\d,.]+ MiB\); lower context or sequences",
        ),
    ],
)
def test_refusals_have_the_numbers_and_the_knob(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(MINI, **request_)


@pytest.mark.parametrize(
    ("field", "key"),
    [
        ("hidden_size", "hidden_size"),
        ("kda_head_dim", "linear_attn_config.head_dim"),
        ("qk_nope_head_dim", "qk_nope_head_dim"),
        ("v_head_dim", "v_head_dim"),
        ("kv_lora_rank", "kv_lora_rank"),
        ("routed_expert_hidden_size", "routed_expert_hidden_size"),
    ],
)
def test_sizes_that_a_tpu_cannot_slice_are_refused_by_their_key(field: str, key: str) -> None:
    config = dataclasses.replace(MINI, **{field: 96})
    with pytest.raises(PlanError, match=rf"{re.escape(key)} = 96 is not a multiple of the 128 lanes of v6e"):
        make_plan(config, find_target("v6e"))
    make_plan(config, CPU)


def test_a_convolution_of_one_tap_is_refused() -> None:
    with pytest.raises(PlanError, match=r"short_conv_kernel_size = 1; the kernel needs at least 2"):
        make_plan(dataclasses.replace(MINI, short_conv_kernel_size=1))


def test_unknown_targets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"target 'v4' is not known; known: cpu, v5e, v5p, v6e, v7x"):
        find_target("v4")


def test_the_limits_themselves_are_allowed() -> None:
    limits = {"sequences": (1, 16), "context": (1, 512), "page": (16, 512), "ring_depth": (2,), "launch_steps": (1,)}
    for knob, values in limits.items():
        for value in values:
            assert isinstance(make_plan(MINI, **{knob: value}), Plan)
