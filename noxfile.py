"""levanter-mars with each Levanter that the README's table names, in a fresh environment each. About 15 minutes on two cores.

    make compatibility

Each trains through the command that the table gives for it, and repeats steps of the authors' release. docs/compatibility.json is the last
result of those that were run.
"""

import json
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
nox.options.sessions = ["levanter"]

STOCK, OURS = "levanter.main.train_lm", "levanter_mars.main.train_lm"
LEVANTERS = {
    "pinned": (["--require-hashes", "--requirement", "requirements/cpu.txt"], STOCK),
    "newest": (["marin-levanter>=0.2.227.dev0", "marin-haliax>=0.2.227.dev0", "matplotlib", "pytest"], STOCK),
    "0.2.120": (["marin-levanter==0.2.120.dev35435630851", "marin-haliax==0.2.120.dev35435630851", "matplotlib", "pytest"], STOCK),
    "oldest": (
        ["marin-levanter==0.2.1.dev202605292307", "marin-haliax==0.2.1.dev202605292307", "GitPython", "matplotlib", "pytest"],
        OURS,
    ),
    "Stanford": (["levanter==1.2.dev1644", "jax==0.7.2", "optax<0.2.7", "equinox<0.13.3", "GitPython", "matplotlib", "pytest"], OURS),
}
RESULTS = Path("docs/compatibility.json")


@nox.session(python="3.12")
@nox.parametrize("which", list(LEVANTERS), ids=list(LEVANTERS))
def levanter(session: nox.Session, which: str) -> None:
    requirements, command = LEVANTERS[which]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    write({name: result for name, result in results.items() if name != which})  # one that no longer passes has no result
    session.install(*requirements)
    session.install("--no-deps", ".")
    environment = {"JAX_PLATFORMS": "cpu"}
    session.run("python", "-m", "pytest", "-q", "tests/golden/test_golden_tensors.py", env=environment)
    output = session.run("python", "tests/compatibility.py", command, env=environment, silent=True)
    assert isinstance(output, str)
    write({**results, which: json.loads(output.strip().splitlines()[-1])})


def write(results: dict) -> None:
    RESULTS.write_text(json.dumps({name: results[name] for name in LEVANTERS if name in results}, indent=1) + "\n")
