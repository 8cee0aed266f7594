"""Ahead-of-time compilation and the reader of the compiler's schedule."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections import Counter

import pytest

from megakernel import find_target, make_plan, memory
from megakernel.aot import AotError, compile_for, launch_arguments, short_reason
from megakernel.phase_bundles import phase_bundles
from megakernel.schedule import Loop, ScheduleError, buffer_numbers, parse_bundles, read_schedule, read_vmem
from megakernel.schedule_names import name_loops
from megakernel.visits import expected_experts, expected_visits
from model.config import ModelConfig

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")

# The form of the compiler's dump, in small: a loop in a loop, a delay slot, and straight code around them.
BUNDLES = """
= control target key start
LH: loop header
LB: loop body
= control target key end

     0   :  { %s1_s0 = inlined_call_operand.hbm [shape: s32[6,8], index: 0, kind: input] }
   0x1   :  { %25 = vsyncpa [#allocation54], 0 } /* Start region 1 */
base_bounds: (1, 1)
   0x2 LB: > { %s28590_s13 = sld [smem:[#allocation39]] } /* Start region 57 */
   0x3   : > { %v691 = vmul.f32 %v26345_v29, %v670_v17  ;;  %25041 = sbr.rel (%p13) target = $region530 }
   0x4   :  {}
   0x5 LB: >> { %v727 = vld [vmem:[#allocation5] sm:$0xff] }
   0x6   : >> { %v728 = vld [vmem:[#allocation5] sm:$0xff] }
   0x7   :  {}
   0x8 PF: > { %p742_p1 = scmp.le.s32.totalorder %s28647_s20, 0 }
   0x9 LB: >> { %v727 = vmatmul }
   0xa   : > { %p742_p1 = scmp.le.s32.totalorder %s28647_s20, 0 }
   0xb   :  { %24880 = shalt.err (%p25682_p8) }
"""
HEAD = "== CAPACTIY:\nMXU, VALU, VLOAD:FILL, VSTORE:SPILL\n    2     4     3     2\n== UTILIZATION:\n"
SLOTS = f"""{HEAD}0 0 0 0
0 0 0 0
1 0 0 0
2 1 0 0
0 0 0 0
0 1 2 0
0 1 0 3
0 0 0 0
0 0 1 1
2 0 0 0
0 0 0 0
0 0 0 0
"""


def test_bundles_fall_into_their_loops():
    program = parse_bundles(BUNDLES, SLOTS)
    assert program == Loop(
        "program",
        bundles=3,
        inner=[
            Loop(
                bundles=5,
                matrix=2,
                spills=1,
                fills=1,
                inner=[Loop(bundles=3, spills=3, fills=2), Loop(bundles=1, matrix=1)],
            )
        ],
    )
    assert program.total == 12


@pytest.mark.parametrize("rows", ["0 0 0 0\n" * 11, "0 0 0 0\n" * 13])
def test_listing_and_table_must_agree(rows):
    with pytest.raises(ScheduleError, match=r"bundles"):
        parse_bundles(BUNDLES, HEAD + rows)


def test_table_without_the_known_columns_is_refused():
    with pytest.raises(ScheduleError, match="VSTORE:SPILL"):
        parse_bundles(BUNDLES, SLOTS.replace("VSTORE:SPILL", "VSTORE"))


def listing(plan):
    """The compiler's list of buffers, from number 2 on."""
    names = [*memory.vmem_buffers(plan), *memory.smem_scratch(plan), *memory.semaphore_counts(plan)]
    lines = (
        f"  #allocation{i} [shape = 's32[1]', space=vmem, tag = 'scratch operand']" for i in range(2, len(names) + 2)
    )
    return "\n".join(["  #allocation1 [shape = 'u32[]', space=vmem, tag = 'internal scratch']", *lines]), names


def dump(folder, counted, plan=None):
    stem = f"{folder}/17-decode_launch.1"
    for name, text in {
        "02-original": listing(plan or make_plan(ModelConfig.preset("k3-mini")))[0],
        "70-schedule-analysis_final_bundles": f"Schedule analysis:\n\ttotal scheduled bundles:    {counted}\n",
        "71-final_bundles": BUNDLES,
        "69-final_hlo-static-per-bundle-utilization": SLOTS,
    }.items():
        with open(f"{stem}-{name}.txt", "w") as file:
            file.write(text)


def test_schedule_is_read_from_the_dump_of_the_kernel(tmp_path):
    dump(tmp_path, counted=12)
    (tmp_path / "17-other.1-71-final_bundles.txt").write_text("")
    program = read_schedule(tmp_path, make_plan(ModelConfig.preset("k3-mini")))
    assert program.total == 12
    assert program.inner[0].name == "round"


def test_schedule_that_contradicts_itself_is_refused(tmp_path):
    dump(tmp_path, counted=13)
    with pytest.raises(ScheduleError, match=r"says 13 bundles, the program has 12"):
        read_schedule(tmp_path, make_plan(ModelConfig.preset("k3-mini")))


def test_folder_without_a_dump_is_refused(tmp_path):
    with pytest.raises(ScheduleError, match=r"expected one file .*decode_launch.*, found 0"):
        read_schedule(tmp_path, make_plan(ModelConfig.preset("k3-mini")))


def test_buffers_have_the_numbers_of_the_kernel_s_order():
    plan = make_plan(ModelConfig.preset("k3-mini"))
    text, names = listing(plan)
    assert buffer_numbers(text, plan) == dict(enumerate(names, start=2))
    with pytest.raises(ScheduleError, match=rf"lists {len(names) - 1} buffers of scratch, the plan {len(names)}"):
        buffer_numbers(text.rpartition("\n")[0], plan)


def test_a_loop_touches_the_buffers_that_its_bundles_name():
    program = parse_bundles(BUNDLES, SLOTS, {5: "ring", 39: "stream", 54: "ring_done"})
    (loop,) = program.inner
    assert program.touches == {"ring_done": 1}
    assert loop.touches == {"stream": 1}
    assert loop.inner[0].touches == {"ring": 2}


def test_vmem_is_read_from_the_compiler_s_report(tmp_path):
    assert read_vmem(tmp_path) is None
    sizes = {"copy.1": (5,), "decode_launch.1": (7, 2)}
    users = {name: {"blocks": [{"block_size": size} for size in found]} for name, found in sizes.items()}
    data = json.dumps({"hlo_breakdowns": users})
    (tmp_path / "1-TLP-85-vmem_report.html").write_text(f"<script>const DATA ={data};</script>")
    assert read_vmem(tmp_path) == 9


def touching(*names, bundles=10, inner=()):
    return Loop(bundles=bundles, inner=list(inner), touches=Counter(names))


def kernel_of_loops():
    """What the compiler makes of the kernel, in small: 32 cores, 2 sequences."""
    send = [touching("pieces_sent", "pieces_received"), touching("two_hops_sent", "two_hops_outbox")]
    first = touching("page_done", "page", "current")
    pages = touching("queries", inner=[touching("page_done", inner=[touching("page"), touching("fresh")])])
    kda = touching("ring", "state", inner=[touching("ring", "out_kda_in"), touching("trial_state"), *send])
    mla = touching("ring", "fresh", inner=[first, pages, touching("ring", "out_mla_out")])
    start = touching("expert_in_done", "chosen_experts")
    visits = touching("expert_sum", "expert_visits", inner=[touching("expert_in_done", inner=[start])])
    experts = touching("expert_sum", "expert_in_done", bundles=70, inner=[touching("expert_in_done"), visits])
    listed = touching("chosen_experts", "expert_visits")
    moe = touching("ring", "expert_sum", inner=[touching("expert_in_done"), listed, experts])
    dense = touching("ring")
    layer = touching("stream", bundles=500, inner=[touching("stream", bundles=6), kda, mla, moe, dense])
    draw = touching("row_logits", inner=[touching("scaled_logits")])
    sampling = touching("row_tokens", "row_logits", inner=[touching("row_logits"), draw])
    round_ = touching("out_head", bundles=200, inner=[layer, touching("ring", "out_head"), sampling, *send[:1]])
    return Loop("program", inner=[touching("current"), round_])


@pytest.fixture(scope="module")
def k3_plan():
    config = ModelConfig.preset("kimi-k3")
    knobs = {"context": 4096, "launch_steps": 256, "expert_slots": 4, "expert_groups": 1}
    return make_plan(config, find_target("v7x"), cores=32, sequences=2, **knobs)


def test_loops_are_named_by_what_they_touch(k3_plan):
    program = kernel_of_loops()
    name_loops(program, k3_plan)
    round_ = program.inner[1]
    layer, _, sampling, send = round_.inner
    _, kda, mla, moe, dense = layer.inner
    assert [loop.name for loop in program.inner] == ["loop", "round"]
    assert [loop.name for loop in round_.inner] == ["layer", "product head", "sampling", "send"]
    assert [loop.name for loop in layer.inner] == ["write snapshot", "KDA", "MLA", "MoE", "dense"]
    assert [loop.name for loop in kda.inner] == ["product kda_in", "token", "send", "send"]
    assert [loop.name for loop in mla.inner] == ["start a page", "sequence", "product mla_out"]
    assert [loop.name for loop in moe.inner] == ["start an expert", "find an expert", "experts"]
    first_start, visits = moe.inner[2].inner
    assert first_start.name == "start an expert"
    assert [loop.name for _, loop in visits.walk()] == ["expert", "next expert", "start an expert"]
    assert sampling.inner[1].name == "draw (if sampled)"
    assert send.turns == 31
    assert dense.turns == pytest.approx(1 / 93)


def test_loops_turn_as_often_as_the_plan_says(k3_plan):
    program = kernel_of_loops()
    name_loops(program, k3_plan)
    layer = program.inner[1].inner[0]
    snapshot, kda, mla, moe, _ = layer.inner
    experts = expected_experts(k3_plan)
    assert 31 < experts <= 32
    assert layer.turns * kda.turns == pytest.approx(69)
    assert layer.turns * moe.turns == pytest.approx(92)
    assert layer.turns * snapshot.turns == pytest.approx(8)
    first, sequence, _ = mla.inner
    page = sequence.inner[0]
    assert (first.turns, sequence.turns, page.turns) == (8, 2, 17)
    assert [inner.turns for inner in page.inner] == [1 - 8 / 34, 1 / 17]
    assert [loop.turns for loop in moe.inner] == pytest.approx([4, experts - 4, 1])
    first_start, visits = moe.inner[2].inner
    (next_expert,) = visits.inner
    assert first_start.turns == 0
    assert visits.turns == pytest.approx(expected_visits(k3_plan) - 1) == pytest.approx(31, rel=0.01)
    assert next_expert.turns * expected_visits(k3_plan) == pytest.approx(experts)
    assert next_expert.inner[0].turns * experts == pytest.approx(experts - 4)
    assert layer.executed == pytest.approx(500 + sum(loop.turns * loop.executed for loop in layer.inner))


def test_phases_add_up_to_the_round(k3_plan):
    program = kernel_of_loops()
    name_loops(program, k3_plan)
    found = phase_bundles(program)
    assert sum(found.values()) == pytest.approx(program.inner[1].executed)
    assert found["ends of a step"] == 200
    assert found["between sublayers"] == pytest.approx(93 * 500 + 8 * 6)
    experts = program.inner[1].inner[0].inner[3].inner[2]
    assert 92 * (70 + 30 * 10) < found["experts"] == pytest.approx(92 * experts.executed)


def test_experts_that_meet_all_rows_are_one_loop():
    plan = make_plan(ModelConfig.preset("k3-mini"), sequences=2, expert_slots=2)
    assert (plan.experts_held, plan.expert_tiles) == (1, 1)
    experts = touching("expert_sum", "expert_in_done", inner=[touching("expert_in_done")])
    layer = touching("stream", inner=[touching("trial_state"), touching("fresh"), touching("ring", inner=[experts])])
    name_loops(Loop("program", inner=[Loop(bundles=9, inner=[layer])]), plan)
    assert (experts.name, experts.inner[0].name) == ("expert", "start an expert")
    assert experts.turns == expected_experts(plan) == expected_visits(plan)
    assert experts.turns * experts.inner[0].turns == pytest.approx(expected_experts(plan) - 2)


def test_loops_of_another_shape_stay_unnamed():
    plan = make_plan(ModelConfig.preset("k3-mini"))
    program = Loop("program", inner=[Loop(bundles=20, inner=[Loop(bundles=9, inner=[Loop(), Loop()])])])
    name_loops(program, plan)
    assert {loop.name for _, loop in program.walk()} == {"program", "round", "loop"}


def test_target_without_a_compiler_is_refused():
    with pytest.raises(AotError, match="choose one of v5e, v5p, v6e, v7x"):
        compile_for(make_plan(ModelConfig.preset("k3-mini")))


def test_missing_libtpu_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AotError, match=r'pip install "one-launch\[tpu\]"'):
        compile_for(make_plan(ModelConfig.preset("k3-mini"), find_target("v7x")))


def test_short_reason_keeps_what_matters():
    message = (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 125.00M of 64.00M vmem.\n\n"
        "  Largest program allocations in vmem:\n\n  1. Size: 71.26M\n     XLA label: register allocator spill slots\n"
        "     ====\n  2. Size: 10.00M\n"
    )
    assert short_reason(message) == (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 125.00M of 64.00M vmem. "
        "Largest: Size: 71.26M, XLA label: register allocator spill slots"
    )
    assert len(short_reason("x" * 5000)) == 600
    assert short_reason("E1001: Oom:\nno room\nat all") == "E1001: Oom: no room"


def test_launch_arguments_have_the_sizes_of_the_plan():
    plan = make_plan(ModelConfig.preset("k3-mini"), sequences=3)
    weights, caches, request = launch_arguments(plan)
    assert weights["tape"].shape == (plan.tape_blocks, plan.block_rows, plan.block_lanes)
    assert caches["latents"].shape[1] == 3
    assert request["tokens"].shape == (3, plan.launch_steps)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("sequences", [1, 8])
def test_compiler_s_figures_agree_with_the_plan(sequences):
    plan = make_plan(ModelConfig.preset("k3-mini"), find_target("v7x"), sequences=sequences)
    report = compile_for(plan, schedule=True)
    arguments = launch_arguments(plan)
    least = sum(buffer.size * buffer.dtype.itemsize for group in arguments for buffer in group.values())
    caches = sum(buffer.size * buffer.dtype.itemsize for buffer in arguments[1].values())
    assert least <= report.argument_bytes <= 1.1 * least
    assert caches <= report.alias_bytes <= 1.1 * caches
    assert report.vmem_planned == sum(plan.vmem_map.values()) < report.vmem_limit
    assert report.schedule is not None
    names = {loop.name: loop for _, loop in report.schedule.walk()}
    assert {"round", "layer", "write snapshot", "KDA", "MLA", "MoE", "dense", "expert"} <= set(names)
    assert sum(phase_bundles(report.schedule).values()) == pytest.approx(names["round"].executed)
    assert report.vmem_compiled is not None
    assert 0.5 * report.vmem_planned < report.vmem_compiled < report.vmem_limit
    assert names["KDA"].matrix > 0
    assert names["write snapshot"].matrix == 0


@needs_libtpu
@pytest.mark.slow
def test_what_the_compiler_refuses_is_an_error_with_its_words():
    plan = make_plan(ModelConfig.preset("k3-mini"), find_target("v7x"))
    small = dataclasses.replace(plan, target=dataclasses.replace(plan.target, vmem_bytes=1 << 20))
    with pytest.raises(AotError, match=r"k3-mini on v7x: the TPU compiler refused it: .*vmem"):
        compile_for(small)
