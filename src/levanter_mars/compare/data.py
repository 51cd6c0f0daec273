"""Which text a study's runs read. It is kept with their results, so that runs on another text are never compared with them."""

import glob
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from levanter_mars.compare.records import write_whole
from levanter_mars.compare.study import StudyConfig
from levanter_mars.quickstart.corpus_folder import Manifest, ensure_corpus

KEPT = "data.json"
FILE_LISTS = ("train_urls", "validation_urls")
SAMPLE = 2**20
"""Bytes of a file's beginning and of its end that tell it from another of the same size: reading all of a large one takes long."""


class Data(NamedTuple):
    digest: str
    """Changes with the corpus, or with any local file of the data; "" where none is known."""
    corpus: Manifest | None
    """Of Python's standard library, if the study asks for that."""


def present_data(study: StudyConfig) -> Data:
    """What runs would read now. The corpus is built if the study asks for one."""
    if study.standard_library_vocab is None:
        return Data(_digest_of_files(study.train.get("data")), None)
    corpus = ensure_corpus(Path(study.train["data"]["tokenizer"]).parent, study.standard_library_vocab)
    return Data(corpus.digest, corpus)


def keep_data(study: StudyConfig) -> Data:
    """Remembers in the results folder what the runs read that are made now.

    Raises:
        ValueError: the runs that are there read another text.
    """
    data, kept = present_data(study), kept_data(study)
    if kept is not None and kept.digest != data.digest:
        of = [f"Python {corpus.python}'s text" if corpus else "other text" for corpus in (kept.corpus, data.corpus)]
        raise ValueError(f"results is {study.results}, whose runs are on {of[0]}, and this is {of[1]}: name another folder")
    study.results.mkdir(parents=True, exist_ok=True)
    document = {"digest": data.digest, "corpus": None if data.corpus is None else asdict(data.corpus)}
    write_whole(study.results / KEPT, json.dumps(document, indent=2) + "\n")
    return data


def kept_data(study: StudyConfig) -> Data | None:
    """What the runs in the results folder read; None if there is none."""
    path = study.results / KEPT
    if not path.exists():
        return None
    document = json.loads(path.read_text())
    return Data(document["digest"], None if document["corpus"] is None else Manifest(**document["corpus"]))


def _digest_of_files(block: Any) -> str:
    files = [path for pattern in _listed(block) for path in sorted(glob.glob(pattern, recursive=True)) if Path(path).is_file()]
    digest = hashlib.sha256()
    for path in files:
        with Path(path).open("rb") as file:
            size = file.seek(0, 2)
            digest.update(f"{size}\n".encode())
            for start in (0, max(0, size - SAMPLE)):
                file.seek(start)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest() if files else ""


def _listed(block: Any) -> Iterator[str]:
    """Every entry of a list of files, however deep in the data's block."""
    if isinstance(block, dict):
        for name, value in block.items():
            if name in FILE_LISTS:
                yield from [value] if isinstance(value, str) else value or ()
            else:
                yield from _listed(value)
