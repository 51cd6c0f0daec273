"""Shares of work: nothing lost, and the fullest bin as empty as the sizes allow."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter_mars.packing import pack


@pytest.mark.parametrize(
    ("sizes", "counts", "bins", "fullest"),
    [
        # GPT-2 small over 16 chips and XL over 64, in GFLOP: c_fc and c_proj, c_attn, the attention's c_proj. Even.
        ((90, 70, 30), (24, 12, 12), 16, 210),
        ((369, 287, 123), (96, 48, 48), 64, 861),
        # One largest matrix is all that a chip has to do where there are chips enough.
        ((369, 287, 123), (96, 48, 48), 256, 369),
        ((5,), (3,), 1, 15),
        ((3, 3), (1, 1), 4, 3),
    ],
)
def test_the_fullest_bin(sizes, counts, bins, fullest):
    shares = pack(sizes, counts, bins)
    assert max(sum(size * n for size, n in zip(sizes, share, strict=True)) for share in shares) == fullest


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 20)), min_size=1, max_size=5), st.integers(1, 40))
def test_nothing_is_lost_and_equal_shares_stand_together(items, bins):
    sizes, counts = zip(*items, strict=True)
    shares = pack(sizes, counts, bins)
    assert len(shares) == bins
    assert tuple(map(sum, zip(*shares, strict=True))) == counts
    assert shares == sorted(shares, reverse=True)
    loads = [sum(size * n for size, n in zip(sizes, share, strict=True)) for share in shares]
    present = [size for size, n in items if n]
    # 13/11 of the best is proven of MULTIFIT (Yue, 1990), and the best is at most an even share and one item more.
    assert max(loads) <= 13 / 11 * (sum(loads) / bins + max(present, default=0)) + 1e-6
