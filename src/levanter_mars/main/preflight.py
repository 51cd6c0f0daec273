"""Compiles the train step of a Levanter YAML for chips that are not there, and says whether it fits and how fast it could be.

    python -m levanter_mars.main.preflight --config config/mars_gpt2_xl.yaml --topology v5e:16x16

Needs no accelerator, no network and no weights in memory; for TPUs it needs libtpu, which the extra `tpu` installs. Takes what
`python -m levanter.main.train_lm` takes. The exit status is 0 if the step fits, 2 if it does not, 1 if that cannot be told.
"""

import dataclasses
import json
import logging
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import draccus
import jax
import levanter.config
from draccus.utils import DraccusException
from levanter.main.train_lm import TrainLmConfig
from levanter.optim.config import OptimizerConfig

from levanter_mars.main.explain import vocabulary_size
from levanter_mars.preflight.hardware import Topology, parse_topology, tpu_devices
from levanter_mars.preflight.presentation import draw_memory, table, verdict
from levanter_mars.preflight.report import Report, preflight
from levanter_mars.preflight.search import find_batch

REFUSALS = (DraccusException, ValueError, RuntimeError, OSError, AssertionError)
"""How Levanter, JAX and this package refuse a config. Anything else is a fault of theirs, and so is told with its place."""


@dataclass
class PreflightConfig(TrainLmConfig):
    topology: str = ""
    """The chips: v4, v5e, v5p, v6e or TPU7x and the slice (v5e:4x4), or a GPU and their number (h100:8)."""
    vocab_size: int | None = None
    """Size of the vocabulary; by default the tokenizer's."""
    json: Path | None = None
    """Write the report there too, as JSON."""
    plot: Path | None = None
    """Draw there, as PNG, what fills a device's memory."""
    find_batch: bool = False
    """Find the largest trainer.per_device_parallelism that fits."""
    compare: Any = None
    """Types of optimizers, separated by commas, to put side by side: adam,mars-adamw. The config's own keeps its fields, others have their
    defaults, or what a mapping in a list says: [adam, {type: muon, use_kimi_scaling: true}]."""


def run(config: PreflightConfig) -> int:
    """Compiles and reports. For GPUs it sets how many CPU devices this process has, which can be done once.

    Raises:
        ValueError: the config asks for something that there is not, or that does not go with the rest. Where optimizers are compared, what
            refuses one of them is printed, and the others go on.
        RuntimeError: there is nothing to compile with.
    """
    topology = parse_topology(config.topology)
    optimizers = _optimizers(config)
    for path in filter(None, (config.json, config.plot)):
        if not path.parent.is_dir():
            raise ValueError(f"{path} cannot be written: {path.parent} is no directory")
    devices = _devices(topology)
    vocab_size = vocabulary_size(config, config.vocab_size)
    reports, refusals = [], []
    for optimizer in optimizers:
        one = dataclasses.replace(config, optimizer=optimizer)
        name = optimizer.get_choice_name(type(optimizer))
        print(f"Compiling the train step with {name} for {topology.name} ...", file=sys.stderr, flush=True)
        try:
            if config.find_batch:
                report = find_batch(one, topology, devices, vocab_size, lambda tried: print(verdict(tried), file=sys.stderr, flush=True))
            else:
                report = preflight(one, topology, devices, vocab_size)
        except Exception as error:  # the others shall be reported, whatever is wrong with this one
            if len(optimizers) == 1:
                raise
            refusals.append(f"{name} on {topology.name}: cannot tell: {_reason(error)}")
            print(refusals[-1], file=sys.stderr, flush=True)
        else:
            reports.append(report)
    if reports:
        _write(config, reports)
    print(*refusals, sep="\n", end="\n" if refusals else "")
    if refusals:
        return 1
    return 0 if all(report.fits for report in reports) else 2


def _optimizers(config: PreflightConfig) -> list[OptimizerConfig]:
    if config.compare is None:
        return [config.optimizer]
    known = OptimizerConfig.get_known_choices()
    own = config.optimizer.get_choice_name(type(config.optimizer))
    optimizers = []
    if not isinstance(config.compare, str | list) or not config.compare:
        raise ValueError(f"compare is {config.compare!r}; it must name optimizers, of {', '.join(sorted(known))}")
    for item in [name.strip() for name in config.compare.split(",")] if isinstance(config.compare, str) else config.compare:
        document = {"type": item} if isinstance(item, str) else item
        if not isinstance(document, dict) or document.get("type") not in known:
            raise ValueError(f"compare names {item!r}; it must be of {', '.join(sorted(known))}, or a mapping whose type is")
        optimizers.append(config.optimizer if document == {"type": own} else draccus.decode(OptimizerConfig, document))
    return optimizers


def _devices(topology: Topology) -> Sequence[Any]:
    if topology.chip.is_tpu:
        return tpu_devices(topology)
    jax.config.update("jax_num_cpu_devices", topology.devices)
    return jax.devices("cpu")


def _write(config: PreflightConfig, reports: list[Report]) -> None:
    print(table(reports))
    print()
    for report in reports:
        print(verdict(report))
    if config.json is not None:
        documents = [report.to_json() for report in reports]
        config.json.write_text(json.dumps(documents if config.compare else documents[0], indent=2) + "\n")
        print(f"JSON: {config.json}")
    if config.plot is not None:
        draw_memory(reports, config.plot)
        print(f"Picture: {config.plot}")


def _reason(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, AssertionError):
        return f"{frame.filename}, line {frame.lineno}, asserts what does not hold for this config: {frame.line} {error}".strip()
    if not isinstance(error, REFUSALS):
        return f"{frame.filename}, line {frame.lineno}, fails with {type(error).__name__}: {error}"
    return " ".join(str(error).split())[:2000]


def main() -> None:
    # What Levanter and JAX log while they trace is about a run, and there is none.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    jax.config.update("jax_platforms", "cpu")
    try:
        status: Any = levanter.config.main(run)()
    except SystemExit as error:  # the parser of options ends with 2, which here means something else
        sys.exit(1 if error.code == 2 else error.code)
    except Exception as error:
        sys.exit(f"preflight cannot tell: {_reason(error)}")
    sys.exit(status)


if __name__ == "__main__":
    main()
