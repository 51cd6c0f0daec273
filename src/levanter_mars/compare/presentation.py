"""The analysis as text: Markdown tables, and one page of HTML that holds its pictures.

Everything but the times is a function of the runs' losses, so that it is the same, byte for byte, for two runs of one study.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jinja2

from levanter_mars.compare.analysis import Analysis, Row

NONE = "–"
EDGES = {"low": "lowest", "high": "highest", None: ""}
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .8rem; text-align: right; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
</style>
<h1>{{ title }}</h1>
{% for line in introduction %}<p>{{ line }}</p>
{% endfor %}
{% for table in tables %}<h2>{{ table.title }}</h2>
<p>{{ table.caption }}</p>
<div class="table"><table>
<tr>{% for cell in table.header %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endfor %}
{% for name, image in images.items() %}<h2>{{ name }}</h2>
<img alt="{{ name }}" src="data:image/png;base64,{{ image }}">
{% endfor %}
{% if notes %}<h2>Notes</h2>
<ul>
{% for note in notes %}<li>{{ note }}</li>
{% endfor %}</ul>
{% endif %}</html>
"""


@dataclass(frozen=True)
class Table:
    title: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        return f"## {self.title}\n\n{self.caption}\n\n{table}\n"


def loss_table(analysis: Analysis) -> Table:
    baseline = analysis.baseline
    return Table(
        "Held-out loss",
        f"Nats a token after {analysis.steps:,} steps of {analysis.tokens_per_step:,} tokens, mean ± standard deviation over seeds, at "
        "each optimizer's best learning rate; the seeds that chose it are among them. The difference is taken seed by seed. "
        f"{baseline}'s loss counts as reached at the first evaluation whose mean is at or below it.",
        (
            "optimizer",
            "learning rate",
            "rates tried",
            "seeds",
            "loss",
            f"minus {baseline}",
            f"steps to {baseline}'s loss",
            "tokens",
            "runs diverged",
            "optimizer state, bytes",
        ),
        [_loss_cells(row) for row in analysis.rows],
    )


def rate_table(analysis: Analysis) -> Table:
    rows = [
        [
            row.optimizer,
            f"{rate.learning_rate:g}",
            NONE if rate.mean is None or rate.diverged else _with_spread(rate.mean, rate.spread),
            f"{rate.diverged} of {rate.runs}",
        ]
        for row in analysis.rows
        for rate in row.rates
    ]
    caption = "Held-out loss at the end, nats a token, mean ± standard deviation over the seeds that choose the rate."
    return Table("All learning rates", caption, ("optimizer", "learning rate", "loss", "runs diverged"), rows)


def time_table(analysis: Analysis) -> Table:
    base = next((t.step_seconds for t in analysis.timings.rows if t.optimizer == analysis.baseline), None)
    rows = [
        [t.optimizer, f"{t.step_seconds * 1000:,.1f}", NONE if base is None else f"{t.step_seconds / base:.2f}", f"{t.highest * 1000:,.1f}"]
        for t in analysis.timings.rows
    ]
    caption = (
        "Milliseconds that a tenth of a run's steps stay below: the least of an optimizer's runs, its ratio to "
        f"{analysis.baseline}'s, and the most. These are measured, so they differ from one run of the study to the next, and with what "
        "else the machine did."
    )
    if analysis.timings.machine is not None:
        caption += f" The machine: {analysis.timings.machine}."
    if analysis.timings.elsewhere:
        caption += f" The times of {analysis.timings.elsewhere} runs on other kinds of machine are left out."
    return Table("Time a step", caption, ("optimizer", "time a step, ms", f"÷ {analysis.baseline}", "slowest run, ms"), rows)


def page(title: str, introduction: Sequence[str], tables: Sequence[Table], images: Mapping[str, bytes], notes: Sequence[str]) -> str:
    """A page of HTML that needs no other file. Images are PNG, by their titles."""
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(PAGE)
    encoded = {name: base64.b64encode(image).decode() for name, image in images.items()}
    return template.render(title=title, introduction=introduction, tables=tables, images=encoded, notes=notes)


def _loss_cells(row: Row) -> list[str]:
    edge = f" ({EDGES[row.edge]})" if row.edge else ""
    return [
        row.optimizer,
        NONE if row.learning_rate is None else f"{row.learning_rate:g}{edge}",
        str(len(row.rates)),
        str(row.seeds),
        "diverged" if row.loss is None else _with_spread(row.loss, row.spread),
        NONE if row.difference is None else _with_spread(row.difference, row.difference_spread, sign="+"),
        *(NONE if x is None else f"{x:,}" for x in (row.steps_to_baseline, row.tokens_to_baseline)),
        str(row.diverged),
        NONE if row.state_bytes is None else f"{row.state_bytes:,}",
    ]


def _with_spread(value: float, spread: float | None, sign: str = "") -> str:
    return f"{value:{sign}.4f}" + ("" if spread is None else f" ± {spread:.4f}")
