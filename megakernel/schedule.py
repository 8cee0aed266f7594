"""The TPU compiler's own schedule of the kernel, read from its text dump: bundles and busy slots, loop by loop.

A bundle is one VLIW instruction, issued once a cycle at best. What is read here is *compiled*, not measured: bundles of
a loop count one turn, and a bundle may wait for a copy or for the matrix unit.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from megakernel.plan import Plan
from megakernel.vocabulary import piece_count, vocabulary_shape

KERNEL_NAME = "decode_launch"
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(?P<mark>[A-Z]{2})?\s*:\s(?P<depth>>*)\s*\{(?P<empty>\})?")
_COUNTS = re.compile(r"total scheduled bundles:\s*(\d+)")
_SLOTS_HEAD, _SLOTS_BODY = "== CAPACTIY:", "== UTILIZATION:"  # the first is spelled so in the dump
_FILTERS = 3  # loops of `phases.sample`: min-p, top-k, top-p
_PASSES = 4  # and, where the vocabulary has several pieces: temperature, noise, maximum, where it is
_SPILL, _FILL, _MATRIX = "VSTORE:SPILL", "VLOAD:FILL", "MXU"


class ScheduleError(ValueError):
    """The dump does not look as expected; the message says what was looked for."""


@dataclasses.dataclass
class Loop:
    """One loop of the compiled program, or the whole program.

    A branch back and its delay slot may be counted with the loop outside.

    Attributes:
      name: what the loop is, where the program's shape makes that certain; else "loop".
      bundles: of one turn, inner loops not counted.
      matrix: of them, how many use a matrix unit; spills and fills: vector registers saved to VMEM and read back.
    """

    name: str = "loop"
    bundles: int = 0
    matrix: int = 0
    spills: int = 0
    fills: int = 0
    inner: list[Loop] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> int:
        """Bundles with every inner loop counted for one turn."""
        return self.bundles + sum(loop.total for loop in self.inner)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Loop]]:
        yield depth, self
        for loop in self.inner:
            yield from loop.walk(depth + 1)

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict) -> Loop:
        return cls(**{**data, "inner": [cls.from_dict(loop) for loop in data["inner"]]})


def read_schedule(folder: Path, plan: Plan) -> Loop:
    """The kernel's schedule from a folder that the compiler dumped into.

    Raises:
      ScheduleError: no dump of the kernel there, or one that contradicts itself.
    """
    program = parse_bundles(
        _only(folder, f"*{KERNEL_NAME}*[0-9]-final_bundles.txt"),
        _only(folder, f"*{KERNEL_NAME}*-final_hlo-static-per-bundle-utilization.txt"),
    )
    counted = _COUNTS.search(_only(folder, f"*{KERNEL_NAME}*-schedule-analysis_final_bundles.txt"))
    if counted is None or int(counted[1]) != program.total:
        found = counted[1] if counted else "no count"
        raise ScheduleError(f"{folder}: the schedule analysis says {found} bundles, the program has {program.total}")
    name_loops(program, plan)
    return program


def parse_bundles(bundles: str, utilization: str) -> Loop:
    """Loops of a program from its listing, one line a bundle, and the table of slots used, in the same order."""
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
        number += 1
    if number != len(rows):
        raise ScheduleError(f"the listing has {number} bundles, the utilization table {len(rows)}")
    return program


def name_loops(program: Loop, plan: Plan) -> None:
    """Names the loops of `kernel.decode_rounds`; leaves names alone where the shape is not the expected one."""
    if not program.inner:
        return
    round_ = max(program.inner, key=lambda loop: loop.total)
    round_.name = "round"
    config = plan.config
    parts = ["write snapshot"]
    parts += ["KDA"] if config.kda_layers else []
    parts += ["MLA"] if config.mla_layers else []
    parts += ["MoE"] if plan.moe_layers else []
    parts += ["dense"] if plan.moe_layers < config.num_hidden_layers else []
    parts += ["keep for the drafter"] if plan.drafter and plan.drafter.taps else []
    layers = [i for i, loop in enumerate(round_.inner) if len(loop.inner) == len(parts)]
    if len(layers) != 1:
        return
    layer = round_.inner[layers[0]]
    layer.name = "layer"
    for loop, name in zip(layer.inner, parts, strict=True):
        loop.name = name
    after = [loop for outer in round_.inner[layers[0] + 1 :] for _, loop in outer.walk()]
    several = piece_count(vocabulary_shape(config.vocab_size, plan.split.cores)) > 1
    draws = [loop for loop in after if len(loop.inner) == _FILTERS + several * _PASSES]
    if len(draws) == 1:
        draws[0].name = "draw (if sampled)"


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
