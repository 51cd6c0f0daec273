"""A corpus of real text that is on every machine: what the running Python ships.

The documents are the articles of `pydoc_data.topics` (Python's reference manual, in English) and the modules at the top level of
the standard library (English in docstrings and comments, and code). Which document is held out depends on its name alone.
"""

import hashlib
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

HELD_OUT_ONE_IN = 20
MODULES_THAT_ARE_DATA = {"this.py"}
"""Left out: its text is enciphered."""


class Corpus(NamedTuple):
    train: dict[str, str]
    validation: dict[str, str]


def standard_library_corpus() -> Corpus:
    """Every document by its name, in the names' order: a function of the Python version alone."""
    return split(standard_library_documents())


def standard_library_documents() -> dict[str, str]:
    articles = {f"topics/{name}": text for name, text in topics.items()}
    folder = Path(sysconfig.get_path("stdlib"))
    modules = {f"modules/{path.name}": _read(path) for path in folder.glob("*.py") if path.name not in MODULES_THAT_ARE_DATA}
    return {name: text for name, text in sorted((articles | modules).items()) if text.strip()}


def split(documents: Mapping[str, str]) -> Corpus:
    """Puts about one document in twenty into the held-out set, chosen by a hash of its name."""
    held_out = {name for name in documents if hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_ONE_IN == 0}
    return Corpus(
        train={name: text for name, text in documents.items() if name not in held_out},
        validation={name: text for name, text in documents.items() if name in held_out},
    )


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
