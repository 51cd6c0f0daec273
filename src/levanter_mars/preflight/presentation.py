"""Reports as text and as a picture."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from levanter_mars.preflight.hardware import GIB
from levanter_mars.preflight.hlo import PHASES
from levanter_mars.preflight.report import Report


def table(reports: Sequence[Report]) -> str:
    """Reports on one topology side by side, one column each, with what they assume. Parts under a thousandth are left out."""
    first = reports[0]
    rows: list[tuple[str, ...] | str] = [("", *_names(reports))]

    def add(label: str, values) -> None:
        rows.append((f"  {label}", *values))

    def section(title: str) -> None:
        rows.append(title)

    add("sequences a device at once", (f"{report.per_device_parallelism}" for report in reports))
    if any(report.microbatches > 1 for report in reports):
        add("microbatches in a step", (f"{report.microbatches}" for report in reports))
    section(f"memory of one {_device(first)}, GiB")
    for part in dict.fromkeys(part for report in reports for part, size in report.memory.items() if size >= report.total / 1000):
        add(part, (f"{report.memory.get(part, 0) / GIB:.3f}" for report in reports))
    add("total", (f"{report.total / GIB:.3f}" for report in reports))
    add("capacity", (f"{report.capacity / GIB:.3f}" for report in reports))
    add("fits", (_fits(report) for report in reports))
    section("optimizer state, bytes a parameter, all devices")
    add("total", (f"{sum(report.state_bytes.values()) / report.parameter_count:.2f}" for report in reports))
    section(f"TFLOPs of matrix products in a step, one {_device(first)}")
    for phase in PHASES:
        add(phase, (_number(report.flops.get(phase), 1e12) for report in reports))
    section(f"collectives in a step, one {_device(first)}: number, MiB of results, MiB sent")
    for key in dict.fromkeys((c.phase, c.kind) for report in reports for c in report.collectives):
        found = [next((c for c in report.collectives if (c.phase, c.kind) == key), None) for report in reports]
        add(", ".join(key), (f"{c.count:,}  {c.payload / 2**20:9,.1f}  {c.sent / 2**20:9,.1f}" if c else "–" for c in found))
    section("bounds from the figures below")
    for name in ("compute", "memory", "links"):
        add(f"{name}, ms", (_number(getattr(report.roofline, name, None), 1e-3) for report in reports))
    add("step at least, ms", (_number(getattr(report.roofline, "step", None), 1e-3) for report in reports))
    add("bound by", (report.roofline.bound_by if report.roofline else "–" for report in reports))
    add("tokens a second at most", (f"{report.tokens_per_second:,.0f}" if report.tokens_per_second else "–" for report in reports))
    add("model FLOP utilization at most", (_percent(report.model_flop_utilization) for report in reports))
    add("hours of the run at least", (_number(report.hours, 1) for report in reports))
    section("")
    add("compiled in, s", (f"{report.compile_seconds:.0f}" for report in reports))
    return "\n".join([_heading(first), "", _aligned(rows), "", _assumptions(first), *_notes(reports)])


def verdict(report: Report) -> str:
    gap = abs(report.capacity - report.total) / GIB
    what = f"{report.optimizer} on {report.topology.name}, {report.per_device_parallelism} examples a device at once"
    if report.fits:
        return f"{what}: fits, {gap:.2f} GiB to spare of {report.capacity / GIB:.2f}"
    return f"{what}: does not fit, needs {report.total / GIB:.2f} GiB of {report.capacity / GIB:.2f}, {gap:.2f} too many"


def draw_memory(reports: Sequence[Report], path: Path) -> None:
    """Writes `memory_figure` as PNG."""
    memory_figure(reports).savefig(path, dpi=150, format="png")


def memory_figure(reports: Sequence[Report]) -> Figure:
    """What fills a device's memory: one stacked bar a report, and the capacity as a line."""
    figure = Figure(figsize=(3.5 + 1.6 * len(reports), 5), layout="constrained")
    axes = figure.subplots()
    names = _names(reports)
    colors = itertools.cycle(matplotlib.color_sequences["tab20"])
    bottoms = [0.0] * len(reports)
    parts = dict.fromkeys(part for report in reports for part in report.memory)
    for part, color in zip(parts, colors, strict=False):
        sizes = [report.memory.get(part, 0) / GIB for report in reports]
        axes.bar(names, sizes, bottom=bottoms, width=0.6, label=part, color=color)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    axes.axhline(reports[0].capacity / GIB, color="black", linestyle="--", label="capacity")
    axes.set_ylabel(f"GiB of one {_device(reports[0])}")
    axes.set_title(reports[0].topology.name + (" (estimate)" if reports[0].is_estimate else ""))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    return figure


def _heading(report: Report) -> str:
    chips = "1 chip" if report.topology.chips == 1 else f"{report.topology.chips} chips"
    return (
        f"{report.topology.name}: {chips}. {report.parameter_count:,} parameters, vocabulary {report.vocab_size:,}. "
        f"A step: {report.batch_size} sequences of {report.sequence_length} tokens."
    )


def _names(reports: Sequence[Report]) -> list[str]:
    """The optimizers' types, numbered where one is there more than once."""
    types = [report.optimizer for report in reports]
    return [f"{name} ({types[: i + 1].count(name)})" if types.count(name) > 1 else name for i, name in enumerate(types)]


def _assumptions(report: Report) -> str:
    chip = report.topology.chip
    return (
        f"A {chip.name} chip: {chip.flops / 1e12:g} TFLOP/s in bfloat16, {chip.memory / GIB:.4g} GiB at "
        f"{chip.memory_bandwidth / 1e12:g} TB/s, {chip.link_bandwidth / 1e9:g} GB/s sent over all its links ({chip.source}). "
        "The bounds take each at its full rate, all at once and without latency; a real step takes longer. "
        "Attention counts its whole square."
    )


def _notes(reports: Sequence[Report]) -> list[str]:
    notes = dict.fromkeys(note for report in reports for note in report.notes)
    return ["", "Where this differs from the run:", *(f"- {note}." for note in notes)] if notes else []


def _device(report: Report) -> str:
    return "chip" if report.topology.chip.devices == 1 else "device (two a chip)"


def _fits(report: Report) -> str:
    gap = (report.capacity - report.total) / GIB
    return f"yes, {gap:.2f} to spare" if report.fits else f"NO, {-gap:.2f} too many"


def _number(value: float | None, unit: float) -> str:
    return "–" if value is None else f"{value / unit:,.3g}" if value / unit < 1000 else f"{value / unit:,.0f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _aligned(rows: Sequence[tuple[str, ...] | str]) -> str:
    cells = [row for row in rows if not isinstance(row, str)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        row
        if isinstance(row, str)
        else (row[0].ljust(widths[0]) + "".join("  " + c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)))
        for row in rows
    )
