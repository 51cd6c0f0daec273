"""The file of records survives a kill at every byte."""

import math

import pytest

from levanter_mars.compare.records import Evaluation, Record, append_record, by_rate, read_records, result_of
from levanter_mars.quickstart.training_log import TrainingLog


def record(name: str, rate: float = 1e-3, seed: int = 0) -> Record:
    evaluations = (Evaluation(5, 4.25, 4.5), Evaluation(10, 4.0, 4.125))
    return Record(name, "adamw", rate, seed, False, 10, 64, 5.5, evaluations, 0.25, 1024, {"machine": "one"})


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "runs.jsonl"
    assert read_records(path) == []
    for name in "ab":
        append_record(path, record(name))
    assert read_records(path) == [record("a"), record("b")]
    assert record("a").final_loss == 4.125


def test_a_kill_at_any_byte_loses_at_most_the_record_in_writing(tmp_path):
    path = tmp_path / "runs.jsonl"
    append_record(path, record("a"))
    first = path.stat().st_size
    append_record(path, record("b"))
    whole = path.read_bytes()
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        assert read_records(path) == [record("a")]
        append_record(path, record("b"))
        assert path.read_bytes() == whole


def test_a_line_that_is_no_record_is_named(tmp_path):
    path = tmp_path / "runs.jsonl"
    append_record(path, record("a"))
    with path.open("a") as file:
        file.write('{"id": "b"}\n')
    with pytest.raises(
        ValueError,
        match=r"line 2 of .*runs\.jsonl is no record of a run .*; remove the line, and the run is made again or read from its log",
    ):
        read_records(path)


def test_records_by_rate(tmp_path):
    records = [record("a", 2e-3, 1), record("b", 1e-3, 1), record("c", 2e-3, 0)]
    assert {rate: [r.id for r in runs] for rate, runs in by_rate(records).items()} == {1e-3: ["b"], 2e-3: ["c", "a"]}


def log_of(losses: dict[int, float], held_out: dict[int, float]) -> TrainingLog:
    seconds = {step: 9.0 if step == 0 else 0.5 for step in losses}
    return TrainingLog(losses, held_out, {step: 64 / s for step, s in seconds.items()}, seconds, has_ended=True)


def test_what_a_log_says():
    result = result_of(log_of({0: 6.0, 1: 5.0, 2: 4.0, 3: 3.0}, {1: 5.5, 3: 3.5}), has_diverged=False)
    assert result == {
        "diverged": False,
        "steps": 4,
        "tokens_per_step": 64,
        "first_loss": 6.0,
        "evaluations": (Evaluation(2, 5.5, 5.5), Evaluation(4, 3.5, 3.5)),
        "step_seconds": 0.5,
    }


@pytest.mark.parametrize(
    ("losses", "held_out", "known", "steps"),
    [
        ({0: 6.0, 1: math.nan, 2: math.nan}, {0: 5.0}, False, 1),
        ({0: 6.0, 1: 5.0}, {1: math.nan}, False, 2),
        ({0: 6.0, 1: 5.0}, {1: 5.0}, True, 2),
        ({}, {}, True, 0),
    ],
    ids=["training loss", "held-out loss", "it is known", "before the first step ended"],
)
def test_a_run_that_diverged(losses, held_out, known, steps):
    result = result_of(log_of(losses, held_out), known)
    assert result["diverged"]
    assert result["steps"] == steps
