"""Which runs a study asks for, given what has been recorded. Records here are made up; tests/main/test_compare.py makes real ones."""

import math
import random

import pytest

from levanter_mars.compare.analysis import analyze
from levanter_mars.compare.planning import best_rate, edge_of, make_plan
from levanter_mars.compare.records import Evaluation, Record
from levanter_mars.compare.study import StudyConfig

TRAIN = {"trainer": {"tracker": {"type": "json_logger"}, "require_accelerator": False}}


def study(tmp_path, **fields) -> StudyConfig:
    optimizers = {"adamw": {"type": "adam", "learning_rate": 1e-3}, "mars": {"type": "mars-adamw", "learning_rate": 4e-3}}
    return StudyConfig(results=tmp_path, baseline="adamw", optimizers=optimizers, train=TRAIN, **fields)


def record(run, loss: float) -> Record:
    return Record(
        id=run.id,
        optimizer=run.optimizer,
        learning_rate=run.learning_rate,
        seed=run.seed,
        diverged=math.isinf(loss),
        steps=10,
        tokens_per_step=8,
        first_loss=5.0,
        evaluations=() if math.isinf(loss) else (Evaluation(10, loss, loss),),
        step_seconds=0.1,
    )


def make_all(config: StudyConfig, loss_of, records=()) -> list[Record]:
    """Runs are made one by one, each plan with the records of those before."""
    records = list(records)
    while pending := make_plan(config, records).pending:
        records.append(record(pending[0], loss_of(pending[0])))
    return records


def valley(lowest_at: float):
    return lambda run: 3 + abs(math.log(run.learning_rate / lowest_at)) + 0.01 * run.seed


def tried(records, optimizer: str) -> list[float]:
    return sorted({r.learning_rate for r in records if r.optimizer == optimizer})


def test_the_grid_multiplies_all_rates_of_an_optimizer(tmp_path):
    plan = make_plan(study(tmp_path, seeds=(0,)), [])
    blocks = [run.document["optimizer"] for run in plan.runs if run.optimizer == "mars"]
    assert [(block["learning_rate"], block["learning_rate_1d"]) for block in blocks] == [(2e-3, 1.5e-3), (4e-3, 3e-3), (8e-3, 6e-3)]


def test_runs_differ_in_optimizer_and_seed_alone(tmp_path):
    for run in make_plan(study(tmp_path), []).runs:
        trainer = dict(run.document["trainer"])
        assert trainer.pop("seed") == run.seed
        assert {**run.document, "trainer": trainer, "optimizer": None} == {**TRAIN, "optimizer": None}


def test_a_seed_is_finished_before_the_next(tmp_path):
    runs = make_plan(study(tmp_path, seeds=(3, 7)), []).runs
    assert [(run.seed, run.optimizer) for run in runs] == [(s, o) for s in (3, 7) for o in ("adamw", "mars") for _ in range(3)]


@pytest.mark.parametrize(
    ("lowest_at", "expected"),
    [
        (1e-3, [5e-4, 1e-3, 2e-3]),
        (4e-3, [5e-4, 1e-3, 2e-3, 4e-3, 8e-3]),
        (2.5e-4, [1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3]),
        (1, [5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]),
    ],
    ids=["inside", "high", "low", "out of reach"],
)
def test_a_grid_is_extended_until_its_best_is_inside(tmp_path, lowest_at, expected):
    config = study(tmp_path, seeds=(0, 1), max_extensions=3)
    records = make_all(config, lambda run: valley(lowest_at if run.optimizer == "adamw" else 4e-3)(run))
    assert tried(records, "adamw") == pytest.approx(expected)
    assert tried(records, "mars") == [2e-3, 4e-3, 8e-3]
    assert len(records) == len({r.id for r in records}) == 2 * (len(expected) + 3)


def test_a_later_seed_can_extend_the_grid(tmp_path):
    config = study(tmp_path, seeds=(0, 1))
    records = make_all(config, lambda run: valley(1e-3)(run) if run.seed == 0 else 3 * valley(16e-3)(run))
    assert max(tried(records, "adamw")) > 2e-3
    assert {(r.learning_rate, r.seed) for r in records if r.optimizer == "adamw"} == {
        (rate, seed) for rate in tried(records, "adamw") for seed in (0, 1)
    }


