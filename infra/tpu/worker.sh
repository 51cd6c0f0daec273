#!/usr/bin/env bash
# Runs on a TPU worker, from the folder that it is in: sets the worker up; starts, reports on or ends its one training process.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

case ${1:-} in
  setup) # source.tar.gz, a committed state of the repository, becomes an environment pinned by requirements/tpu.txt
    rm -f ready
    tar --extract --gzip --file source.tar.gz
    bash infra/install.sh tpu
    touch ready
    ;;
  start)
    # The lock is held for as long as any process of the run lives, whoever started it.
    exec 9>lock
    if ! flock --nonblock 9; then
      echo "levanter-mars: already running"
      exit
    fi
    rm -f status
    setsid bash ./worker.sh run </dev/null >>train.log 2>&1 &
    echo $! >leader
    echo "levanter-mars: started"
    ;;
  run)
    # shellcheck source=/dev/null
    source ./secrets.sh
    # shellcheck source=/dev/null
    source ./job.sh
    # The port that JAX chooses by itself is closed between the workers of some pods: jax issue 35905.
    export JAX_COORDINATOR_PORT=8476
    trap : TERM
    code=0
    .venv/bin/python -m levanter_mars.main.train_lm --config config.yaml "${ARGUMENTS[@]}" || code=$?
    echo "$code" >status
    ;;
  status)
    if [[ ! -e ready ]]; then
      echo "levanter-mars: bare"
    elif [[ -e lock ]] && ! flock --nonblock lock true; then
      echo "levanter-mars: running"
    elif [[ -e status ]]; then
      echo "levanter-mars: exited $(<status)"
    elif [[ -e lock ]]; then
      echo "levanter-mars: exited unknown"
    else
      echo "levanter-mars: idle"
    fi
    ;;
  stop) # by the notice on which training saves a checkpoint
    if [[ -e lock ]] && ! flock --nonblock lock true; then
      kill -TERM -- "-$(<leader)"
      flock --timeout 900 lock true || {
        echo "levanter-mars: still running after 15 minutes" >&2
        exit 1
      }
    fi
    echo "levanter-mars: stopped"
    ;;
  *)
    echo "worker.sh takes setup, start, run, status or stop; got '${1:-}'" >&2
    exit 2
    ;;
esac
