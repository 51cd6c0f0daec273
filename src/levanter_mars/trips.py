"""A loop says how often it is expected to run, for those who count what a compiled program does."""

import re
from contextlib import AbstractContextManager

import jax


def expected_trips(n: int) -> AbstractContextManager:
    """A scope for one loop whose number of iterations depends on data, or on the device, so that the compiled program does not tell it."""
    return jax.named_scope(f"expected_trips={n}")


def trips_in(op_name: str) -> int | None:
    """The number that the innermost such scope gave, from the `op_name` that a compiled loop carries; None without one."""
    found = re.findall(r"expected_trips=(\d+)/", op_name)
    return int(found[-1]) if found else None
