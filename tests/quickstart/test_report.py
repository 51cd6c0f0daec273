import json

from levanter_mars.quickstart.report import draw_loss_curve, report
from levanter_mars.quickstart.training_log import parse_training_log


def line(event: str, step: int | None = None, **metrics: float) -> str:
    names = {"loss": "train/loss", "held_out": "eval/loss", "speed": "throughput/tokens_per_second", "seconds": "throughput/duration"}
    record = {"tracker": "json_logger", "event": event, "step": step, "metrics": {names[key]: value for key, value in metrics.items()}}
    return "2026-01-01T00:00:00 - 0 - levanter.json_logger - json_logger.py:73 - INFO :: " + json.dumps(record)


INTERRUPTED = [
    "2026-01-01T00:00:00 - 0 - levanter.trainer - trainer.py:1 - INFO :: starting",
    line("log", 0, loss=5.0, speed=10, seconds=60),
    line("log", 1, loss=4.9, speed=100, seconds=6),
    line("log", 1, held_out=4.8),
    line("log", 2, loss=4.7, speed=100, seconds=6),
    line("log", 3, loss=99.0)[:-20],
]
RESUMED = [
    line("log", 2, loss=4.5, speed=120, seconds=6),
    line("log", 3, loss=4.0, speed=130, seconds=6),
    line("log", 3, held_out=3.9),
    line("finish"),
]


def test_a_resumed_run_is_one_run():
    log = parse_training_log(INTERRUPTED + RESUMED)
    assert log.train_loss == {0: 5.0, 1: 4.9, 2: 4.5, 3: 4.0}
    assert log.held_out_loss == {1: 4.8, 3: 3.9}
    assert log.median_tokens_per_second == 110
    assert log.is_complete(num_train_steps=4)


def test_an_interrupted_run_is_not_complete():
    assert not parse_training_log(INTERRUPTED).is_complete(4)
    assert not parse_training_log(INTERRUPTED + RESUMED[:-1]).is_complete(4)
    assert not parse_training_log(INTERRUPTED + RESUMED).is_complete(5)
    assert not parse_training_log([]).is_complete(4)


def test_report_and_picture(tmp_path):
    log = parse_training_log(INTERRUPTED + RESUMED)
    curve = tmp_path / "loss.png"
    draw_loss_curve(log, untrained=6.9, unigram_entropy=5.5, title="mars-adamw", path=curve)
    assert curve.read_bytes().startswith(b"\x89PNG")
    text = report(log, untrained=6.9, unigram_entropy=5.5, checkpoint=tmp_path / "checkpoint", curve=curve)
    assert "held-out loss before     6.900" in text
    assert "held-out loss after      3.900   after 4 steps" in text
    assert "unigram entropy          5.500" in text
    assert "110   tokens a second" in text
    assert "1.3   minutes" in text
    assert str(curve) in text
    assert str(tmp_path / "checkpoint") in text
