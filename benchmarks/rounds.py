"""Times several things in turn, so that ratios within a round hold on a noisy machine."""

import random
import statistics
from collections.abc import Callable, Mapping

WARM_UP = 2
"""Rounds that are not counted."""


def timed_in_turn(contenders: Mapping[str, Callable[[], float]], rounds: int) -> list[dict[str, float]]:
    """The seconds of each in every round, in a new order every round, because what ran before leaves its mark on caches and on the
    allocator.

    Args:
        contenders: by name, each of which runs once and returns the seconds that it took.
    """
    order = random.Random(0)
    names = list(contenders)
    return [{name: contenders[name]() for name in order.sample(names, len(names))} for _ in range(WARM_UP + rounds)][WARM_UP:]


def median_milliseconds(rounds: list[dict[str, float]], name: str) -> float:
    return 1e3 * statistics.median(times[name] for times in rounds)


def median_ratio(rounds: list[dict[str, float]], name: str, to: str) -> float:
    """Of the times within a round."""
    return statistics.median(times[name] / times[to] for times in rounds)
