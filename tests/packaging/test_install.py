"""Each way of installing levanter-mars, from nothing, into an environment of its own.

Stock Levanter must find the optimizers afterwards, having gained one file and lost or changed none, and be as it was when
levanter-mars is uninstalled again.
"""

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
LOCK = REPO / "requirements" / "cpu.txt"
PLUGIN = "levanter/optim/levanter_mars.py"


def run(*command: str | Path, cwd: Path) -> str:
    # Installers act on these, and a test run may have set them: the first chooses an environment, the others a Python path.
    env = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def uv(*arguments: str | Path, cwd: Path) -> str:
    return run(sys.executable, "-m", "uv", *arguments, cwd=cwd)


class Environment:
    """A virtual environment with everything in the lock, and without levanter-mars."""

    def __init__(self, directory: Path):
        self.cwd = directory
        venv = directory / "venv"
        uv("venv", "--no-project", "--python", sys.executable, venv, cwd=directory)
        uv("pip", "install", "--python", venv, "--require-hashes", "--requirement", LOCK, cwd=directory)
        self.bin = venv / "bin"
        self.site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))

    def python(self, *arguments: str | Path) -> str:
        # Isolated, so that neither the directory nor an environment variable adds to the import path.
        return run(self.bin / "python", "-I", *arguments, cwd=self.cwd)

    def pip_install(self, *what: str | Path) -> None:
        # Without isolation the build uses the hatchling of the lock, and no network.
        self.python("-m", "pip", "install", "--no-deps", "--no-build-isolation", *what)

    def files(self) -> dict[str, str]:
        """Every installed file but compiled ones, with a hash of its content where it is Levanter's or Haliax's."""
        found = {}
        for path in self.site_packages.rglob("*"):
            name = path.relative_to(self.site_packages).as_posix()
            if path.is_file() and "__pycache__" not in name:
                hashed = name.startswith(("levanter/", "haliax/", "marin_levanter", "marin_haliax"))
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if hashed else ""
        return found


def install_directory(environment: Environment) -> None:
    environment.pip_install(REPO)


def install_editable(environment: Environment) -> None:
    environment.pip_install("--editable", REPO)


def install_wheel(environment: Environment) -> None:
    """The wheel as it would be published: built from the source distribution."""
    dist = environment.cwd / "dist"
    uv("build", "--no-build-isolation", "--python", environment.bin / "python", "--out-dir", dist, REPO, cwd=environment.cwd)
    (wheel,) = dist.glob("*.whl")
    environment.pip_install(wheel)


OURS = {
    "mars-adamw": "levanter_mars.configs.MarsAdamWConfig",
    "mars-lion": "levanter_mars.configs.MarsLionConfig",
    "mars-shampoo": "levanter_mars.configs.MarsShampooConfig",
    "mars-m": "levanter_mars.configs.MarsMConfig",
}
# What `optimizer: {type: ...}` in a YAML turns into, for every type that Levanter knows.
DECODE_ALL = """
import json, draccus
from levanter.optim.config import OptimizerConfig
configs = {name: draccus.decode(OptimizerConfig, {"type": name, "learning_rate": 0.25}) for name in OptimizerConfig.get_known_choices()}
assert all(config.learning_rate == 0.25 for config in configs.values())
print(json.dumps({name: f"{type(config).__module__}.{type(config).__qualname__}" for name, config in configs.items()}))
"""


def decoded(environment: Environment, first: str = "") -> dict[str, str]:
    return json.loads(environment.python("-c", first + DECODE_ALL))


@pytest.mark.slow
@pytest.mark.parametrize("install", [install_directory, install_editable, install_wheel])
def test_stock_levanter_finds_the_optimizers_and_is_otherwise_untouched(install: Callable[[Environment], None], tmp_path: Path):
    environment = Environment(tmp_path)
    files, types = environment.files(), decoded(environment)
    assert types["adam"] == "levanter.optim.config.AdamConfig" and types["mars"] == "levanter.optim.mars.MarsConfig"

    install(environment)

    with_ours = environment.files()
    assert {name: content for name, content in with_ours.items() if name in files} == files
    added = {name for name in with_ours.keys() - files.keys() if not name.startswith("levanter_mars-")}
    if install is install_editable:
        assert added == {PLUGIN, "_editable_impl_levanter_mars.pth"}
    else:
        assert added == {PLUGIN} | {path.relative_to(REPO / "src").as_posix() for path in (REPO / "src/levanter_mars").rglob("*.py")}
    assert decoded(environment) == types | OURS
    assert decoded(environment, first="import levanter_mars") == types | OURS

    environment.python("-m", "pip", "uninstall", "--yes", "levanter-mars")

    assert environment.files() == files
    assert decoded(environment) == types
