"""The values that hyperparameters may take, by name: one table for the functions and the configs, one sentence for what is out of it."""

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from levanter_mars.newton_schulz import COEFFICIENTS


class Range(NamedTuple):
    allowed: str
    """Completes the sentence "it must be …"."""
    contains: Callable[[Any], bool]


def _number(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, numbers.Real) and not isinstance(x, bool) and math.isfinite(x) and test(x)


def _is_whole(x: Any) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


_DECAY_RATE = Range("at least 0 and below 1", _number(lambda x: 0 <= x < 1))
POSITIVE = Range("a finite number above 0", _number(lambda x: x > 0))
NOT_NEGATIVE = Range("a finite number of at least 0", _number(lambda x: x >= 0))
POSITIVE_STEPS = Range("a whole number above 0", lambda x: _is_whole(x) and x > 0)
NOT_NEGATIVE_STEPS = Range("a whole number of at least 0", lambda x: _is_whole(x) and x >= 0)
_POSITIVE_OR_OFF = Range("a finite number above 0, or null for off", lambda x: x is None or POSITIVE.contains(x))
_DTYPES = Range('"bfloat16", "float32", or null for that of the parameters', lambda x: x is None or x in ("bfloat16", "float32"))
_SWITCH = Range("true or false", lambda x: isinstance(x, bool))
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
    "amsgrad": _SWITCH,
    "optimize_1d": _SWITCH,
    "exact": _SWITCH,
    "cautious": _SWITCH,
    "momentum_dtype": _DTYPES,
    "last_gradient_dtype": _DTYPES,
    "diagnostics_every": NOT_NEGATIVE_STEPS,
    "newton_schulz_steps": POSITIVE_STEPS,
    "newton_schulz_dtype": Range('"bfloat16" or "float32"', lambda x: x in ("bfloat16", "float32")),
    "newton_schulz_coefficients": Range(f"one of {', '.join(sorted(COEFFICIENTS))}", lambda x: x in COEFFICIENTS),
    "newton_schulz_layout": Range('"auto" or "replicated"', lambda x: x in ("auto", "replicated")),
    "convolutions": Range('"matrix" or "vector"', lambda x: x in ("matrix", "vector")),
    "embeddings": Range('"matrix" or "adamw"', lambda x: x in ("matrix", "adamw")),
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
        unset = {name for name, parameter in signature.parameters.items() if parameter.default is bound.arguments.get(name) is None}
        check_ranges({name: value for name, value in bound.arguments.items() if name not in unset})
        return fn(*args, **kwargs)

    return checked
