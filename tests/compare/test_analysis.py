"""The table's numbers, against ones worked out by hand."""

import math

import pytest
from comparisons import BASELINE, OTHER, record

from levanter_mars.compare.analysis import Timing, Timings, analyze


def test_each_at_its_best_rate():
    analysis = analyze(BASELINE + OTHER, "adamw", ["adamw", "mars"])
    adamw, mars = analysis.rows
    assert (analysis.steps, analysis.tokens_per_step) == (30, 100)
    assert (adamw.optimizer, adamw.learning_rate, adamw.edge, len(adamw.rates), adamw.seeds) == ("adamw", 2e-3, None, 3, 2)
    assert adamw.loss == pytest.approx(4.1)
    assert adamw.spread == pytest.approx(0.2 / math.sqrt(2))
    assert (adamw.difference, adamw.steps_to_baseline, adamw.tokens_to_baseline, adamw.state_bytes) == (None, 30, 3000, 80)
    # 2e-2 has a lower loss with one seed, but diverged with the other.
    assert (mars.learning_rate, mars.edge, mars.diverged, mars.paired_seeds) == (1e-2, "low", 1, 2)
    assert mars.loss == pytest.approx(3.95)
    assert mars.difference == pytest.approx(-0.15)
    assert mars.difference_spread == pytest.approx(0.1 / math.sqrt(2))
    assert (mars.steps_to_baseline, mars.tokens_to_baseline) == (20, 2000)
    assert [(rate.learning_rate, rate.losses, rate.diverged) for rate in mars.rates] == [(1e-2, (3.8, 4.1), 0), (2e-2, (3.0,), 1)]


def test_curves_and_times():
    analysis = analyze(BASELINE + OTHER, "adamw", ["adamw", "mars"])
    curve = analysis.curves[1]
    assert (curve.optimizer, curve.steps, curve.lowest, curve.highest) == ("mars", (10, 20, 30), (4.8, 4.05, 3.8), (4.8, 4.15, 4.1))
    assert curve.mean == pytest.approx((4.8, 4.1, 3.95))
    # Of every rate, but not of a run that diverged.
    assert analysis.timings == Timings([Timing("adamw", 0.5, 0.5), Timing("mars", 0.5625, 0.75)], None, 0)


def test_times_are_compared_on_one_machine():
    def timed(optimizer, seed, machine, seconds):
        return record(optimizer, 1e-3, seed, [5.0, 4.0], step_seconds=seconds, made_by={"machine": machine})

    fast = [timed("adamw", seed, "fast", 0.1) for seed in range(3)]
    slow = [timed("adamw", 3, "slow", 0.5), timed("mars", 3, "slow", 0.75)]
    analysis = analyze(fast + slow, "adamw", ["adamw", "mars"])
    assert analysis.timings == Timings([Timing("adamw", 0.5, 0.5), Timing("mars", 0.75, 0.75)], "slow", 3)


def test_what_a_reader_must_know():
    analysis = analyze(BASELINE + OTHER, "adamw", ["adamw", "mars"])
    assert analysis.notes == [
        "mars: 1 of its runs diverged, at rates that are not the best.",
        "mars: its best learning rate is the lowest of those tried; a better one may lie beyond.",
        # t = -0.15 / 0.05 with one degree of freedom: p = 1 - 2 atan(3) / pi.
        "mars: its difference to adamw may be chance (p = 0.20 in a paired t test over 2 seeds).",
    ]
    noisy = [record("mars", 1e-2, 0, [4, 4, 3.8]), record("mars", 1e-2, 1, [4, 4, 4.3])]
    assert analyze(BASELINE + noisy, "adamw", ["adamw", "mars"]).notes == [
        "One learning rate only, so nothing says whether another would be better: mars.",
        "mars: its difference to adamw may be chance (p = 0.80 in a paired t test over 2 seeds).",
    ]
    apart = [record("mars", 1e-2, 0, [4, 4, 3.8], first_loss=6.0001)]
    assert analyze(BASELINE + apart, "adamw", ["adamw", "mars"]).notes == [
        "Seed 0: the first batch's loss before any update is 6.00000 in adamw-0.001-0 and 6.00010 in mars-0.01-0. In float32 they did not "
        "start from the same weights and data; where less is computed with, rounding may do this.",
        "One seed only, so nothing says how far another seed's loss would be: mars.",
        "One learning rate only, so nothing says whether another would be better: mars.",
    ]


