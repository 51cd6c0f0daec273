"""One sentence where the package cannot be imported because of the Levanter that is installed, or of what that was installed with."""

import contextlib
import importlib.metadata
from collections.abc import Generator

_DISTRIBUTIONS = ("marin-levanter", "levanter", "marin-haliax", "haliax", "jax", "optax", "equinox")


@contextlib.contextmanager
def explained() -> Generator[None]:
    """Around imports.

    Raises:
        ImportError: for an ImportError or AttributeError inside, naming the versions that are installed.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"levanter-mars cannot be imported with {_installed()}: {type(error).__name__}: {error}; the table in its README says which "
            "versions of Levanter it works with, and what they need"
        ) from error


def _installed() -> str:
    versions = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if not any("levanter" in name for name in versions):
        return "no Levanter installed"
    return ", ".join(f"{name} {version}" for name, version in versions.items())
