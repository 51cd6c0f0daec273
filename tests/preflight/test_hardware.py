"""Names of chips and slices."""

import pytest

from levanter_mars.preflight.hardware import CHIPS, parse_topology


@pytest.mark.parametrize(
    ("name", "chips", "devices"),
    [("v5e:1x1", 1, 1), ("v5e:16x16", 256, 256), ("v4:2x2x1", 4, 4), ("v5p:4x4x8", 128, 128), ("tpu7x:2x2x2", 8, 16), ("H100:8", 8, 8)],
)
def test_counts_chips_and_the_devices_that_jax_sees(name, chips, devices):
    topology = parse_topology(name)
    assert (topology.chips, topology.devices) == (chips, devices)


def test_an_unknown_chip_lists_the_known():
    with pytest.raises(ValueError, match="must be one of v4, v5e, v5p, v6e, TPU7x, a100-40g, a100-80g, h100, h200, b200"):
        parse_topology("v9:2x2")


@pytest.mark.parametrize(("name", "listed"), [("v5e:3x3", "2x4, 4x4"), ("v4:4x4", "2x2x1, 2x2x2"), ("v5p:8x4x4", "4x4x8"), ("v5e", "1x1")])
def test_a_slice_that_there_is_not_lists_those_there_are(name, listed):
    with pytest.raises(ValueError, match=listed):
        parse_topology(name)


@pytest.mark.parametrize("name", ["h100", "h100:0", "h100:2x2", "h100:-1"])
def test_gpus_need_a_number(name):
    with pytest.raises(ValueError, match="h100:N"):
        parse_topology(name)


@pytest.mark.parametrize(("chip", "largest"), [("v4", "8x16x16"), ("v5p", "16x16x24"), ("v6e", "16x16")])
def test_largest_slices_are_the_published_ones(chip, largest):
    sizes = CHIPS[chip].sizes
    assert sizes is not None
    assert largest in sizes
    most = {"v4": 4096, "v5p": 6144, "v6e": 256}[chip]
    assert max(parse_topology(f"{chip}:{size}").chips for size in sizes) == most
