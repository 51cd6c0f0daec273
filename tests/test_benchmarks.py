"""The README's tables are those of what was measured."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_readmes_tables_follow_from_the_committed_measurements(tmp_path):
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "results")
    (tmp_path / "results" / "growth.png").unlink()
    command = [sys.executable, "-m", "benchmarks", "--report_only", "true", "--results", str(tmp_path / "results")]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout.strip()
    readme = (ROOT / "README.md").read_text()
    start, end = "<!-- benchmarks/results/tables.md -->\n", "\n<!-- end -->"
    assert readme.count(start) == readme.count(end) == 1
    assert readme[readme.index(start) + len(start) : readme.index(end)] == printed
    assert (tmp_path / "results" / "tables.md").read_text().strip() == printed
    assert (tmp_path / "results" / "growth.png").read_bytes().startswith(b"\x89PNG")
