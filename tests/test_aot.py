"""The launch through the real TPU compiler, for every generation, without a TPU."""

from __future__ import annotations

import dataclasses

import pytest
from launching import DATA

from megakernel import PlanError, make_plan
from megakernel.aot import AotReport, compile_for
from megakernel.phase_bundles import phase_bundles
from megakernel.plan import Plan
from megakernel.target import TARGETS, find_target
from megakernel.topology import find_machine
from model.config import ModelConfig

GENERATIONS = [name for name, target in TARGETS.items() if target.topology]


@pytest.mark.slow
@pytest.mark.parametrize("target", GENERATIONS)
@pytest.mark.parametrize(("sequences", "ring_depth"), [(1, None), (16, 3)])
def test_k3_nano_compiles_for_one_core(
    target: str, sequences: int, ring_depth: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(
        ModelConfig.preset("k3-nano"),
        find_target(target),
        sequences=sequences,
        context=1024,
        ring_depth=ring_depth,
    )
    assert plan.tape_is_resident == (ring_depth is None)
    report = compile_for(plan)
    used = sum(plan.vmem_map.values())
    with capsys.disabled():
        print(f"\nk3-nano on {target}, {sequences} sequences: VMEM {used / 2**20:.1f} MiB planned; {report}")
    assert used <= 0.9 * plan.target.vmem_bytes


@pytest.mark.slow
@pytest.mark.parametrize("penalties", [False, True])
def test_a_vocabulary_of_real_size_compiles(penalties: bool) -> None:
    """163,840 tokens: a value of that size would be spilled whole, and once was."""
    plan = make_plan(
        ModelConfig.preset("kimi-linear-48b"), find_target("v7x"), context=1024, expert_slots=1, penalties=penalties
    )
    report = compile_for(plan, schedule=True)
    assert report.schedule is not None
    (draw,) = (loop for _, loop in report.schedule.walk() if loop.name == "draw (if sampled)")
    assert max(loop.spills for _, loop in draw.walk()) < 100


@pytest.mark.slow
def test_folded_panels_with_empty_shares_compile() -> None:
    """A block may cut a folded panel whose last share ends above the cut; the compiler knows no empty array."""
    config = dataclasses.replace(ModelConfig.preset("k3-mini"), name="wide", hidden_size=384)
    plan = make_plan(config, find_target("v7x"), context=64)
    empty = [
        part * sum(cut.rows for cut in panel.cuts) + cut.k >= tiling.k_padded
        for tiling in plan.tilings.values()
        for panel in tiling.panels
        for part in range(1, -(-tiling.k_padded // sum(cut.rows for cut in panel.cuts)))
        for cut in panel.cuts
    ]
    assert any(empty)
    compile_for(plan)


def on_machine(model: str, machine: str, cores: int | None = None, **knobs: int) -> Plan:
    target, found = find_machine(machine, cores)
    return make_plan(ModelConfig.preset(model), target, cores=found, launch_steps=256, **knobs)


def compiled_within_vmem(plan: Plan, capsys: pytest.CaptureFixture[str]) -> AotReport:
    report = compile_for(plan, schedule=True)
    with capsys.disabled():
        print(f"\n{plan.config.name}, {plan.sequences} sequences: {report}")
    assert report.cores == plan.split.cores
    assert report.vmem_compiled is not None
    assert report.vmem_compiled <= report.vmem_limit == plan.target.vmem_bytes
    assert report.argument_bytes <= plan.target.hbm_bytes
    assert report.schedule is not None
    assert sum(phase_bundles(report.schedule).values()) == pytest.approx(
        next(loop for loop in report.schedule.inner if loop.name == "round").executed
    )
    return report


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["tpu7x:1x1x1", "tpu7x:2x2x1"])
def test_k3_nano_compiles_for_several_cores(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    compiled_within_vmem(on_machine("k3-nano", machine, context=1024), capsys)


@pytest.mark.slow
def test_pieces_that_fill_no_tile_compile(capsys: pytest.CaptureFixture[str]) -> None:
    """On eight cores 48 experts, which travel in three parts and cross a tile, 112 columns of latents, and as the
    low-rank vector 80: each in several panels of one tile."""
    nano = ModelConfig.preset("k3-nano")
    sizes = {"hidden_size": 2048, "num_experts": 384, "routed_expert_hidden_size": 896, "kv_lora_rank": 384}
    target, cores = find_machine("tpu7x:2x2x1", None)
    plan = make_plan(dataclasses.replace(nano, name="odd", **sizes), target, cores=cores, context=256)
    split = plan.split
    assert (cores, split.piece(384), split.piece(896), split.piece(split.low_width)) == (8, 48, 112, 80)
    assert all(len(plan.tilings[name].panels) > 1 for name in ("router", "mla_low"))
    compiled_within_vmem(plan, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["tpu7x:1x1x1", "v6e:2x2", "v5p:2x2x1"])
def test_kimi_linear_compiles_for_one_host(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    compiled_within_vmem(on_machine("kimi-linear-48b", machine, context=4096), capsys)


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [1, 8])
def test_kimi_k3_compiles_for_sixteen_chips(sequences: int, capsys: pytest.CaptureFixture[str]) -> None:
    report = compiled_within_vmem(on_machine("kimi-k3", "tpu7x:4x4x1", sequences=sequences, context=4096), capsys)
    assert report.topology == "tpu7x:4x4x1"
    assert report.vmem_limit == 64 << 20
    phases = phase_bundles(report.schedule) if report.schedule else {}
    assert {"KDA", "MLA", "dense", "MoE", "experts", "LM head", "sampling"} <= set(phases)


@pytest.mark.slow
def test_the_program_does_not_grow_with_layers(capsys: pytest.CaptureFixture[str]) -> None:
    """93 layers compile to as many bundles as 24 with as many snapshots, so in the same time."""
    whole = on_machine("kimi-k3", "tpu7x:4x4x1", context=4096, ring_depth=16)
    layers = 24
    config = dataclasses.replace(
        whole.config,
        num_hidden_layers=layers,
        mla_layers=tuple(i for i in whole.config.mla_layers if i < layers),
        attn_res_block_size=3,
    )
    assert config.num_snapshots == whole.config.num_snapshots
    part = make_plan(config, whole.target, cores=32, launch_steps=256, context=4096, ring_depth=16)
    block = {"block_rows": whole.block_rows, "block_lanes": whole.block_lanes}
    part = dataclasses.replace(part, expert_slots=whole.expert_slots, **block)
    reports = [compiled_within_vmem(plan, capsys) for plan in (part, whole)]
    totals = [report.schedule.total for report in reports if report.schedule]
    assert totals[1] == pytest.approx(totals[0], rel=0.03)


def test_a_model_with_narrow_heads_is_refused_for_a_tpu_with_the_reason() -> None:
    config = ModelConfig.from_file(DATA / "tiny_stable_mxfp4")
    with pytest.raises(PlanError, match=r"linear_attn_config.head_dim = 32 is not a multiple of the 128 lanes of v7x"):
        make_plan(config, find_target("v7x"))


@pytest.mark.parametrize("target", GENERATIONS)
def test_a_model_that_is_too_large_is_refused_with_the_numbers(target: str) -> None:
    with pytest.raises(
        PlanError, match=r"kimi-k3 on one core of \w+ needs [\d,.]+ MiB of (VMEM|HBM), [\d,.]+ MiB may be used"
    ):
        make_plan(ModelConfig.preset("kimi-k3"), find_target(target))
