"""A plan, and what the TPU compiler made of it, as text for people. Every figure says of which kind it is."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from megakernel.messages import total_widths
from megakernel.split import split_choices

if TYPE_CHECKING:
    from megakernel.aot import AotReport
    from megakernel.plan import Plan

_BAR = 30
_SMALL_SHARE = 0.01
_LOADS = (1, 2, 4, 8)
"""Rows of the steps for which divisions of the experts are compared."""


def plan_text(plan: Plan) -> str:
    """Model, target, tape, ring, memory maps and the bytes of a step."""
    parts = (_heading(plan), _split(plan), _memory(plan), _step(plan))
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


def place(plan: Plan) -> str:
    """What a plan counts: `one core of v7x`, or `one of 32 cores of v7x`."""
    cores = plan.split.cores
    return f"{'one core' if cores == 1 else f'one of {cores} cores'} of {plan.target.name}"


def size(count: float) -> str:
    """Bytes for people: 1,536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def duration(seconds: float) -> str:
    """Seconds for people: 0.0000021 -> 2.10 us."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 0.1:
            return f"{seconds * factor:,.2f} {unit}"
    return f"{seconds * 1e6:,.2f} us"


def _heading(plan: Plan) -> Iterator[str]:
    config, number = plan.config, {"float32": "f32", "bfloat16": "bf16"}
    kinds = f"{len(config.kda_layers)} KDA + {len(config.mla_layers)} MLA"
    yield f"{config.name} on {place(plan)}"
    yield (
        f"  model    {config.num_hidden_layers} layers ({kinds}; {plan.moe_layers} MoE), "
        f"hidden {config.hidden_size:,}, vocabulary {config.vocab_size:,}"
    )
    yield (
        f"  rows     {plural(plan.sequences, 'sequence')} in a tile of {plan.rows} rows; {plan.context:,} positions "
        f"in pages of {plan.page}; at most {plan.launch_steps:,} tokens a launch"
    )
    if plan.drafter:
        drafts = plural(plan.tokens - 1, "token")
        yield f"  drafter  {plan.drafter.name}: {drafts} drafted and verified a round, {plural(plan.live_rows, 'row')}"
    yield (
        f"  tape     {plural(plan.tape_blocks, 'block')} of {plan.block_rows} x {plan.block_lanes} "
        f"{number[plan.weights]} ({size(plan.block_bytes)}), {size(plan.tape_bytes)}; "
        f"{_fill(plan):.1%} filled with weights"
    )
    if plan.tape_is_resident:
        yield f"  ring     resident: all {plan.tape_blocks} blocks fit, so the tape is read once a launch"
    else:
        in_flight = size(plan.ring_depth * plan.block_bytes)
        yield f"  ring     streamed: {plan.ring_depth} blocks in flight ({in_flight}), the tape is read every step"
    if plan.moe_layers:
        yield (
            f"  experts  {config.num_experts} a layer, {config.expert_format}, {size(plan.expert_bytes)} each; "
            f"{config.num_experts_per_token} a token, at most {plan.max_distinct_experts} distinct a step; "
            f"{plural(plan.expert_slots, 'slot')}"
        )


def _split(plan: Plan) -> Iterator[str]:
    """What travels between cores; how the experts of a layer are divided, and what other divisions would cost."""
    chosen = plan.split
    if chosen.cores == 1:
        return
    widths = " and ".join(f"{width:,} in {plural(plan.hops(width), 'hop')}" for width in total_widths(plan))
    yield f"Between cores: pieces of vectors in {plan.activations}; sums in {plan.wire}, those of {widths}"
    if not plan.moe_layers:
        return
    yield "Division of the routed experts: groups of experts x parts of each; the busiest core is expected to read, in"
    yield "whole experts a layer (rows choosing independently, drawn 4,000 times):"
    yield f"  {'division':<18}" + "".join(f"{plural(rows, 'row'):>10}" for rows in _LOADS)
    for split in split_choices(chosen.config, chosen.cores):
        division = f"{split.expert_groups} x {split.expert_parts}"
        loads = "".join(f"{split.expected_load(rows):>10.3f}" for rows in _LOADS)
        yield f"  {division:<18}{loads}" + ("  chosen" if split == chosen else "")


def busiest_weight_bytes(plan: Plan) -> float:
    """Bytes of tape and experts, padding included, that a step of one row is expected to need on the busiest core."""
    if not plan.moe_layers:
        return plan.tape_bytes
    expert = plan.split.expert_parts * plan.expert_bytes
    return plan.tape_bytes + plan.moe_layers * plan.split.expected_load(1) * expert


def even_weight_bytes(plan: Plan) -> float:
    """Bytes of the weights of a step of one row, each counted once and without padding, over the number of cores."""
    from megakernel.plan import BYTES

    config = plan.config
    entries = 3 * config.routed_expert_hidden_size * config.moe_intermediate_size
    bits = 16 if config.expert_format == "bf16" else 4 + 8 / 32
    experts = plan.moe_layers * config.num_experts_per_token * entries * bits / 8
    return (plan.tape_parameters * BYTES[plan.weights] + experts) / plan.split.cores


def _fill(plan: Plan) -> float:
    """Share of the tapes of all cores that holds weights."""
    return plan.tape_parameters / (plan.split.cores * plan.tape_blocks * plan.block_rows * plan.block_lanes)


def _memory(plan: Plan) -> Iterator[str]:
    limits = (
        ("VMEM", plan.vmem_map, plan.target.vmem_bytes),
        ("SMEM", plan.smem_map, plan.target.smem_bytes),
        ("HBM", plan.hbm_map, plan.target.hbm_bytes),
    )
    for i, (memory, used, limit) in enumerate(limits):
        if i:
            yield ""
        total = sum(used.values())
        yield f"{memory}: {size(total)} of {size(limit)} ({total / limit:.1%})"
        yield from _bars(used)


def _step(plan: Plan) -> Iterator[str]:
    moved = plan.step_bytes
    total = sum(moved.values())
    yield f"Bytes between HBM and VMEM in one step at position {plan.context // 2:,}, at most: {size(total)}"
    yield from _bars(moved)
    busiest, even = busiest_weight_bytes(plan), even_weight_bytes(plan)
    yield (
        f"Weights of a step of one row on the busiest core, expected: {size(busiest)}, {busiest / even:.3f} times the "
        f"{size(even)} of an even division without padding"
    )
    if plan.target.hbm_bytes_per_s is None:
        yield f"No predicted time: {plan.target.name} has no memory bandwidth that means anything to a plan."


def _bars(used: Mapping[str, int]) -> Iterator[str]:
    total = sum(used.values()) or 1
    shown = {name: count for name, count in used.items() if count >= _SMALL_SHARE * total}
    rest = {name: count for name, count in used.items() if name not in shown and count}
    rows = sorted(shown.items(), key=lambda item: -item[1])
    if rest:
        rows.append((plural(len(rest), "smaller one"), sum(rest.values())))
    for name, count in rows:
        bar = "#" * round(_BAR * count / total)
        yield f"  {name:<18}{size(count):>12}{count / total:>8.1%}  {bar}".rstrip()


def aot_text(report: AotReport) -> str:
    """The compiler's figures."""
    planned = f"{size(report.vmem_planned)} planned of {size(report.vmem_limit)}"
    if report.vmem_compiled is not None:
        planned += f", {size(report.vmem_compiled)} allocated by the compiler"
    machine = plural(report.cores, "core")
    lines = [
        f"Compiled for {machine} of {report.topology} by the TPU compiler (JAX {report.jax_version}); no TPU was used",
        f"  time       {report.lower_seconds:.1f} s to lower, {report.compile_seconds:.1f} s to compile, "
        + ("dump of the schedule included" if report.schedule else "on this machine"),
        f"  VMEM       {planned}: the compiler found room for it",
        f"  HBM        {size(report.argument_bytes)} of arguments a core, of which {size(report.alias_bytes)} (caches) "
        f"are updated in place; {size(report.temp_bytes)} temporary",
        f"  code       {size(report.code_bytes)}",
    ]
    if report.schedule is not None:
        lines += [
            "  schedule   bundles of one turn of each loop; busy: of its own bundles, how many use a matrix unit",
            f"    {'loop':<28}{'own':>8}{'with inner':>12}{'busy':>8}{'spills':>8}{'fills':>8}",
        ]
        for depth, loop in report.schedule.walk():
            if depth <= 3 and (loop.name != "loop" or loop.total >= 100):
                name = "  " * depth + loop.name
                lines.append(
                    f"    {name:<28}{loop.bundles:>8,}{loop.total:>12,}{loop.matrix:>8,}"
                    f"{loop.spills:>8,}{loop.fills:>8,}"
                )
    return "\n".join(lines)


def machine_name() -> str:
    """What measurements of this process ran on: JAX's device, or the processor behind it."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {plural(os.cpu_count() or 1, 'core')}"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
