"""The plan against the kernel that is built from it, the packer against the tensors it packs, and every refusal."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
from launching import DATA, launch_jaxpr, pallas_calls

from megakernel import Plan, PlanError, find_target, layers, make_plan, program
from megakernel.kernel import layer_table
from megakernel.memory import weight_buffers
from megakernel.plan import MAX_ROWS
from megakernel.program import Matrix
from megakernel.target import CPU
from model.config import ModelConfig

MINI, NANO = ModelConfig.preset("k3-mini"), ModelConfig.preset("k3-nano")
TINY, KLINEAR = ModelConfig.from_file(DATA / "tiny_stable_mxfp4"), ModelConfig.from_file(DATA / "klinear_config.json")
WIDE = dataclasses.replace(MINI, name="wide", kv_lora_rank=320, num_attention_heads=3)
MODELS = {"k3-mini": MINI, "k3-nano": NANO, "tiny": TINY, "klinear": KLINEAR, "wide": WIDE}
"""The last one has several panels in each group of its block-diagonal products, the last of them not full."""


# ---- maps: what the plan counts is what the kernel allocates ----


def allocated(plan: Plan) -> dict[str, list[Any]]:
    """Shapes and types of every buffer of the traced kernel by memory; an array updated in place counts once."""
    (call,) = pallas_calls(launch_jaxpr(plan, interpret=False).jaxpr)
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
        ("k3-nano", "v7x", {"cores": 4, "sequences": 3, "context": 256}),
        ("klinear", "cpu", {"cores": 2, "context": 128}),
    ],
)
def test_maps_are_what_the_kernel_allocates(name: str, target: str, knobs: dict[str, Any]) -> None:
    plan = make_plan(MODELS[name], find_target(target), **knobs)
    found = allocated(plan)
    assert sum(plan.vmem_map.values()) == sum(map(padded_bytes, found["vmem"]))
    smem = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in found["smem"])
    assert sum(plan.smem_map.values()) == smem
    assert sum(plan.hbm_map.values()) == sum(map(padded_bytes, found["any"]))


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


# ---- the tape ----


def test_the_kernel_takes_products_in_the_order_of_the_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    """As traced: KDA, MLA, MoE and dense branch each once, then the head; first blocks come from the layer table."""
    taken: list[str] = []
    linear = layers.linear

    def noting(plan: Plan, tape: Any, section: Any, x: Any, matrix: Matrix, *buffers: Any) -> Any:
        taken.append(matrix.name)
        return linear(plan, tape, section, x, matrix, *buffers)

    monkeypatch.setattr(layers, "linear", noting)
    for config in (MINI, KLINEAR):
        taken.clear()
        plan = make_plan(config, context=64)
        launch_jaxpr(plan)
        branches = (plan.sections[section] for section in ("kda", "mla", "moe", "dense", "head"))
        once = list(dict.fromkeys(taken))
        assert once == [matrix.name for branch in branches for matrix in branch]
        table = np.asarray(layer_table(plan))
        assert [tuple(row) for row in table[:, :2].tolist()] == list(plan.layer_starts[:-1])


@pytest.mark.parametrize("name", MODELS)
def test_every_sublayer_begins_with_a_block(name: str) -> None:
    """Attention and FFN of every layer in turn, each as long as its kind, then the head to the end of the tape."""
    plan, config = make_plan(MODELS[name], context=64), MODELS[name]
    block = 0
    for layer, (attention, ffn) in enumerate(plan.layer_starts[:-1]):
        assert attention == block
        assert ffn == attention + plan.section_blocks(config.layer_kind(layer))
        block = ffn + plan.section_blocks("moe" if config.is_moe(layer) else "dense")
    assert plan.layer_starts[-1] == (block, block)
    assert plan.draft_start == plan.tape_blocks == block + plan.section_blocks("head")
    assert set(plan.tilings) == set(plan.matrices)
    for section, matrices in plan.sections.items():
        assert plan.tilings[matrices[0].name].panels[0].cuts[0].block == 0
        assert plan.tilings[matrices[-1].name].panels[-1].cuts[-1].block == plan.section_blocks(section) - 1


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
    for blocks in (2, 5, 8, 30):
        plan = with_room_for(blocks)
        assert not plan.tape_is_resident
        assert plan.ring_depth == blocks
    deepest = with_room_for(100, block=(128, 128))
    assert deepest.tape_blocks > 100
    assert deepest.ring_depth == 64  # enough to hide latency


def with_room_for(blocks: int, **knobs: Any) -> Plan:
    """k3-nano on a machine whose VMEM holds so many blocks beside everything else."""
    request: dict[str, Any] = {"context": 256, "expert_slots": 4, **knobs}
    least = make_plan(NANO, find_target("v7x"), **request, ring_depth=2)
    needed = sum(least.vmem_map.values()) + (blocks - 2) * least.block_bytes
    return make_plan(NANO, dataclasses.replace(least.target, vmem_bytes=math.ceil(needed / 0.9) + 9), **request)


def test_experts_take_at_most_a_quarter_of_vmem() -> None:
    config = dataclasses.replace(NANO, moe_intermediate_size=1024)
    request: dict[str, Any] = {"context": 256, "sequences": 16, "ring_depth": 2}
    one = make_plan(config, **request, expert_slots=1)
    assert one.max_distinct_experts == 32
    for slots in (16, 31, 40):
        small = dataclasses.replace(CPU, vmem_bytes=4 * slots * one.expert_bytes + 9)
        assert make_plan(config, small, **request).expert_slots == min(slots, 32)


def test_the_block_shape_wastes_least() -> None:
    plan = make_plan(NANO, find_target("v7x"), context=256)
    for block in ((128, 128), (1024, 2048), (1024, 128), (256, 256), (512, 512)):
        other = make_plan(NANO, find_target("v7x"), context=256, block=block, ring_depth=2)
        cost, other_cost = (p.tape_bytes + p.tape_blocks * (8 << 10) + cuts_of(p) * (1 << 10) for p in (plan, other))
        assert cost <= other_cost


def cuts_of(plan: Plan) -> int:
    """Pieces of panels that one step multiplies by."""
    cuts = {s: sum(plan.tilings[m.name].cuts for m in matrices) for s, matrices in plan.sections.items()}
    return sum(cuts[section] for section in program.section_order(plan.config))


@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
def test_rows_and_slots(rows: int) -> None:
    plan = make_plan(MINI, find_target("v7x"), sequences=rows)
    assert plan.rows == (8 if rows <= 8 else 16)  # a tile, whatever the batch: see test_row_invariance
    assert plan.expert_slots <= plan.max_distinct_experts <= MINI.num_experts
    assert plan.max_distinct_experts == min(8, 2 * rows)
    assert make_plan(MINI, CPU, sequences=rows).rows == 16


def test_pages_in_flight_take_little_of_vmem() -> None:
    """Eight of 160 KiB; of large ones two, and where those do not fit the refusal names the page."""
    k3, v7x = ModelConfig.preset("kimi-k3"), find_target("v7x")

    def of(page: int) -> Plan:
        return make_plan(k3, v7x, cores=32, context=65536, launch_steps=4096, page=page)

    assert [of(page).page_windows for page in (128, 512, 4096)] == [8, 3, 2]
    assert of(4096).ring_depth == of(128).ring_depth == 64
    assert [of(128).pages(position) for position in (0, 127, 128)] == [1, 1, 2]
    with pytest.raises(
        PlanError, match=r"largest: page, 40.0 MiB\); lower expert_slots = 15 or page = 16384, or use more"
    ):
        of(16384)


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
        ({"sequences": 0}, r"sequences = 0; one step carries 1 to 16 rows$"),
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
        ({"launch_steps": 1 << 28}, r"launch_steps = 268435456 of 33 blocks overflow .* lower launch_steps"),
        (
            {"launch_steps": 1 << 22},
            r"needs [\d,.]+ MiB of SMEM, 2.0 MiB may be used .*; lower launch_steps = 4194304$",
        ),
        ({"block": (128, 100)}, r"block = 128x100; rows and lanes must be positive multiples of 128"),
        ({"block": (144, 128)}, r"block = 144x128; rows and lanes must be positive multiples of 128"),
        ({"block": (0, 0)}, r"block = 0x0; rows and lanes must be"),
        ({"block": (-128, -128)}, r"block = -128x-128; rows and lanes must be"),
        ({"activations": "float16"}, r"activations = 'float16'; expected one of float32, bfloat16"),
        ({"draft_tokens": 2}, r"draft_tokens = 2 without a drafter"),
        (
            {"target": SMALL, "ring_depth": 40},
            r"k3-mini on one core of v7x needs [\d,.]+ MiB of VMEM, 1.8 MiB may be used \(largest: ring, 4.1 MiB\); "
            r"lower ring_depth = 33 or expert_slots = 2, or use more cores than 1",
        ),
        (
            {"target": SMALL, "ring_depth": 40, "cores": 2},
            r"k3-mini on one of 2 cores of v7x needs [\d,.]+ MiB of VMEM, .*, or use more cores than 2",
        ),
        (
            {"target": TIGHT, "sequences": 16},
            r"needs [\d,.]+ MiB of HBM, 8.0 MiB may be used \(largest: \w+, [\d,.]+ MiB\); "
            r"lower context = 512 or sequences = 16, or use more cores than 1",
        ),
    ],
)
def test_refusals_have_the_numbers_and_the_knob(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(MINI, **request_)


def test_a_model_that_no_context_helps_says_how_many_cores() -> None:
    k3 = ModelConfig.preset("kimi-k3")
    with pytest.raises(PlanError, match=r"98,228.5 MiB may be used .*; use more cores: the weights alone fill 16$"):
        make_plan(k3, find_target("v7x"))
    with pytest.raises(PlanError, match=r"in 3 groups: .*; expert_groups may be 1 or 2 or 4 or 8 or 16 or 32$"):
        make_plan(k3, find_target("v7x"), cores=32, expert_groups=3)
    assert make_plan(k3, find_target("v7x"), cores=32, context=1 << 17).launch_steps == 4096


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
