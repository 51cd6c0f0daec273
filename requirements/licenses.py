"""Prints requirements/LICENSES.md: version and license, as each states it, of every package in requirements/cpu.txt that this platform has.

.venv/bin/python requirements/licenses.py > requirements/LICENSES.md
"""

import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

LOCK = Path(__file__).with_name("cpu.txt")
PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)
VAGUE = ("OSI Approved", "Other/Proprietary License")


def license_of(metadata: importlib.metadata.PackageMetadata) -> str:
    """The SPDX expression if there is one, else the classifiers, else the first line of the license field."""
    classifiers = [c.split(" :: ")[-1] for c in metadata.get_all("Classifier", []) if c.startswith("License ::")]
    classifiers = [c for c in classifiers if c not in VAGUE]
    text = (metadata.get("License") or "").strip().splitlines()
    return metadata.get("License-Expression") or ", ".join(classifiers) or (text[0] if text else "not stated in its metadata")


def table() -> Iterator[str]:
    yield "Written by requirements/licenses.py; the pins and hashes are in requirements/cpu.txt. levanter-mars itself: Apache-2.0.\n"
    yield "| package | version | license |"
    yield "|---|---|---|"
    for name, version in PIN.findall(LOCK.read_text()):
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            yield f"| {name} | {version} | – (other platforms) |"
            continue
        assert distribution.version == version, f"{name} {distribution.version} is installed where {LOCK.name} has {version}: make venv"
        yield f"| {name} | {version} | {license_of(distribution.metadata)} |"


if __name__ == "__main__":
    print("\n".join(table()))
