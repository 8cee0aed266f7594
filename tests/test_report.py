"""The text of a plan: every number in it comes from the plan."""

from __future__ import annotations

import re

import pytest

from megakernel import find_target, make_plan
from megakernel.aot import AotReport
from megakernel.report import (
    busiest_weight_bytes,
    duration,
    even_weight_bytes,
    machine_name,
    plan_text,
    size,
)
from megakernel.schedule import Loop
from megakernel.split import Split, split_choices
from model.config import ModelConfig

NANO = ModelConfig.preset("k3-nano")


def test_sizes_and_durations_read_well():
    assert [size(n) for n in (0, 1023, 1536, 5 << 20, 3 << 30, 7 << 40)] == [
        "0 B", "1,023 B", "1.5 KiB", "5.0 MiB", "3.0 GiB", "7.0 TiB",
    ]  # fmt: skip
    assert [duration(s) for s in (2.5, 0.0123, 1.43e-6)] == ["2.50 s", "12.30 ms", "1.43 us"]


def test_plan_prints_itself():
    plan = make_plan(NANO, find_target("v7x"))
    assert str(plan) == plan_text(plan)
    assert "60 blocks of 384 x 256 bf16 (192.0 KiB), 11.2 MiB" in str(plan)
    assert "resident: all 60 blocks fit" in str(plan)
    assert "5 MoE" in str(plan)


def test_fill_is_the_share_of_weights_on_the_tape():
    plan = make_plan(NANO, find_target("v7x"))
    share = plan.tape_parameters * 2 / plan.tape_bytes
    assert f"{share:.1%} filled with weights" in plan_text(plan)
    quarter = make_plan(NANO, find_target("v7x"), cores=4)
    share = quarter.tape_parameters * 2 / (4 * quarter.tape_bytes)
    assert f"{share:.1%} filled with weights" in plan_text(quarter)


@pytest.mark.parametrize("memory", ["VMEM", "SMEM", "HBM"])
def test_maps_list_all_bytes(memory):
    plan = make_plan(NANO, find_target("v5p"), sequences=4)
    section = plan_text(plan).split(f"{memory}: ")[1].split("\n\n")[0].splitlines()
    shares = [float(re.search(r"([\d.]+)%", line)[1]) for line in section[1:]]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    used = {"VMEM": plan.vmem_map, "SMEM": plan.smem_map, "HBM": plan.hbm_map}[memory]
    assert section[0].startswith(f"{size(sum(used.values()))} of ")
    assert next(iter(re.findall(r"^  (\S+)", section[1]))) == max(used, key=used.get)


def test_a_plan_says_how_its_ring_streams_and_leaves_times_to_the_prediction():
    text = plan_text(make_plan(NANO, find_target("v6e"), ring_depth=4, sequences=2))
    assert "streamed: 4 blocks in flight" in text
    assert "tokens/s" not in text
    assert "Floor" not in text


def test_one_core_says_nothing_of_divisions():
    text = plan_text(make_plan(NANO, find_target("v7x")))
    assert text.startswith("k3-nano on one core of v7x\n")
    assert "Division" not in text
    assert "exchanges" not in text


def test_divisions_of_the_experts_are_compared():
    plan = make_plan(NANO, find_target("v7x"), cores=4)
    text = plan_text(plan)
    assert text.startswith("k3-nano on one of 4 cores of v7x\n")
    rows = re.findall(r"^  (\d+) x (\d+) +([\d. ]+?)(  chosen)?$", text, re.MULTILINE)
    assert [int(groups) for groups, *_ in rows] == [split.expert_groups for split in split_choices(NANO, 4)]
    for groups, parts, loads, chosen in rows:
        split = Split(NANO, 4, int(groups))
        assert int(parts) == split.expert_parts
        assert loads.split() == [f"{split.expected_load(n):.3f}" for n in (1, 2, 4, 8)]
        assert bool(chosen) == (split == plan.split)


@pytest.mark.parametrize("cores", [1, 2, 4])
def test_the_busiest_core_reads_more_than_an_even_share(cores):
    """Counted anew: tape and expected experts, against all weights of one token over the cores."""
    plan = make_plan(NANO, find_target("v7x"), cores=cores)
    entries = 3 * NANO.routed_expert_hidden_size * NANO.moe_intermediate_size
    one_expert = entries // 2 + entries // 32
    even = (2 * plan.tape_parameters + 5 * 4 * one_expert) / cores
    assert even_weight_bytes(plan) == pytest.approx(even)
    experts = 5 * plan.split.expected_load(1) * plan.split.expert_parts * plan.expert_bytes
    assert busiest_weight_bytes(plan) == pytest.approx(plan.tape_bytes + experts)
    assert f"{size(plan.tape_bytes + experts)}, " in plan_text(plan)
    assert f" times the {size(even)} of an even division" in plan_text(plan)


def test_cpu_has_no_predicted_time():
    assert "No predicted time: cpu has no memory bandwidth" in plan_text(make_plan(NANO))


def test_report_of_the_compiler_names_its_loops():
    program = Loop("program", bundles=10, inner=[Loop("round", bundles=1234, matrix=56, spills=7, fills=8)])
    report = AotReport(
        model="k3-nano", target="v7x", topology="tpu7x:2x2x1", cores=8, jax_version="0",
        lower_seconds=1.0, compile_seconds=2.0, vmem_planned=3 << 20,
        vmem_limit=64 << 20, hbm_arguments={}, argument_bytes=5 << 20, output_bytes=0, alias_bytes=1 << 20,
        temp_bytes=0, code_bytes=1024, vmem_compiled=4 << 20, schedule=program,
    )  # fmt: skip
    text = str(report)
    assert "Compiled for 8 cores of tpu7x:2x2x1 by the TPU compiler" in text
    assert "3.0 MiB planned of 64.0 MiB, 4.0 MiB allocated by the compiler" in text
    assert re.search(r"round +1,234 +1,234 +56 +7 +8", text)


def test_machine_has_a_name():
    assert re.search(r"\S+, \d+ cores?$|TPU", machine_name())
