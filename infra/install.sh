#!/usr/bin/env bash
# Makes .venv in this repository's root from requirements/gpu.txt or requirements/tpu.txt, and checks that stock Levanter finds the
# optimizers in it. Needs python3 with pip; Python 3.12 is downloaded where there is none.
#
#   bash infra/install.sh gpu
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
case ${1:-} in
  gpu | tpu) requirements=requirements/$1.txt ;;
  *)
    echo "install.sh takes gpu or tpu; got '${1:-}'" >&2
    exit 2
    ;;
esac
# Settings that clusters make, under which pip takes no --target.
export PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m pip install --quiet --require-hashes --only-binary :all: --target .uv --upgrade -r requirements/uv.txt
.uv/bin/uv venv --quiet --clear --python 3.12 .venv
.uv/bin/uv pip sync --quiet --python .venv --require-hashes "$requirements"
.uv/bin/uv pip install --quiet --python .venv --no-deps .
.venv/bin/python -c "from levanter.optim.config import OptimizerConfig; OptimizerConfig.get_choice_class('mars-adamw')"
