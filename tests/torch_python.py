"""The Python with torch that tests give PyTorch's side of a comparison to.

An environment of its own, because the libraries that torch brings for CUDA would meet JAX's.
"""

import os
from pathlib import Path

import pytest

_MADE = Path(__file__).parents[1] / ".torch" / "bin" / "python"


def python_with_torch() -> str:
    """What LEVANTER_MARS_TORCH_PYTHON names, or what make made; the test is skipped where there is neither."""
    found = os.environ.get("LEVANTER_MARS_TORCH_PYTHON", str(_MADE) if _MADE.exists() else None)
    if found is None:
        pytest.skip("torch is not installed: make .torch/.installed, or name a Python that has it in LEVANTER_MARS_TORCH_PYTHON")
    return found
