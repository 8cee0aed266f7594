"""The TPU compiler's own schedule of the kernel, read from its text dump: bundles and busy slots, loop by loop.

A bundle is one VLIW instruction, issued once a cycle at best. What is read here is *compiled*, not measured: bundles of
a loop count one turn, and a bundle may wait for a copy or for the matrix unit.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from megakernel import memory
from megakernel.plan import Plan
from megakernel.schedule_names import name_loops

KERNEL_NAME = "decode_launch"
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(?P<mark>[A-Z]{2})?\s*:\s(?P<depth>>*)\s*\{(?P<empty>\})?")
_COUNTS = re.compile(r"total scheduled bundles:\s*(\d+)")
_SLOTS_HEAD, _SLOTS_BODY = "== CAPACTIY:", "== UTILIZATION:"  # the first is spelled so in the dump
_SCRATCH = re.compile(r"#allocation(\d+) \[.*tag = 'scratch operand'\]")
_ALLOCATION = re.compile(r"#allocation(\d+)\b")
_VMEM_DATA = "const DATA ="
_SPILL, _FILL, _MATRIX = "VSTORE:SPILL", "VLOAD:FILL", "MXU"


class ScheduleError(ValueError):
    """The dump does not look as expected; the message says what was looked for."""


@dataclasses.dataclass
class Loop:
    """One loop of the compiled program, or the whole program.

    A branch back and its delay slot may be counted with the loop outside.

    Attributes:
      name: what the loop is, where the buffers that it touches make that certain; else "loop".
      bundles: of one turn, inner loops not counted.
      matrix: of them, how many use a matrix unit; spills and fills: vector registers saved to VMEM and read back.
      turns: in each turn of the loop outside, on average in a step of `plan.live_rows` rows at half the context; a
        drawn token's loops count none. Unnamed loops count one.
      touches: how often its own bundles name each buffer of the kernel.
    """

    name: str = "loop"
    bundles: int = 0
    matrix: int = 0
    spills: int = 0
    fills: int = 0
    inner: list[Loop] = dataclasses.field(default_factory=list)
    turns: float = 1
    touches: Counter[str] = dataclasses.field(default_factory=Counter, compare=False)

    @property
    def total(self) -> int:
        """Bundles with every inner loop counted for one turn."""
        return self.bundles + sum(loop.total for loop in self.inner)

    @property
    def executed(self) -> float:
        """Bundles of one turn with every inner loop counted as often as it turns."""
        return self.bundles + sum(loop.turns * loop.executed for loop in self.inner)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Loop]]:
        yield depth, self
        for loop in self.inner:
            yield from loop.walk(depth + 1)


def read_schedule(folder: Path, plan: Plan) -> Loop:
    """The kernel's schedule from a folder that the compiler dumped into.

    Raises:
      ScheduleError: no dump of the kernel there, or one that contradicts itself.
    """
    program = parse_bundles(
        _only(folder, f"*{KERNEL_NAME}*[0-9]-final_bundles.txt"),
        _only(folder, f"*{KERNEL_NAME}*-final_hlo-static-per-bundle-utilization.txt"),
        buffer_numbers(_only(folder, f"*{KERNEL_NAME}*[0-9]-original.txt"), plan),
    )
    counted = _COUNTS.search(_only(folder, f"*{KERNEL_NAME}*-schedule-analysis_final_bundles.txt"))
    if counted is None or int(counted[1]) != program.total:
        found = counted[1] if counted else "no count"
        raise ScheduleError(f"{folder}: the schedule analysis says {found} bundles, the program has {program.total}")
    name_loops(program, plan)
    return program


def read_vmem(folder: Path) -> int | None:
    """Bytes of VMEM that the compiler allocates for the kernel, or None where it wrote no such report."""
    for report in sorted(folder.glob("*vmem_report.html")):
        _, found, data = report.read_text().partition(_VMEM_DATA)
        users = json.JSONDecoder().raw_decode(data.lstrip())[0]["hlo_breakdowns"] if found else {}
        for name, user in users.items():
            if name.startswith(KERNEL_NAME):
                return sum(block["block_size"] for block in user["blocks"])
    return None


def buffer_numbers(program: str, plan: Plan) -> dict[int, str]:
    """The compiler's numbers of the kernel's buffers: it lists them in the order of `kernel.launch`."""
    found = [int(line[1]) for line in map(_SCRATCH.search, program.splitlines()) if line]
    names = [*memory.vmem_buffers(plan), *memory.smem_scratch(plan), *memory.semaphore_counts(plan)]
    if len(found) != len(names):
        raise ScheduleError(f"the compiler lists {len(found)} buffers of scratch, the plan {len(names)}")
    return dict(zip(found, names, strict=True))


def parse_bundles(bundles: str, utilization: str, buffers: Mapping[int, str] | None = None) -> Loop:
    """Loops of a program from its listing, one line a bundle, and the table of slots used, in the same order.

    Args:
      buffers: name of each buffer by the compiler's number.
    """
    buffers = buffers or {}
    names, rows = _slots(utilization)
    program = Loop("program")
    open_loops, number = [program], 0
    for line in bundles.splitlines():
        bundle = _BUNDLE.match(line)
        if bundle is None:
            continue
        depth = len(bundle["depth"])
        if bundle["mark"] == "LB":
            del open_loops[depth:]
            open_loops[-1].inner.append(Loop())
            open_loops.append(open_loops[-1].inner[-1])
        elif not bundle["empty"]:  # an empty bundle carries no depth
            del open_loops[depth + 1 :]
        if number >= len(rows):
            raise ScheduleError(f"the listing has more bundles than the utilization table, {len(rows)}")
        used = dict(zip(names, rows[number], strict=True))
        loop = open_loops[-1]
        loop.bundles += 1
        loop.matrix += used[_MATRIX] > 0
        loop.spills += used[_SPILL]
        loop.fills += used[_FILL]
        loop.touches.update(name for at in _ALLOCATION.findall(line) if (name := buffers.get(int(at))))
        number += 1
    if number != len(rows):
        raise ScheduleError(f"the listing has {number} bundles, the utilization table {len(rows)}")
    return program


def _slots(utilization: str) -> tuple[list[str], list[list[int]]]:
    head, found, body = utilization.partition(_SLOTS_BODY)
    if not found or _SLOTS_HEAD not in head:
        raise ScheduleError(f"the utilization table lacks {_SLOTS_HEAD!r} or {_SLOTS_BODY!r}")
    names = head.split(_SLOTS_HEAD)[1].strip().splitlines()[0].split(", ")
    missing = {_MATRIX, _SPILL, _FILL} - set(names)
    if missing:
        raise ScheduleError(f"the utilization table lacks the columns {sorted(missing)}; it has {names}")
    return names, [[int(field) for field in line.split()] for line in body.strip().splitlines()]


def _only(folder: Path, pattern: str) -> str:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise ScheduleError(f"{folder}: expected one file {pattern}, found {len(found)}")
    return found[0].read_text()
