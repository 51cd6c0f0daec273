"""What is kept of a study's text beside its results."""

import json

import pytest

from levanter_mars.compare.data import KEPT, keep_data, kept_data, present_data
from levanter_mars.compare.study import StudyConfig


def study(tmp_path) -> StudyConfig:
    source = {"type": "url", "train_urls": [str(tmp_path / "text" / "*.jsonl")]}
    train = {
        "data": {"tokenizer": "gpt2", "components": {"c": {"source": source}}},
        "trainer": {"tracker": {"type": "json_logger"}, "require_accelerator": False},
    }
    return StudyConfig(tmp_path / "results", "adamw", optimizers={"adamw": {"type": "adam", "learning_rate": 1e-3}}, train=train)


def write(tmp_path, **files: str) -> None:
    (tmp_path / "text").mkdir(exist_ok=True)
    for name, text in files.items():
        (tmp_path / "text" / f"{name}.jsonl").write_text(text)


def test_results_on_other_text_are_refused(tmp_path):
    write(tmp_path, a="one", b="two")
    data = keep_data(study(tmp_path))
    assert kept_data(study(tmp_path)) == data == keep_data(study(tmp_path))
    kept = (tmp_path / "results" / KEPT).read_text()
    write(tmp_path, b="TWO")
    with pytest.raises(ValueError, match=r"results is .*/results, whose runs are on other text, and this is other text: name another"):
        keep_data(study(tmp_path))
    assert (tmp_path / "results" / KEPT).read_text() == kept
    write(tmp_path, b="two")
    assert keep_data(study(tmp_path)) == data


def test_text_is_told_apart_by_its_end_too_and_need_not_be_local(tmp_path):
    write(tmp_path, a="x" * 3_000_000 + "1")
    before = present_data(study(tmp_path)).digest
    write(tmp_path, a="x" * 3_000_000 + "2")
    assert present_data(study(tmp_path)).digest != before
    (tmp_path / "text" / "a.jsonl").unlink()
    assert present_data(study(tmp_path)).digest == ""


def test_results_of_another_python_are_named(tmp_path):
    corpus = {
        **{"digest": "of another", "python": "3.11.0", "vocab_size": 300, "train_documents": 1, "validation_documents": 1},
        **{"train_tokens": 1, "unigram_entropy": 1.0},
    }
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / KEPT).write_text(json.dumps({"digest": "of another", "corpus": corpus}))
    with pytest.raises(ValueError, match=r"whose runs are on Python 3\.11\.0's text, and this is other text"):
        keep_data(study(tmp_path))
