"""Records and logs of runs that nobody made, for tests of what is read and computed from them."""

import logging
from pathlib import Path

from levanter.tracker.json_logger import JsonLoggerTracker

from levanter_mars.compare.records import Evaluation, Record

STEPS = 6


def record(optimizer: str, rate: float, seed: int, curve=None, **fields) -> Record:
    """`curve` is the held-out loss after 10, 20, … steps; None for a run that diverged."""
    evaluations = tuple(Evaluation(10 * (i + 1), loss + 0.5, loss) for i, loss in enumerate(curve or ()))
    defaults = {
        "diverged": curve is None,
        "steps": 10 * len(curve or ()),
        "tokens_per_step": 100,
        "first_loss": 6.0 + seed,
        "step_seconds": 0.5,
        "state_bytes": 80,
    }
    return Record(f"{optimizer}-{rate}-{seed}", optimizer, rate, seed, evaluations=evaluations, **{**defaults, **fields})


BASELINE = [
    record("adamw", 1e-3, 0, [5.0, 4.5, 4.2]),
    record("adamw", 1e-3, 1, [5.0, 4.5, 4.4]),
    record("adamw", 2e-3, 0, [5.0, 4.3, 4.0]),
    record("adamw", 2e-3, 1, [5.0, 4.3, 4.2]),
    record("adamw", 4e-3, 0, [5.0, 4.6, 4.1]),
    record("adamw", 4e-3, 1, [5.0, 4.6, 4.3]),
]
OTHER = [
    record("mars", 1e-2, 0, [4.8, 4.05, 3.8], state_bytes=120, step_seconds=0.75),
    record("mars", 1e-2, 1, [4.8, 4.15, 4.1], state_bytes=120, step_seconds=0.625),
    record("mars", 2e-2, 0, state_bytes=120, step_seconds=0.25),
    record("mars", 2e-2, 1, [5.0, 4.0, 3.0], state_bytes=120, step_seconds=0.5625),
]


def log_run(tracker, steps: int = STEPS, stop_after: int = STEPS, lower_by: float = 0) -> None:
    """What train_lm logs of a run with an evaluation every third step; its held-out losses can be lower."""
    tracker.log_summary({"parameter_count": 10})
    for step in range(stop_after):
        tracker.log({"train/loss": 5.0 - step / 4, "global_step": step, "run_progress": (step + 1) / steps}, step=step)
        tracker.log({"throughput/tokens_per_second": 32.0, "throughput/duration": 0.5}, step=step)
        if step % 3 == 2:
            tracker.log({"eval/loss": 4.5 - step / 4 - lower_by, "eval/note": "x" * 20_000}, step=step)
    tracker.finish()


def json_log(folder: Path, name: str = "run.log", **kwargs) -> Path:
    path = folder / name
    logger = logging.Logger("levanter.json_logger")
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s - %(name)s :: %(message)s"))
    logger.addHandler(handler)
    log_run(JsonLoggerTracker(logger), **kwargs)
    handler.close()
    return path
