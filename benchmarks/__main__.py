"""Every figure of the README's section on speed: measures what is missing, then writes the tables and the picture.

    python -m benchmarks

benchmarks/README.md says what is measured, how long it takes and how to measure again.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import draccus
from tqdm import tqdm

from benchmarks import report

RESULTS = Path(__file__).parent / "results"
OPTIMIZERS = [
    *("adam", "lion", "muon", "levanter's mars, repaired"),
    *("mars-adamw", "mars-lion", "mars-shampoo", "mars-shampoo, embeddings by adamw", "mars-m", "mars-m, lean"),
]
ALL = [("small", "v5e:4x4"), ("xl", "v5e:8x8")]
"""Where every optimizer is compiled."""
GROWTH = [("small", "v5e:8x8"), ("small", "v5e:16x16"), ("medium", "v5e:8x8"), ("large", "v5e:8x8"), ("xl", "v5e:16x16")]
"""Where mars-m is, to see how it grows with chips and with the model."""
PACKAGES = ("jax", "jaxlib", "libtpu", "marin-levanter", "marin-haliax", "levanter-mars")


@dataclass
class SuiteConfig:
    results: Path = RESULTS
    """Folder of what was measured, tables and picture."""
    again: bool = False
    """Measure what has been measured."""
    rounds: int = 40
    """Of benchmarks/update_time.py."""
    report_only: bool = False
    """Write tables and picture of what was measured so far."""


def measurements(config: SuiteConfig) -> dict[Path, list[str]]:
    """The command of every measurement by the file that it writes."""
    cells = [(size, topology, name) for size, topology in ALL for name in OPTIMIZERS]
    cells += [(size, topology, "mars-m") for size, topology in GROWTH] + [("xl", "v5e:16x16", "muon")]
    commands = {}
    for size, topology, name in cells:
        file = re.sub(r"[^\w-]+", "_", f"{size} {topology} {name}") + ".json"
        options = ["--size", size, "--topology", topology, "--optimizers", json.dumps([name])]
        commands[config.results / "tpu" / file] = ["benchmarks.tpu_update", *options]
    return commands | {config.results / "update_time.json": ["benchmarks.update_time", "--rounds", str(config.rounds)]}


def measure(file: Path, command: list[str]) -> None:
    """In a process of its own, whose memory goes with it; the file appears when it is complete."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        done = subprocess.run([sys.executable, "-m", *command, "--json", str(result)], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"python -m {' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        document = {"packages": {name: importlib.metadata.version(name) for name in PACKAGES}} | json.loads(result.read_text())
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=2) + "\n")
    partial.replace(file)


@draccus.wrap()
def main(config: SuiteConfig) -> None:
    todo = {} if config.report_only else {f: c for f, c in measurements(config).items() if config.again or not f.exists()}
    for file, command in (progress := tqdm(todo.items(), unit="measurement")):
        progress.set_description(file.stem)
        measure(file, command)
    print(report.write(config.results))


if __name__ == "__main__":
    main()
