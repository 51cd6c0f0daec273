"""Programs on several CPU devices, each in a process of its own, because JAX fixes their number when it starts."""

import os
import subprocess
import sys
from pathlib import Path


def run_on_eight(program: str, *arguments: str) -> str:
    """Runs Python source, which can import the modules of tests/, on eight devices, and returns its last line of output."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    done = subprocess.run([sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def simulate_two_slices() -> None:
    """Has this process's eight CPU devices say that they are two slices of four, as TPUs do: a stand-in, with no slower network between."""
    import jax

    type(jax.devices()[0]).slice_index = property(lambda device: device.id // 4)
