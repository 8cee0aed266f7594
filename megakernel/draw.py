"""A plan as a picture: the tape, VMEM, and what is in flight when. Needs matplotlib (the extra `notebooks`).

Everything is computed from the plan. The colours are those of Okabe and Ito (one is Tol's), which colour-blind readers
can tell apart; copies are also told apart by hatching.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megakernel import memory, program
from megakernel.plan import Plan
from megakernel.report import place, plural, size
from megakernel.timeline import (
    Copy,
    Family,
    Work,
    copies_of,
    family_of,
    layer_boundary,
    round_boundary,
    tape_sections,
    work_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: dict[Family, str] = {
    "KDA": "#0072B2",
    "MLA": "#56B4E9",
    "dense FFN": "#CC79A7",
    "routing": "#F0E442",
    "shared experts": "#E69F00",
    "routed experts": "#D55E00",
    "LM head": "#009E73",
    "drafter": "#882255",
    "other": "#8C8C8C",
}
_INK = "#222222"
_LANES = ("ring", "experts", "KDA state", "conv tails", "replay rows", "MLA tile", "MLA pages", "vectors", "embedding")
_LIGHT = ("routing", "MLA", "shared experts", "dense FFN")
_MOST_LABELS = 10
_MOST_CELLS = 400
_HALF_WINDOW = 20
_WORK_HEIGHT = 4.8
_SHORTEST = 0.12
_GROUPS = (
    ("ring", ("ring",)),
    ("expert slots", ("expert_",)),
    ("logits", ("out_head", *memory.ROW_OF_LOGITS, "token_counts", "logit_bias")),
    ("KDA windows", ("state", "tails", "kda_", "trial_state", "pending")),
    ("MLA windows", ("page", "latent_group", "fresh", "queries", "contexts")),
    ("outputs of products", ("out_",)),
    ("residual stream", ("stream", "operand")),
)


class DrawingError(ImportError):
    """matplotlib is not installed."""


def draw_plan(plan: Plan) -> Figure:
    """The whole picture on one page."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DrawingError("drawing needs matplotlib: pip install one-launch[notebooks]") from error
    figure = Figure(figsize=(11, 11.5), layout="constrained")
    tape, vmem, layers, tokens = figure.subplots(4, 1, height_ratios=(1, 2, 5, 5))
    figure.suptitle(f"{plan.config.name} on {place(plan)}, {plural(plan.sequences, 'sequence')}", color=_INK)
    draw_tape(tape, plan)
    draw_vmem(vmem, plan)
    work = work_of(plan, rounds=2)
    draw_timeline(layers, plan, work, layer_boundary(plan, work), "In flight around a layer boundary")
    draw_timeline(tokens, plan, work, round_boundary(work), "In flight around the end of a round")
    present = dict.fromkeys(item.family for item in work)
    handles = [_patch(COLOURS[family], family) for family in COLOURS if family in present and family != "other"]
    handles += [
        _patch(_INK, "work that reads no tape block"),
        _patch("white", "read in flight, until it is waited for", outlined=True),
        _patch("white", "write in flight, until its window is needed", outlined=True, hatch="////"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def tape_segments(plan: Plan) -> list[tuple[int, int, Family, int]]:
    """(first row, rows, family, layer) along one step; neighbours of one family and layer are one segment.

    Rows that stay empty, as behind the last matrix of a section, count with what is before them.
    """
    segments: list[tuple[int, int, Family, int]] = []
    for section, layer, block in tape_sections(plan):
        starts = [(_row(plan, block, matrix), family_of(matrix)) for matrix in plan.sections[section]]
        ends = [*(row for row, _ in starts[1:]), (block + plan.section_blocks(section)) * plan.block_rows]
        for (start, family), end in zip(starts, ends, strict=True):
            if segments and segments[-1][2:] == (family, layer):
                start = segments.pop()[0]
            segments.append((start, end - start, family, layer))
    return segments


def _row(plan: Plan, block: int, matrix: program.Matrix) -> int:
    """The row of the tape with which a matrix begins, in the section that begins with `block`."""
    cut = plan.tilings[matrix.name].panels[0].cuts[0]
    return (block + cut.block) * plan.block_rows + cut.row


def vmem_groups(plan: Plan) -> dict[str, int]:
    """Bytes of VMEM by kind of buffer, largest first."""
    groups: dict[str, int] = {}
    drafts = {"taps", *plan.drafter.vmem(plan), *plan.drafter.request(plan)} if plan.drafter else set()
    for buffer, count in plan.vmem_map.items():
        group = next((name for name, starts in _GROUPS if buffer.startswith(starts)), "other")
        group = "drafter" if buffer in drafts else group
        groups[group] = groups.get(group, 0) + count
    return dict(sorted(groups.items(), key=lambda item: -item[1]))


def draw_tape(axes: Axes, plan: Plan) -> None:
    """The tape of one step from left to right, coloured by phase, with the layers' boundaries."""
    segments = tape_segments(plan)
    single = plan.tape_blocks <= _MOST_CELLS
    for first, rows, family, _ in segments:
        whole = [(first / plan.block_rows, rows / plan.block_rows)]
        cells = list(_cells(plan, first, first + rows)) if single else whole
        edge = "white" if single else COLOURS[family]
        axes.broken_barh(cells, (0, 1), facecolor=COLOURS[family], edgecolor=edge, linewidth=0.6)
    starts = [attention for attention, _ in plan.layer_starts]
    every = -(-len(starts) // _MOST_LABELS)
    for layer, start in enumerate(starts):
        axes.axvline(start, color=_INK, linewidth=1.0, ymax=1.0)
        end = starts[layer + 1] if layer + 1 < len(starts) else plan.tape_blocks
        name = "head" if layer == plan.config.num_hidden_layers else f"{layer} {plan.config.layer_kind(layer).upper()}"
        if layer % every == 0:
            axes.text((start + end) / 2, 1.08, name, ha="center", va="bottom", fontsize=8, color=_INK)
    axes.set(xlim=(0, plan.tape_blocks), ylim=(0, 1), yticks=[])
    axes.set_xlabel("tape block", fontsize=9)
    residence = "resident in VMEM" if plan.tape_is_resident else f"{plan.ring_depth} in flight"
    axes.set_title(
        f"Tape: {plural(plan.tape_blocks, 'block')} of {size(plan.block_bytes)}, in the order of use; {residence}",
        loc="left", fontsize=10, pad=18, color=_INK,
    )  # fmt: skip
    _bare(axes)


def _cells(plan: Plan, start: int, end: int) -> Iterator[tuple[float, float]]:
    """(start, length), counted in blocks, of the parts of a stretch of rows that lie in one block each."""
    while start < end:
        stop = min(end, (start // plan.block_rows + 1) * plan.block_rows)
        yield start / plan.block_rows, (stop - start) / plan.block_rows
        start = stop


def draw_vmem(axes: Axes, plan: Plan) -> None:
    """Bars of VMEM by kind of buffer."""
    groups = vmem_groups(plan)
    used, limit = sum(groups.values()), plan.target.vmem_bytes
    names = list(groups)[::-1]
    axes.barh(names, [groups[name] / 2**20 for name in names], color=COLOURS["KDA"], height=0.7)
    for row, name in enumerate(names):
        axes.text(groups[name] / 2**20, row, f"  {size(groups[name])}", va="center", fontsize=8, color=_INK)
    axes.set_xlim(0, 1.15 * max(groups.values()) / 2**20)
    axes.set_xlabel("MiB", fontsize=9)
    axes.tick_params(axis="y", labelsize=8, length=0)
    axes.set_title(
        f"VMEM: {size(used)} of {size(limit)} planned ({used / limit:.0%})", loc="left", fontsize=10, color=_INK
    )
    _bare(axes)


def draw_timeline(axes: Axes, plan: Plan, work: Sequence[Work], centre: int, title: str) -> None:
    """Work in order along the top, and below it every copy from its start to the wait for it."""
    first, last = max(0, centre - _HALF_WINDOW), min(len(work), centre + _HALF_WINDOW)
    copies = [copy for copy in copies_of(plan, work) if copy.end >= first and copy.start < last]
    rows = _lane_rows(plan, copies)
    for name, family, start, stop in _runs(work, first, last):
        streams = work[start].block is not None
        cells = [(i, 1) for i in range(start, stop)]
        colour = COLOURS[family] if streams else _INK
        axes.broken_barh(cells, (-_WORK_HEIGHT, _WORK_HEIGHT), facecolor=colour, edgecolor="white", linewidth=0.6)
        ink = _INK if streams and family in _LIGHT else "white"
        angle = 90 if stop - start < 4 else 0
        centred: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.5, "color": ink, "rotation": angle}
        axes.text((start + stop) / 2, -_WORK_HEIGHT / 2, name, **centred)
    for copy in copies:
        low, high = max(copy.start, first), min(max(copy.end, copy.start + _SHORTEST), last)
        place, hatch = rows[copy.lane, copy.slot] + 0.12, "////" if copy.kind == "write" else None
        look: dict[str, Any] = {"facecolor": COLOURS[copy.family], "alpha": 0.75, "edgecolor": _INK, "linewidth": 0.5}
        axes.broken_barh([(low, high - low)], (place, 0.76), hatch=hatch, **look)
    _lane_labels(axes, plan, rows)
    axes.axvline(centre, color=_INK, linewidth=1.4)
    axes.set(xlim=(first, last), ylim=(max(rows.values()) + 1.1, -_WORK_HEIGHT - 0.1))
    blocks = {i: work[i].block for i in range(first, last) if work[i].first}
    ticks = {i + 0.5: str(block) for i, block in blocks.items() if block is not None and block % 5 == 0}
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=7)
    axes.set_xlabel("block of the endless tape (order of work, not time)", fontsize=9)
    begins = f"round {work[centre].round}" if work[centre].name == "embed" else f"layer {work[centre].layer}"
    axes.set_title(f"{title}: {begins} begins at the line", loc="left", fontsize=10, color=_INK)
    _bare(axes)


def _lane_rows(plan: Plan, copies: Sequence[Copy]) -> dict[tuple[str, int], int]:
    """A row for each slot of each lane that appears; a resident ring has one row and no copies."""
    found = {(copy.lane, copy.slot) for copy in copies} | ({("ring", 0)} if plan.tape_is_resident else set())
    order = sorted(found, key=lambda key: (_LANES.index(key[0]), key[1]))
    return {key: row for row, key in enumerate(order)}


def _lane_labels(axes: Axes, plan: Plan, rows: dict[tuple[str, int], int]) -> None:
    labels = []
    for lane, slot in rows:
        several = sum(other == lane for other, _ in rows) > 1
        labels.append(f"{lane} {slot}" if several else lane)
    axes.set_yticks([-_WORK_HEIGHT / 2, *(row + 0.5 for row in rows.values())], ["work", *labels], fontsize=7.5)
    axes.tick_params(axis="y", length=0)
    if plan.tape_is_resident:
        words, across = "the whole tape lies in VMEM since the launch began", axes.get_yaxis_transform()
        look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7.5, "color": _INK, "style": "italic"}
        axes.text(0.5, rows["ring", 0] + 0.5, words, transform=across, **look)


def _runs(work: Sequence[Work], first: int, last: int) -> Iterator[tuple[str, Family, int, int]]:
    """Stretches of work of one name within a window."""
    start = first
    for i in range(first + 1, last + 1):
        if i == last or (work[i].name, work[i].layer) != (work[start].name, work[start].layer):
            yield work[start].name, work[start].family, start, i
            start = i


def _patch(colour: str, label: str, outlined: bool = False, hatch: str | None = None) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, edgecolor=_INK if outlined else colour, label=label, hatch=hatch)


def _bare(axes: Axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
