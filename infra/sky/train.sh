#!/usr/bin/env bash
# What the tasks of this folder run, on every node: train_lm on $CONFIG as run $RUN_ID, saving to $CHECKPOINTS. SkyPilot sets SKYPILOT_*.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

together=()
if [[ ${1:-} == tpu ]]; then
  # The TPU's runtime says who the workers are. JAX's own choice of port is closed between some: jax issue 35905.
  export JAX_COORDINATOR_PORT=8476
elif [[ $SKYPILOT_NUM_NODES -gt 1 ]]; then
  together=(
    --trainer.distributed.coordinator_address "${SKYPILOT_NODE_IPS%%$'\n'*}:8476"
    --trainer.distributed.num_processes "$SKYPILOT_NUM_NODES"
    --trainer.distributed.process_id "$SKYPILOT_NODE_RANK"
  )
fi
export RUN_ID # Levanter reads it
# Levanter and Weights & Biases take an empty token for one.
[[ -n ${HF_TOKEN:-} ]] || unset HF_TOKEN
exec .venv/bin/python -m levanter_mars.main.train_lm --config "$CONFIG" --trainer.checkpointer.base_path "$CHECKPOINTS" "${together[@]}"
