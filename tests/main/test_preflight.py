"""The command: what it refuses, what it writes, what it exits with."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import levanter.config
import pytest

from levanter_mars.main.preflight import run

ROOT = Path(__file__).parents[2]
SMALL = ["--model.num_layers", "2", "--model.hidden_dim", "128", "--model.num_heads", "2", "--model.max_seq_len", "128"]
SMALL += ["--vocab_size", "1024", "--trainer.train_batch_size", "16"]
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed; make test installs it")


def call(*arguments: str) -> int:
    return levanter.config.main(run, args=["--config", str(ROOT / "config/mars_gpt2.yaml"), *SMALL, *arguments])()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--topology", "v5e:5x5"], "v5e comes in the sizes 1x1, 2x2"),
        ([], "its chip must be one of v4"),
        (["--topology", "v5e:2x2", "--compare", "adam,adm"], "compare names 'adm'; it must be of adam, "),
        (["--topology", "v5e:2x2", "--json", "no/such/folder/r.json"], "is no directory"),
    ],
)
def test_refuses_before_it_looks_at_devices(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(*arguments)


@needs_libtpu
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--trainer.train_batch_size", "6"], r"train_batch_size \(6\) must be divisible"),
        (["--model.hidden_dim", "130", "--trainer.train_batch_size", "16"], "axis embed, of size 130, .* multiple of 4"),
    ],
)
def test_a_config_that_does_not_go_with_the_mesh_is_refused_before_compilation(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        call("--topology", "v5e:2x2", *arguments)


@needs_libtpu
@pytest.mark.slow
def test_compares_and_writes(tmp_path, capsys):
    picture, document = tmp_path / "memory.png", tmp_path / "report.json"
    assert (
        call(
            "--topology",
            "v5e:2x2",
            "--compare",
            "[{type: adam, weight_decay: 0}, muon, mars-adamw]",  # Levanter's Muon as it comes does not take Levanter's GPT-2
            "--json",
            str(document),
            "--plot",
            str(picture),
        )
        == 1
    )
    adam, mars = json.loads(document.read_text())
    assert (adam["optimizer"], mars["optimizer"]) == ("adam", "mars-adamw")
    # A quarter of four bytes for each matrix entry: 2 layers of 12 width², and embeddings of 1,024 tokens and 128 positions.
    assert mars["memory"]["optimizer: last_gradient"] == 2 * 12 * 128**2 + (1024 + 128) * 128
    assert "optimizer: last_gradient" not in adam["memory"]
    assert adam["roofline"]["step"] == max(adam["roofline"][name] for name in ("compute", "memory", "links"))
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert re.search(r"^muon on v5e:2x2: cannot tell: .*optim/muon.py, line \d+, asserts what does not hold", printed, re.MULTILINE)
    assert "https://cloud.google.com/tpu/docs/v5e" in printed
    assert f"{mars['total'] / 2**30:.3f}" in printed
    assert jax.default_backend() == "cpu"


@needs_libtpu
@pytest.mark.slow
def test_what_does_not_fit_is_status_2(capsys):
    wide = ["--model.hidden_dim", "8192", "--model.num_heads", "64", "--trainer.train_batch_size", "1"]
    assert call("--topology", "v5e:1x1", *wide) == 2
    assert "does not fit, needs" in capsys.readouterr().out


@needs_libtpu
@pytest.mark.slow
def test_gpt2_xl_does_not_fit_one_chip(capsys):
    axes = ["--trainer.mesh.axes", "{data: -1, replica: 1}", "--vocab_size", "50257"]
    assert levanter.config.main(run, args=["--config", str(ROOT / "config/mars_gpt2_xl.yaml"), "--topology", "v5e:1x1", *axes])() == 2
    printed = capsys.readouterr().out
    assert re.search(r"does not fit, needs [\d.]+ GiB of 15\.75, [\d.]+ too many", printed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v5e:5x5"], "preflight cannot tell: topology is 'v5e:5x5'"),
        (["--topology", "v5e:2x2", "--optimizer.type", "adm"], "preflight.py: error: argument --optimizer.type: invalid choice: 'adm'"),
    ],
)
def test_what_cannot_be_told_is_status_1(arguments, message):
    command = [sys.executable, "-m", "levanter_mars.main.preflight", "--config", "config/mars_gpt2.yaml"]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith(message)


def test_without_libtpu_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)  # as if it were not installed
    with pytest.raises(RuntimeError, match=r"^compiling for TPUs needs libtpu: pip install 'levanter-mars\[tpu\]'$"):
        call("--topology", "v6e:2x4")
