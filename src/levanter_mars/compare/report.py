"""Writes a comparison's files into its results folder."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from levanter_mars.compare.analysis import Analysis
from levanter_mars.compare.plots import loss_against_time, loss_curves, rate_sensitivity
from levanter_mars.compare.presentation import Table, loss_table, page, rate_table, time_table
from levanter_mars.compare.records import write_whole

TABLE, TABLE_JSON, TIMES, PAGE = "table.md", "table.json", "times.md", "index.html"


def write_report(folder: Path, analysis: Analysis, title: str, introduction: Sequence[str]) -> Table:
    """Writes table.md and table.json, which are the same for any two runs of one study, times.md, three PNGs and index.html.

    Returns:
        The first table.
    """
    losses, rates, times = loss_table(analysis), rate_table(analysis), time_table(analysis)
    images = {
        "Loss curves": ("loss_curves.png", loss_curves(analysis)),
        "Learning rates": ("learning_rates.png", rate_sensitivity(analysis)),
        "Loss against time": ("loss_against_time.png", loss_against_time(analysis)),
    }
    for name, image in images.values():
        write_whole(folder / name, image)
    notes = "".join(f"- {note}\n" for note in analysis.notes)
    text = "\n\n".join([f"# {title}", *introduction, losses.markdown(), rates.markdown()]) + (f"\n## Notes\n\n{notes}" if notes else "")
    write_whole(folder / TABLE, text)
    comparable = {key: value for key, value in dataclasses.asdict(analysis).items() if key != "timings"}
    write_whole(folder / TABLE_JSON, json.dumps({"introduction": list(introduction), **comparable}, indent=1) + "\n")
    write_whole(folder / TIMES, times.markdown())
    pictures = {name: image for name, (_, image) in images.items()}
    write_whole(folder / PAGE, page(title, introduction, [losses, rates, times], pictures, analysis.notes))
    return losses
