"""Trains with the Levanter that is installed, whichever it is, and says what came out. noxfile.py runs it in an environment for each.

python tests/compatibility.py levanter.main.train_lm
"""

import dataclasses
import importlib.metadata
import json
import shutil
import sys
import tempfile
from pathlib import Path

import stock

OPTIMIZERS = {
    "mars-adamw": {"type": "mars-adamw", "learning_rate": 6e-3, "warmup": 5},
    "mars-adamw exact": {"type": "mars-adamw", "learning_rate": 6e-3, "warmup": 5, "exact": True},
    "mars-m": {"type": "mars-m", "learning_rate": 1e-2, "warmup": 5},
}


def version(*names: str) -> str:
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            pass
    raise SystemExit(f"none of {names} is installed")


def in_its_words(config: dict) -> dict:
    """The same config as the Levanter that is installed spells it."""
    from levanter.models.gpt2 import Gpt2Config

    data, model = config["data"], config["model"]
    known = {field.name for field in dataclasses.fields(Gpt2Config)}
    if "tokenizer" not in known:
        model.pop("tokenizer")
    if "seq_len" in known:
        model["seq_len"] = model.pop("max_seq_len")
        data["configs"] = {name: {"train_urls": component["source"]["train_urls"]} for name, component in data.pop("components").items()}
        data["train_weights"] = dict.fromkeys(data["configs"], 1.0)
    return config


def write_workspace(folder: Path) -> None:
    stock.write_workspace(folder)
    # Where a GPT-2's tokenizer cannot be named, Levanter looks for what the hub calls gpt2.
    shutil.copytree(folder / "tokenizer", folder / "gpt2")
    (folder / "gpt2" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))


def train(module: str, optimizer: dict, folder: Path, name: str) -> list[float]:
    config = in_its_words(stock.config(dict(optimizer)))
    config["trainer"] |= {"id": name, "jax_compilation_cache_dir": "compiled"}
    [status] = stock.finish(stock.start(folder, config, name=name, module=module), timeout=1800)
    if status:
        raise SystemExit(f"{name} ended with {status}:\n{(folder / f'{name}.err').read_text()[-3000:]}")
    steps = stock.metrics(folder, name)
    # Some log no loss of the first two steps.
    losses = [step["train/loss"] for step in steps]
    if steps[-1]["global_step"] != stock.STEPS - 1 or not losses[-1] < losses[0] - 0.5:
        raise SystemExit(f"{name} ended at step {steps[-1]['global_step']} with the losses {losses}")
    return losses


def main(module: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_workspace(folder)
        losses = {}
        for name, optimizer in OPTIMIZERS.items():
            losses[name] = train(module, optimizer, folder, name.replace(" ", "-"))
    result = {
        "levanter": version("marin-levanter", "levanter"),
        "haliax": version("marin-haliax", "haliax"),
        **{name: importlib.metadata.version(name) for name in ("jax", "optax", "equinox")},
        "python": ".".join(map(str, sys.version_info[:3])),
        "command": module,
        "losses": {name: [round(loss[0], 3), round(loss[-1], 3)] for name, loss in losses.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
