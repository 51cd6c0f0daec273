"""The files of a comparison, from records whose table test_analysis.py has worked out."""

import json
import re

from comparisons import BASELINE, OTHER, record

from levanter_mars.compare.analysis import analyze
from levanter_mars.compare.report import write_report

PICTURES = ["loss_curves.png", "learning_rates.png", "loss_against_time.png"]


def write(folder, records):
    folder.mkdir()
    write_report(folder, analyze(records, "adamw", ["adamw", "mars", "<always>"]), "A title", ["What was run."])


def test_files(tmp_path):
    write(tmp_path / "a", BASELINE + OTHER)
    folder = tmp_path / "a"
    assert sorted(p.name for p in folder.iterdir()) == sorted(["index.html", "table.json", "table.md", "times.md", *PICTURES])
    table = (folder / "table.md").read_text()
    assert "| adamw | 0.002 | 3 | 2 | 4.1000 ± 0.1414 | – | 30 | 3,000 | 0 | 80 |" in table
    assert "| mars | 0.01 (lowest) | 2 | 2 | 3.9500 ± 0.2121 | -0.1500 ± 0.0707 | 20 | 2,000 | 1 | 120 |" in table
    assert "| mars | 0.02 | – | 1 of 2 |" in table
    assert "- mars: 1 of its runs diverged, at rates that are not the best." in table
    assert "| mars | 562.5 | 1.12 | 750.0 |" in (folder / "times.md").read_text()
    assert json.loads((folder / "table.json").read_text())["rows"][1]["steps_to_baseline"] == 20
    for name in PICTURES:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_the_page_needs_no_other_file(tmp_path):
    write(tmp_path / "a", [*BASELINE, *OTHER, record("<always>", 1e-2, 0), record("<always>", 1e-2, 1)])
    page = (tmp_path / "a" / "index.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]{30})', page)
    assert len(sources) == 3
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "<td>&lt;always&gt;</td>" in page
    assert "3.9500 ± 0.2121" in page


def test_times_do_not_change_the_tables(tmp_path):
    write(tmp_path / "a", [record("adamw", 1e-3, 0, [5.0, 4.0], step_seconds=0.5)])
    write(tmp_path / "b", [record("adamw", 1e-3, 0, [5.0, 4.0], step_seconds=0.7)])
    for name in ("table.md", "table.json", "loss_curves.png", "learning_rates.png"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert (tmp_path / "a" / "times.md").read_text() != (tmp_path / "b" / "times.md").read_text()