def test_seeds_that_choose_no_rate_are_run_at_the_best_one(tmp_path):
    config = study(tmp_path, seeds=(0, 1, 2), seeds_of_grid=1)
    begun = make_plan(config, [])
    assert ({run.seed for run in begun.runs}, len(begun.runs), begun.least) == ({0}, 6, 6 + 4)
    # By the other seeds 4e-3 would be far better.
    records = make_all(config, lambda run: valley(2e-3 if run.seed == 0 else 4e-3)(run))
    assert [(r.optimizer, r.learning_rate, r.seed) for r in records if r.seed > 0] == [
        (optimizer, 2e-3, seed) for seed in (1, 2) for optimizer in ("adamw", "mars")
    ]
    # 2e-3 was at the edge of both grids, so one rate was added to each.
    assert make_plan(config, records).least == len(records) == 2 * 4 + 4


def test_runs_of_other_seeds_at_other_rates_choose_nothing(tmp_path):
    """A folder may hold them, from before `seeds_of_grid` was set."""
    before = make_all(study(tmp_path, seeds=(0, 1)), lambda run: valley(1e-3 if run.seed == 0 else 8e-3)(run))
    config = study(tmp_path, seeds=(0, 1), seeds_of_grid=1)
    begun = [r for r in before if r.optimizer == "adamw"]
    assert begun[0].seed == 0 and best_rate([r for r in begun if r.learning_rate < 4e-3], config.grid_seeds) == 1e-3
    (row,) = analyze(begun, "adamw", ["adamw"], config.grid_seeds).rows
    assert row.learning_rate == 1e-3


def test_the_best_rate_that_diverges_with_another_seed_stays_and_the_next_best_takes_its_place(tmp_path):
    config = study(tmp_path, seeds=(0, 1, 2), seeds_of_grid=1)
    records = make_all(
        config, lambda run: math.inf if (run.optimizer, run.seed, run.learning_rate) == ("adamw", 1, 1e-3) else valley(1.1e-3)(run)
    )
    assert [(r.learning_rate, r.seed, r.diverged) for r in records if r.optimizer == "adamw" and r.seed > 0] == [
        (1e-3, 1, True),
        (2e-3, 1, False),
        (2e-3, 2, False),
    ]
    # 2e-3 was at the edge then, so a rate was added before it was run with the other seeds.
    assert tried(records, "adamw") == [5e-4, 1e-3, 2e-3, 4e-3]
    assert {r.id for r in records} == {run.id for run in make_plan(config, records).runs}


def test_an_optimizer_that_cannot_be_run_does_not_keep_the_others_from_their_seeds(tmp_path):
    config = study(tmp_path, seeds=(0, 1), seeds_of_grid=1)
    records = []
    while pending := [run for run in make_plan(config, records).pending if run.optimizer != "mars"]:
        records.append(record(pending[0], valley(1e-3)(pending[0])))
    assert [(r.learning_rate, r.seed) for r in records] == [(5e-4, 0), (1e-3, 0), (2e-3, 0), (1e-3, 1)]


def test_a_diverged_run_is_never_the_best(tmp_path):
    config = study(tmp_path, seeds=(0,), max_extensions=1)
    records = make_all(config, lambda run: math.inf if run.learning_rate >= 1e-3 else 4.0)
    assert tried(records, "adamw") == pytest.approx([2.5e-4, 5e-4, 1e-3, 2e-3])
    assert edge_of([r for r in records if r.optimizer == "mars"]) == "low"  # every one diverged


@pytest.mark.parametrize("seeds_of_grid", [None, 1])
def test_stopped_anywhere_a_study_ends_with_the_same_runs(tmp_path, seeds_of_grid):
    config = study(tmp_path, seeds=(0, 1, 2), seeds_of_grid=seeds_of_grid)
    losses = valley(6e-3)
    straight = make_all(config, losses)
    for kept in range(0, len(straight), 3):
        # Another machine's file may have its lines in another order.
        begun = random.Random(kept).sample(straight[:kept], kept)
        again = make_all(config, losses, begun)
        assert sorted(again, key=lambda r: r.id) == sorted(straight, key=lambda r: r.id)


def test_another_config_or_corpus_is_another_run(tmp_path):
    ids = [run.id for run in make_plan(study(tmp_path), [], "a corpus").runs]
    assert not set(ids) & {run.id for run in make_plan(study(tmp_path), [], "another").runs}
    assert not set(ids) & {run.id for run in make_plan(study(tmp_path, schedule={"warmup": 0.2}), [], "a corpus").runs}
    # What does not concern a run leaves it alone.
    more = study(tmp_path / "elsewhere", seeds=(0, 1, 2, 3), work=tmp_path / "work")
    assert set(ids) < {run.id for run in make_plan(more, [], "a corpus").runs}
