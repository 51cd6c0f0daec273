"""What Levanter's checkpoints hold, read without Levanter and without a model."""

import shutil
from pathlib import Path

import tensorstore as ts


def arrays(checkpoint: Path) -> dict[str, bytes]:
    """All that is stored of the trainer's state, by its place in it: the metadata and the encoded chunks of every array."""
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{checkpoint}/"}).result()
    found = {key.decode(): bytes(store.read(key).result().value) for key in store.list().result()}
    assert any("opt_state" in key for key in found) and any("model" in key for key in found)
    return found


def complete(run: Path) -> list[int]:
    """The steps of a run's complete checkpoints, in order: those whose metadata was written, which is done last."""
    return sorted(int(path.parent.name.removeprefix("step-")) for path in run.glob("step-*/metadata.json"))


def copy(run: Path, step: int, to: Path) -> None:
    """Makes one checkpoint of a run the only one of another."""
    shutil.copytree(run / f"step-{step}", to / f"step-{step}")
