"""The plots of a comparison, as PNG."""

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from levanter_mars.compare.analysis import Analysis

MARKS = "osv^D<>Pphd*"
"""One an optimizer, because colors repeat after ten and not everybody tells them apart."""

TALLEST = 1.5
"""What the picture of learning rates shows above the lowest loss, nats a token."""


def loss_curves(analysis: Analysis) -> bytes:
    return _curves(analysis, lambda step, _: step, "step")


def loss_against_time(analysis: Analysis) -> bytes:
    """Steps times the time a step: what the machine did besides, evaluations and compilation are not in it."""
    seconds = {timing.optimizer: timing.step_seconds for timing in analysis.timings.rows}
    return _curves(analysis, lambda step, name: step * seconds[name] / 60 if name in seconds else math.nan, "minutes of training steps")


def rate_sensitivity(analysis: Analysis) -> bytes:
    """Final loss by learning rate. A rate with a run that diverged is a cross on the upper edge."""
    figure, axes = _figure()
    shown = []
    for index, row in enumerate(analysis.rows):
        style = _style(analysis, row.optimizer)
        ended = [(rate.learning_rate, rate.mean, rate.losses) for rate in row.rates if not rate.diverged]
        rates, means, losses = zip(*ended, strict=True) if ended else ((), (), ())
        shown += [loss for of_rate in losses for loss in of_rate]
        axes.plot(rates, means, label=row.optimizer, **style)
        axes.vlines(rates, list(map(min, losses)), list(map(max, losses)), color=style["color"], linewidth=1)
        for rate in row.rates:
            if rate.diverged:
                # Below each other where several diverged at one rate.
                position = (rate.learning_rate, 1 - 0.02 * index)
                axes.plot(*position, "x", color=style["color"], markersize=9, transform=axes.get_xaxis_transform(), clip_on=False)
    # Rates that are far too high must not flatten the rest.
    height = min(max(shown) - min(shown), TALLEST)
    axes.set_ylim(min(shown) - 0.05 * height - 0.01, min(shown) + 1.15 * height + 0.01)
    axes.set_xscale("log")
    axes.set(xlabel="peak learning rate (×: a run diverged)", ylabel="held-out loss at the end, nats a token")
    return _png(figure, axes)


def _curves(analysis: Analysis, x: Callable[[int, str], float], label: str) -> bytes:
    figure, axes = _figure()
    for curve in analysis.curves:
        style = _style(analysis, curve.optimizer)
        steps = [x(step, curve.optimizer) for step in curve.steps]
        axes.plot(steps, curve.mean, label=f"{curve.optimizer}, {curve.mean[-1]:.3f}", **style)
        axes.fill_between(steps, curve.lowest, curve.highest, color=style["color"], alpha=0.15, linewidth=0)
    axes.set(xlabel=label, ylabel="held-out loss, nats a token")
    return _png(figure, axes)


def _style(analysis: Analysis, optimizer: str) -> dict[str, Any]:
    names: Sequence[str] = [row.optimizer for row in analysis.rows]
    index = names.index(optimizer)
    return {"color": f"C{index % 10}", "marker": MARKS[index % len(MARKS)], "markersize": 5, "linewidth": 1.5}


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    return figure, figure.subplots()


def _png(figure: Figure, axes: Axes) -> bytes:
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()
