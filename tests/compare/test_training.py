"""What stands between two studies in one folder, and between a log and the progress bar. tests/main/test_compare.py makes real runs."""

import json
import subprocess
import sys

from levanter_mars.compare.training import DIVERGED, steps_taken, study_lock


def test_a_run_whose_study_was_killed_is_waited_for(tmp_path, capsys):
    with study_lock(tmp_path) as lock:
        program = "import sys; sys.stdin.read(); open(sys.argv[1], 'w')"
        run = subprocess.Popen([sys.executable, "-c", program, tmp_path / "ended"], stdin=subprocess.PIPE, pass_fds=[lock])
        ender = subprocess.Popen(["sleep", "1"], stdout=run.stdin)
    # The run reads until nobody holds the other end of its input any more.
    run.stdin.close()
    with study_lock(tmp_path):
        assert (tmp_path / "ended").exists()
    assert [run.wait(), ender.wait()] == [0, 0]
    assert "Another process makes a run of the study in" in capsys.readouterr().err


def test_a_folder_that_nobody_works_in_is_not_waited_for(tmp_path, capsys):
    for _ in range(2):
        with study_lock(tmp_path):
            pass
    assert capsys.readouterr().err == ""


def test_steps_by_the_end_of_a_log(tmp_path):
    log = tmp_path / "run.log"
    assert steps_taken(log) == 0
    lines = [json.dumps({"event": "log", "metrics": {"global_step": step, "filler": "x" * 200}}) for step in range(300)]
    log.write_text("starting\n")
    assert steps_taken(log) == 0
    log.write_text("\n".join(lines)[:-230])
    assert steps_taken(log) == 299


def test_how_levanter_says_that_a_run_diverged():
    assert DIVERGED.search("Traceback\nRuntimeError: Loss is NaN\n")
    assert DIVERGED.search("Traceback\nRuntimeError: Loss is Inf")
    assert not DIVERGED.search("W levanter: was it a RuntimeError: Loss is NaN?\n")
