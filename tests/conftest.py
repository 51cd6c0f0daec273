"""What holds for every test, set before anything imports JAX or a Hugging Face library."""

import os

import pytest

# Tolerances are those of float32 on the CPU, and two workers would each take a whole GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A test that asks the hub for something fails at once, and does not depend on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=4, help="how often tests/reliability/test_random_kills.py kills its run")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where stock train_lm finds its corpus and tokenizer, one for each module of tests."""
    import stock

    folder = tmp_path_factory.mktemp("stock")
    stock.write_workspace(folder)
    return folder
