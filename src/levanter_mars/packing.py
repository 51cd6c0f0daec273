"""Shares work out over bins so that the fullest holds as little as it can."""

from collections.abc import Sequence

Share = tuple[int, ...]
"""How many items of each size one bin holds."""


def pack(sizes: Sequence[float], counts: Sequence[int], bins: int) -> list[Share]:
    """MULTIFIT (Coffman, Garey & Johnson, 1978): the smallest capacity, by bisection, at which first-fit decreasing needs no more bins.

    Args:
        sizes: the sizes that items have.
        counts: how many items there are of each.
        bins: how many bins.

    Returns:
        The share of every bin; equal ones stand together, and empty ones come last.
    """
    if not any(counts):
        return [(0,) * len(sizes)] * bins
    low = max(sum(size * n for size, n in zip(sizes, counts, strict=True)) / bins, max(s for s, n in zip(sizes, counts, strict=True) if n))
    high = 2 * low  # at which no bin but the last can be less than half full
    best = _first_fit_decreasing(sizes, counts, high)
    for _ in range(40):
        middle = (low + high) / 2
        shares = _first_fit_decreasing(sizes, counts, middle)
        if len(shares) <= bins:
            best, high = shares, middle
        else:
            low = middle
    return sorted(best + [(0,) * len(sizes)] * (bins - len(best)), reverse=True)


def _first_fit_decreasing(sizes: Sequence[float], counts: Sequence[int], capacity: float) -> list[Share]:
    """Fills one bin after the other, always with the largest item that still fits, which comes to the same as item by item."""
    left = list(counts)
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    shares = []
    while any(left):
        room, share = capacity * (1 + 1e-9), [0] * len(sizes)
        for i in order:
            share[i] = min(left[i], int(room // sizes[i]))
            left[i] -= share[i]
            room -= share[i] * sizes[i]
        shares.append(tuple(share))
    return shares
