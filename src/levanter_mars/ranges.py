"""The values that hyperparameters may take, by name: one table for the functions and the configs, one sentence for what is out of it."""

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax


class Range(NamedTuple):
    allowed: str
    """Completes the sentence "it must be …"."""
    contains: Callable[[Any], bool]


def _number(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, numbers.Real) and not isinstance(x, bool) and math.isfinite(x) and test(x)


_DECAY_RATE = Range("at least 0 and below 1", _number(lambda x: 0 <= x < 1))
POSITIVE = Range("a finite number above 0", _number(lambda x: x > 0))
NOT_NEGATIVE = Range("a finite number of at least 0", _number(lambda x: x >= 0))
_POSITIVE_OR_OFF = Range("a finite number above 0, or null for off", lambda x: x is None or POSITIVE.contains(x))
_CLIPS = Range('"tensor", "global", or null for off', lambda x: x in ("tensor", "global", None))

RANGES: Mapping[str, Range] = {
    "learning_rate": NOT_NEGATIVE,
    "learning_rate_1d": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "weight_decay_1d": NOT_NEGATIVE,
    "beta1": _DECAY_RATE,
    "beta2": _DECAY_RATE,
    "beta1_1d": _DECAY_RATE,
    "beta2_1d": _DECAY_RATE,
    "epsilon": POSITIVE,
    "gamma": NOT_NEGATIVE,
    "max_grad_norm": _POSITIVE_OR_OFF,
    "correction_clip": _CLIPS,
    "correction_clip_norm": POSITIVE,
}


def check_ranges(values: Mapping[str, Any], ranges: Mapping[str, Range] = RANGES) -> None:
    """Checks every value that has a range. Schedules and arrays pass: their values are not known before the first step.

    Raises:
        ValueError: for the first value out of range, naming it, the value and what is allowed.
    """
    for name, value in values.items():
        if name in ranges and not (callable(value) or isinstance(value, jax.Array)) and not ranges[name].contains(value):
            raise ValueError(f"{name} is {value!r}; it must be {ranges[name].allowed}")


def ranges_checked[**P, T](fn: Callable[P, T]) -> Callable[P, T]:
    """Makes a function check its arguments, defaults included, against RANGES before it runs."""
    signature = inspect.signature(fn)

    @functools.wraps(fn)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        check_ranges(bound.arguments)
        return fn(*args, **kwargs)

    return checked
