"""The chips that a run can be planned for: what their makers publish, and the slices in which they can be had."""

import importlib.util
import math
import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache

from jax.experimental import topologies

from levanter_mars.preflight.absent_devices import replaced

TB = 1e12
MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class Chip:
    name: str
    memory: float
    """Bytes."""
    flops: float
    """Dense bfloat16 FLOPs a second."""
    memory_bandwidth: float
    """Bytes a second."""
    link_bandwidth: float
    """Bytes a second that a chip can send to other chips, all links together: half of what makers publish for both directions."""
    source: str
    devices: int = 1
    """As many devices as JAX sees in one chip. They share the chip's figures equally."""
    sizes: tuple[str, ...] | None = None
    """The slices there are; for a GPU None: any number."""
    compiler_options: tuple[tuple[str, object], ...] = ()
    """What the topology needs beyond its name, for a device to be what JAX sees on the real machine."""

    @property
    def is_tpu(self) -> bool:
        return self.sizes is not None


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")


def _cubes(largest: int) -> tuple[str, ...]:
    """Slices of a three-dimensional torus: up to 32 chips four fixed ones, then multiples of 4 in every direction, the smallest first.

    Extents end at 24, as the published lists do.
    """
    extents = range(4, 25, 4)
    shapes = [(a, b, c) for a in extents for b in extents for c in extents if a <= b <= c and a * b * c <= largest]
    shapes.sort(key=lambda shape: (math.prod(shape), shape))
    return ("2x2x1", "2x2x2", "2x2x4", "2x4x4", *("x".join(map(str, shape)) for shape in shapes))


_GOOGLE = "https://cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
CHIPS = {
    chip.name: chip
    for chip in (
        # The links: six of 50 GB/s in each direction, https://arxiv.org/abs/2304.01433, table 4.
        Chip("v4", 32 * GIB, 275 * TB, 1.2 * TB, 0.3 * TB, f"{_GOOGLE}v4", 1, _cubes(4096), (("chip_config_name", "megacore"),)),
        Chip("v5e", 16 * GIB, 197 * TB, 0.819 * TB, 0.2 * TB, f"{_GOOGLE}v5e", 1, _FLAT),
        Chip("v5p", 95 * GIB, 459 * TB, 2.765 * TB, 0.6 * TB, f"{_GOOGLE}v5p", 1, _cubes(6144)),
        Chip("v6e", 32 * GIB, 918 * TB, 1.638 * TB, 0.4 * TB, f"{_GOOGLE}v6e", 1, _FLAT),
        Chip("TPU7x", 192 * GIB, 2307 * TB, 7.38 * TB, 0.6 * TB, f"{_GOOGLE}tpu7x", 2, _cubes(9216)),
        # FLOPs are without sparsity, bandwidths those of the SXM form. Memory is what NVIDIA's driver reports: A100 and H100 by
        # https://github.com/modal-labs/modal-client/pull/2797, H200 by https://github.com/NVIDIA/cuda-samples/issues/311,
        # B200 by https://github.com/NVIDIA/TensorRT-LLM/issues/10278.
        Chip("a100-40g", 40960 * MIB, 312 * TB, 1.555 * TB, 0.3 * TB, f"{_NVIDIA}a100/"),
        Chip("a100-80g", 81920 * MIB, 312 * TB, 2.039 * TB, 0.3 * TB, f"{_NVIDIA}a100/"),
        Chip("h100", 81559 * MIB, 989.5 * TB, 3.35 * TB, 0.45 * TB, f"{_NVIDIA}h100/"),
        Chip("h200", 143771 * MIB, 989.5 * TB, 4.8 * TB, 0.45 * TB, f"{_NVIDIA}h200/"),
        Chip("b200", 183359 * MIB, 2250 * TB, 8 * TB, 0.9 * TB, f"{_NVIDIA}dgx-b200/"),
    )
}


@dataclass(frozen=True)
class Topology:
    """Some chips, as `v5e:4x4` or `h100:8` names them."""

    chip: Chip
    size: str

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{self.size}"

    @property
    def chips(self) -> int:
        return math.prod(map(int, self.size.split("x")))

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices


def parse_topology(name: str) -> Topology:
    """
    Raises:
        ValueError: there is no such chip or no slice of that size; the message lists what there is.
    """
    chip_name, _, size = name.partition(":")
    chip = next((chip for chip in CHIPS.values() if chip.name.lower() == chip_name.lower()), None)
    if chip is None:
        raise ValueError(f"topology is {name!r}; its chip must be one of {', '.join(CHIPS)}")
    if not chip.is_tpu:
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"topology is {name!r}; for GPUs it must be {chip.name}:N with a number of GPUs of at least 1")
        return Topology(chip, str(int(size)))
    assert chip.sizes is not None
    if size not in chip.sizes:
        raise ValueError(f"topology is {name!r}; {chip.name} comes in the sizes {', '.join(chip.sizes)}")
    return Topology(chip, size)


_LIBTPU_ENVIRONMENT = {
    # It shall not ask Google's metadata server which TPU this is, nor insist on being the only one of its kind on this machine.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@cache
def tpu_devices(topology: Topology) -> tuple:
    """Devices that can be compiled for and nothing else.

    Raises:
        RuntimeError: libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise RuntimeError("compiling for TPUs needs libtpu: pip install 'levanter-mars[tpu]'")
    options = dict(topology.chip.compiler_options)
    if topology.chips == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]
    with ExitStack() as stack:
        for name, value in _LIBTPU_ENVIRONMENT.items():
            stack.enter_context(replaced(os.environ, name, value))
        return tuple(topologies.get_topology_desc(platform="tpu", topology_name=topology.name, **options).devices)
