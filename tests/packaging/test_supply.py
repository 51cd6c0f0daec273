"""What an installation brings along: pinned by hash, with its license; and one sentence where it does not fit."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
PIN = re.compile(r"^([A-Za-z0-9._-]+(?:\[[a-z0-9,-]+\])?)==(\S+)", re.MULTILINE)


@pytest.mark.parametrize("lock", sorted(REQUIREMENTS.glob("*.txt")), ids=lambda lock: lock.name)
def test_every_package_is_pinned_by_hash(lock):
    # A requirement and its hashes are one logical line.
    lines = [line.strip() for line in lock.read_text().replace("\\\n", " ").splitlines()]
    required = [line for line in lines if line and not line.startswith("#")]
    assert required
    assert [line for line in required if not (PIN.match(line) and "--hash=sha256:" in line)] == []


def test_the_list_of_licenses_is_of_what_is_pinned():
    rows = [line.strip("| ").split(" | ") for line in (REQUIREMENTS / "LICENSES.md").read_text().splitlines() if line.startswith("| ")]
    header, *rows = rows
    assert header == ["package", "version", "license"]
    assert [(name, version) for name, version, _ in rows] == PIN.findall((REQUIREMENTS / "cpu.txt").read_text())
    assert all(license for _, _, license in rows)


def importing(before: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sys; {before}; import levanter_mars"], capture_output=True, text=True, timeout=300
    )


def test_a_levanter_that_does_not_fit_is_named_in_one_sentence():
    # A stand-in for one from before it could skip steps.
    done = importing("sys.modules['levanter.optim.skipstep'] = None")
    assert done.returncode == 1
    assert re.match(
        r"ImportError: levanter-mars cannot be imported with marin-levanter \S+, marin-haliax \S+, jax \S+, optax \S+, equinox \S+: "
        r"ModuleNotFoundError: import of levanter\.optim\.skipstep halted.*; the table in its README says which versions of Levanter it "
        r"works with, and what they need$",
        done.stderr.strip().splitlines()[-1],
    )
