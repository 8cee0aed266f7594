"""The timeline against the kernel's own order, the ring's rules, and the picture."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections import defaultdict

import pytest
from launching import launch_jaxpr

from megakernel import find_target, kernel, layers, make_plan, stream
from megakernel.__main__ import main
from megakernel.draw import COLOURS, DrawingError, draw_plan, tape_segments, vmem_groups
from megakernel.phases import experts, kda, mla, route
from megakernel.timeline import copies_of, layer_boundary, round_boundary, work_of
from model.config import ModelConfig
from spec_decode import NGramDrafter

MINI = ModelConfig.preset("k3-mini")
LINEAR = dataclasses.replace(  # the other family: low-rank gate, no query compression, no latent experts
    ModelConfig.preset("kimi-linear-48b"), vocab_size=512, hidden_size=256, intermediate_size=512,
    num_hidden_layers=5, mla_layers=(3,), num_experts=16, num_experts_per_token=4, moe_intermediate_size=128,
    routed_expert_hidden_size=256, num_attention_heads=2, kv_lora_rank=128, kda_num_heads=2,
)  # fmt: skip
STREAMED = make_plan(MINI, ring_depth=4, sequences=2, context=64)
PLANS = {
    "streamed": STREAMED,
    "resident": make_plan(MINI),
    "linear": make_plan(LINEAR, ring_depth=3, context=64),
    "drafted": make_plan(MINI, ring_depth=4, context=64, drafter=NGramDrafter(), draft_tokens=3),
    "one of four": make_plan(MINI, cores=4, ring_depth=3, context=64),
    "nano": make_plan(ModelConfig.preset("k3-nano"), find_target("v7x"), ring_depth=8, sequences=8),
}


def recorded_order(plan, monkeypatch) -> dict[str, list[str]]:
    """What the kernel does, in order, for each kind of sublayer, taken from the functions that it calls."""
    events: dict[str, list[str]] = defaultdict(list)
    current = ["none"]

    def record(owner, name, text):
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args, **kwargs):
            events[current[0]].append(text(*args) if callable(text) else text)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    def sublayer(name):
        original = getattr(layers, name)

        def call(*args):
            outside, current[0] = current[0], name if name not in events else "again"
            result = original(*args)
            current[0] = outside
            return result

        monkeypatch.setattr(layers, name, call)

    lane = {"tails": "conv tails", "state": "KDA state", "pending": "replay rows"}
    names: dict[int, str] = {}
    opened = kernel._open_streams

    def open_streams(plan, refs):
        step = opened(plan, refs)
        names.update({id(getattr(step, name)): lane[name] for name in lane})
        return step

    monkeypatch.setattr(kernel, "_open_streams", open_streams)
    record(layers, "linear", lambda *args: args[4].name)
    for method, kind in {"start_read": "read of", "wait_read": "wait for", "start_write": "write of"}.items():
        record(stream.Window, method, lambda window, *_, kind=kind: f"{kind} {names[id(window)]}")
        record(stream.LatentGroups, method, f"{kind} MLA tile")
    record(stream.Experts, "start", "read of experts")
    record(stream.Tape, "wait", "wait for ring")
    record(stream.Tape, "give_back", "read of ring")
    record(route, "expert_weights", "route")
    record(layers, "commit_pending", "replay")
    record(kda, "short_convolution", "convolution")
    record(kda, "store_rows", "recurrence")
    record(mla, "attend", "attention")
    record(experts, "run_experts", "experts")
    for name in ("kda_attention", "mla_attention", "moe_ffn", "dense_ffn"):
        sublayer(name)
    launch_jaxpr(plan)
    return events


KDA = {"kda_narrow", "kda_in", "kda_decay", "kda_gate", "replay", "convolution", "recurrence", "kda_out"}
MLA = {"mla_low", "mla_in", "mla_query", "mla_absorb", "attention", "mla_value", "mla_out"}
MOE = {"router", "shared_in", "route", "shared_out", "experts", "routed_up"}
DENSE = {"dense_in", "dense_out"}


def sublayer_of(work, wanted: set[str]) -> list[int]:
    """Indices of the sublayer of the second round that does work of the names in `wanted`."""
    first = next(i for i, item in enumerate(work) if item.round == 1 and item.name in wanted)
    indices = [first]
    while work[indices[-1] + 1].name in wanted and work[indices[-1] + 1].layer == work[first].layer:
        indices.append(indices[-1] + 1)
    return indices


def drawn_order(plan, wanted: set[str]) -> list[str]:
    """The same from the timeline."""
    work = work_of(plan, rounds=2)
    starts, ends = defaultdict(list), defaultdict(list)
    for copy in copies_of(plan, work):
        kind = "read of" if copy.kind == "read" else "write of"
        starts[copy.start].append(f"{kind} {copy.lane}")
        if copy.kind == "read":
            ends[copy.end].append(f"wait for {copy.lane}")
    order: list[str] = []
    for i in sublayer_of(work, wanted):
        order += [*ends[i], *starts[i], work[i].name]
    return order


def drawn_ring(plan, wanted: set[str]) -> list[str]:
    """Matrix by matrix the blocks that are waited for and given back, from the copies of the timeline."""
    work = work_of(plan, rounds=2)
    ring = [copy for copy in copies_of(plan, work) if copy.lane == "ring"]
    order: list[str] = []
    for i in sublayer_of(work, wanted):
        if work[i].block is not None:
            order += [work[i].name] if work[i - 1].name != work[i].name else []
            order += ["wait for ring" for copy in ring if copy.end == i]
            order += ["read of ring" for copy in ring if copy.start == i + 1]
    return order


def without(order: list[str], *lanes: str) -> list[str]:
    return [entry for entry in order if not any(entry.endswith(f" {lane}") for lane in lanes)]


def in_place(order: list[str]) -> list[frozenset[str] | str]:
    """Work in order; what happens between two pieces of work, as a set."""
    result: list[frozenset[str] | str] = []
    between: set[str] = set()
    for entry in order:
        if " " in entry and entry.split()[0] in ("read", "wait", "write"):
            between.add(entry)
        elif between or result[-1:] != [entry]:  # the blocks of one matrix are one piece
            result += [frozenset(between), entry]
            between = set()
    return result


@pytest.mark.parametrize("name", ["streamed", "linear", "drafted"])
def test_timeline_has_the_order_of_the_kernel(name, monkeypatch):
    plan = PLANS[name]
    recorded = recorded_order(plan, monkeypatch)
    others = ("ring", "vectors", "MLA pages", "embedding")

    def drawn(names):
        return in_place(without(drawn_order(plan, names), *others))

    def done(sublayer):
        return in_place(without(recorded[sublayer], "ring"))

    assert drawn(KDA) == done("kda_attention")
    assert drawn(MLA) == done("mla_attention")
    assert drawn(DENSE) == done("dense_ffn")
    moe_drawn, moe_recorded = drawn(MOE), done("moe_ffn")
    assert [e for e in moe_drawn if isinstance(e, str)] == [e for e in moe_recorded if isinstance(e, str)]
    for order in (moe_drawn, moe_recorded):
        assert order[order.index("route") + 1] - {"wait for experts"} == {"read of experts"}


@pytest.mark.parametrize("name", ["streamed", "linear", "drafted"])
def test_ring_is_used_as_drawn(name, monkeypatch):
    """Which matrix waits for a block and which one gives it back, as the kernel is traced."""
    plan = PLANS[name]
    recorded = recorded_order(plan, monkeypatch)
    looped = {name for name, tiling in plan.tilings.items() if tiling.cuts > 16}
    assert looped <= {"head"}  # a loop is traced once: see test_linear
    for names, sublayer in ((KDA, "kda_attention"), (MLA, "mla_attention"), (MOE, "moe_ffn"), (DENSE, "dense_ffn")):
        wanted = {*plan.matrices, "wait for ring", "read of ring"}
        assert drawn_ring(plan, names) == [event for event in recorded[sublayer] if event in wanted]


@pytest.mark.parametrize("name", PLANS)
def test_work_holds_every_block_once_in_order(name):
    """From the first matrix that needs it to the last one, with nothing of another block between."""
    plan = PLANS[name]
    work = work_of(plan, rounds=3)
    reads = [item for item in work if item.block is not None]
    assert [item.block for item in reads if item.first] == list(range(3 * plan.tape_blocks))
    assert [item.block for item in reads if item.last] == list(range(3 * plan.tape_blocks))
    assert [item.block for item in reads] == sorted(item.block for item in reads)
    assert len({(item.name, item.layer, item.block) for item in reads}) == len(reads)
    shared = {item.block for item in reads if not (item.first and item.last)}
    assert shared  # some block holds the end of one matrix and the start of the next
    for layer, (attention, ffn) in enumerate(plan.layer_starts[:-1]):
        blocks = {item.name: item.block for item in reversed(work) if item.layer == layer and item.round == 0}
        assert min(block for block in blocks.values() if block is not None) == attention
        assert blocks["router" if plan.config.is_moe(layer) else "dense_in"] == ffn
    assert next(item.block for item in work if item.name == "head") == plan.layer_starts[-1][0]


@pytest.mark.parametrize("name", [name for name in PLANS if name != "resident"])
def test_ring_always_has_its_depth_in_flight_and_never_two_blocks_in_a_slot(name):
    plan = PLANS[name]
    work = work_of(plan, rounds=2)
    ring = [copy for copy in copies_of(plan, work) if copy.lane == "ring"]
    for slot in range(plan.ring_depth):
        mine = sorted((copy.start, copy.end) for copy in ring if copy.slot == slot)
        assert all(end < start for (_, end), (start, _) in itertools.pairwise(mine))
    uses = defaultdict(list)
    for i, item in enumerate(work):
        if item.block is not None:
            uses[item.block].append(i)
    for i in range(len(work)):
        in_flight = sum(copy.start <= i < copy.end for copy in ring)
        held = sum(found[0] <= i <= found[-1] for found in uses.values())  # arrived and still needed
        assert held <= 1
        assert in_flight == plan.ring_depth - held
    for block, found in uses.items():
        assert [copy.end for copy in ring if copy.label == f"block {block}"] == [found[0]]
        following = [copy.start for copy in ring if copy.label == f"block {block + plan.ring_depth}"]
        assert following == [found[-1] + 1]


def test_resident_ring_copies_nothing():
    plan = PLANS["resident"]
    assert plan.tape_is_resident
    assert not [copy for copy in copies_of(plan, work_of(plan, rounds=2)) if copy.lane == "ring"]


@pytest.mark.parametrize("name", PLANS)
def test_no_slot_holds_two_copies_at_once(name):
    plan = PLANS[name]
    places = defaultdict(list)
    for copy in copies_of(plan, work_of(plan, rounds=2)):
        places[copy.lane, copy.slot].append((copy.start, copy.end))
    for place, spans in places.items():
        spans.sort()
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert end <= start + 1e-9, place


def test_experts_of_full_width_are_fetched_while_the_shared_experts_compute():
    plan = PLANS["linear"]
    work = work_of(plan, rounds=1)
    fetches = [copy for copy in copies_of(plan, work) if copy.lane == "experts"]
    assert len(fetches) == plan.moe_layers * plan.max_distinct_experts
    first = min(fetches, key=lambda copy: copy.start)
    assert {item.name for item in work[int(first.start) : int(first.end)]} == {"shared_out"}
    early = [copy for copy in fetches if copy.start == first.start]
    assert len(early) == plan.expert_slots


def test_boundaries_are_where_the_plan_says():
    plan = PLANS["nano"]
    work = work_of(plan, rounds=2)
    layer = layer_boundary(plan, work)
    assert (work[layer].name, work[layer].layer, work[layer - 1].layer) == ("mla_low", 3, 2)
    assert work[layer].block == plan.layer_starts[3][0]
    end = round_boundary(work)
    assert [work[end - 1].name, work[end].name] == ["sample", "embed"]
    drafted = work_of(PLANS["drafted"], rounds=2)
    assert [item.name for item in drafted[: round_boundary(drafted)][-2:]] == ["sample", "draft"]
    assert work[end + 1].block == plan.tape_blocks


@pytest.mark.parametrize("name", PLANS)
def test_segments_cover_the_tape_and_groups_cover_vmem(name):
    plan = PLANS[name]
    segments = tape_segments(plan)
    assert segments[0][0] == 0
    ends = [first + rows for first, rows, _, _ in segments]
    assert [first for first, *_ in segments[1:]] + [plan.tape_blocks * plan.block_rows] == ends
    assert all(rows > 0 for _, rows, _, _ in segments)
    starts = {first // plan.block_rows for first, *_ in segments if first % plan.block_rows == 0}
    assert {block for pair in plan.layer_starts for block in pair} <= starts
    assert {family for _, _, family, _ in segments} <= set(COLOURS)
    assert sum(vmem_groups(plan).values()) == sum(plan.vmem_map.values())
    assert vmem_groups(plan)["ring"] == plan.vmem_map["ring"]
    assert ("drafter" in vmem_groups(plan)) == (plan.drafter is not None)


@pytest.mark.parametrize("name", ["streamed", "resident"])
def test_picture_is_made_from_the_plan(name, tmp_path):
    pytest.importorskip("matplotlib")
    plan = PLANS[name]
    figure = draw_plan(plan)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert f"{plan.tape_blocks} blocks" in titles[0]
    lanes = [label.get_text() for label in figure.axes[2].get_yticklabels()]
    rings = [lane for lane in lanes if lane.startswith("ring")]
    assert len(rings) == (1 if plan.tape_is_resident else plan.ring_depth)
    file = tmp_path / "plan.png"
    figure.savefig(file, dpi=50)
    assert file.stat().st_size > 10_000


def test_command_line_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    assert main(["plan", "k3-mini", "--draw", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", "k3-mini", "--draw", str(tmp_path / "plan.nonsense")]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_missing_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DrawingError, match=r"pip install one-launch\[notebooks\]"):
        draw_plan(PLANS["resident"])