def test_an_optimizer_that_always_diverges_is_in_the_table():
    analysis = analyze([*BASELINE, record("mars", 1e-2, 0), record("mars", 1e-2, 1)], "adamw", ["adamw", "mars"])
    row = analysis.rows[1]
    assert (row.optimizer, row.loss, row.learning_rate, row.steps_to_baseline, row.diverged) == ("mars", None, None, None, 2)
    assert analysis.notes == [
        "One learning rate only, so nothing says whether another would be better: mars.",
        "mars: every learning rate has a run that diverged.",
    ]
    assert [curve.optimizer for curve in analysis.curves] == ["adamw"]


def test_the_rate_is_chosen_by_the_seeds_that_every_rate_has():
    begun = [r for r in BASELINE if r.seed == 0 or r.learning_rate == 2e-3]
    (row,) = analyze([*begun, record("adamw", 2e-3, 2, [6.0, 6.0, 6.0])], "adamw", ["adamw", "mars"]).rows
    assert (row.seeds, row.learning_rate, row.edge) == (3, 2e-3, None)
    assert row.loss == pytest.approx((4.0 + 4.2 + 6.0) / 3)
    assert [(rate.losses, rate.runs) for rate in row.rates] == [((4.2,), 1), ((4.0,), 3), ((4.1,), 1)]


def test_a_rate_that_diverged_with_any_seed_is_not_the_best():
    begun = [*(r for r in BASELINE if r.seed == 0), record("adamw", 2e-3, 1), record("adamw", 4e-3, 1, [5.0, 4.6, 4.3])]
    (row,) = analyze(begun, "adamw", ["adamw"]).rows
    assert (row.learning_rate, row.seeds, row.diverged) == (4e-3, 2, 1)
    assert row.loss == pytest.approx(4.2)


def test_runs_that_cannot_be_compared():
    longer = record("mars", 1e-2, 0, [5.0, 4.5, 4.2, 4.0])
    with pytest.raises(ValueError, match=r"mars-0\.01-0 has 40 steps and adamw-0\.001-0 has 30; only runs with one schedule"):
        analyze([*BASELINE, longer], "adamw", ["adamw", "mars"])
    larger = record("mars", 1e-2, 0, [5.0, 4.5, 4.2], tokens_per_step=200)
    with pytest.raises(ValueError, match="has 200 tokens a step and"):
        analyze([*BASELINE, larger], "adamw", ["adamw", "mars"])
    with pytest.raises(ValueError, match=r"none of 1 runs came to the end of its schedule"):
        analyze([record("mars", 1e-2, 0)], "adamw", ["adamw", "mars"])


@pytest.mark.parametrize("of_baseline", [[], [record("adamw", 1e-3, 0), record("adamw", 1e-3, 1)]], ids=["not run", "diverged"])
def test_without_a_baseline_there_is_a_table(of_baseline):
    analysis = analyze([*of_baseline, *OTHER], "adamw", ["adamw", "mars"])
    row = analysis.rows[-1]
    assert (row.optimizer, row.loss, row.difference, row.steps_to_baseline) == ("mars", pytest.approx(3.95), None, None)
    assert "Nothing is compared with adamw: no learning rate of it came to the end with every seed." in analysis.notes


def test_versions_that_differ_are_noted():
    runs = [record("adamw", 1e-3, seed, [5.0, 4.0], made_by={"machine": f"m{seed}", "jax": f"0.{seed}"}) for seed in (1, 2)]
    assert "The runs were made with several versions of jax: 0.1, 0.2." in analyze(runs, "adamw", ["adamw"]).notes
