"""A predicted step as a picture: what the core does, and which exchanges are under way. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megakernel.cost import Cost
from megakernel.pipeline import KINDS, Span
from megakernel.schedule_names import SUBLAYERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KIND_COLOURS = {"computing": "#009E73", "waiting for HBM": "#0072B2", "waiting for an exchange": "#D55E00"}
_FLIGHT_COLOUR = "#E69F00"
_PART_OF = {"experts": "MoE", "sampling": "LM head"}
_NAMED_SHARE = 0.08
"""Spans of at least this share of the picture carry their names."""


def sublayers(cost: Cost) -> list[tuple[str, float, float]]:
    """(sublayer, begin, end) in order, in seconds; each ends with the mix for the next one."""
    begins: list[tuple[str, float]] = []
    for span in cost.spans:
        name = _PART_OF.get(span.phase, span.phase)
        if name in (*SUBLAYERS, "LM head") and (not begins or begins[-1][0] != name):
            begins.append((name, span.begin))
    ends = [*(begin for _, begin in begins[1:]), cost.seconds]
    return [(name, begin, end) for (name, begin), end in zip(begins, ends, strict=True)]


def draw_spans(cost: Cost, begin: float, end: float, axes: Axes | None = None) -> Figure:
    """A stretch of a predicted step, times in microseconds from `begin`.

    Args:
      begin, end: seconds from the beginning of the step.
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    if axes is None:
        _, axes = plt.subplots(figsize=(11, 2.6), layout="constrained")
    _bars(axes, _within(cost.spans, begin, end), 1.0, begin, end, lambda span: KIND_COLOURS[span.kind])
    _bars(axes, _within(cost.flights, begin, end), 0.0, begin, end, lambda _: _FLIGHT_COLOUR)
    axes.set(xlim=(0, (end - begin) * 1e6), ylim=(-0.5, 1.5), xlabel="us (predicted)")
    axes.set_yticks([1.0, 0.0], ["the core", "exchange"])
    axes.spines[["top", "right"]].set_visible(False)
    shown = [Patch(color=KIND_COLOURS[kind], label=kind) for kind in KINDS]
    axes.legend(handles=shown, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(shown), frameon=False)
    figure = axes.figure
    plt.close(figure)  # type: ignore[arg-type]
    return figure  # type: ignore[return-value]


def _within(spans: Sequence[Span], begin: float, end: float) -> list[Span]:
    return [span for span in spans if span.end > begin and span.begin < end]


def _bars(axes: Axes, spans: list[Span], at: float, begin: float, end: float, colour: Callable[[Span], str]) -> None:
    for span in spans:
        width = (span.end - span.begin) * 1e6
        left = (span.begin - begin) * 1e6
        axes.barh(at, width, left=left, height=0.7, color=colour(span), edgecolor="white", linewidth=0.4)
        if span.end - span.begin >= _NAMED_SHARE * (end - begin):
            name = span.name.replace(" ", "\n")
            axes.text(left + width / 2, at, name, ha="center", va="center", fontsize=7, color="white", clip_on=True)
