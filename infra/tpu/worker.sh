#!/usr/bin/env bash
# Runs on a TPU worker, from the folder that it is in: sets the worker up; starts, reports on or ends its one training process.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

# Held by a setup, and for as long as any process of a run lives, whoever started them.
is_locked() {
  [[ -e lock ]] && ! flock --nonblock lock true
}

main() {
  case ${1:-} in
    setup) # source.tar.gz, commit $2 of the repository, becomes an environment pinned by requirements/tpu.txt
      exec 9>lock
      if ! flock --nonblock 9; then
        echo "levanter-mars: training runs, or another setup; stop it first" >&2
        exit 1
      fi
      rm -f ready
      tar --extract --gzip --file source.tar.gz
      bash infra/install.sh tpu
      echo "$2" >ready
      ;;
    start)
      exec 9>lock
      if ! flock --nonblock 9; then
        echo "levanter-mars: already running"
        exit
      fi
      rm -f status
      cat job.sh config.yaml | sha256sum | cut -d ' ' -f 1 >identity
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
    status) # with $2, of a worker that is to have this commit
      if is_locked; then
        if [[ -e ready ]]; then
          echo "levanter-mars: running $(<identity)"
        else
          echo "levanter-mars: installing"
        fi
      elif [[ ! -e ready || -n ${2:-} && $(<ready) != "$2" ]]; then
        echo "levanter-mars: bare"
      elif [[ ! -e identity ]]; then
        echo "levanter-mars: idle"
      elif [[ -e status ]]; then
        echo "levanter-mars: exited $(<status) $(<identity)"
      else
        echo "levanter-mars: exited unknown $(<identity)"
      fi
      ;;
    stop) # by the notice on which training saves a checkpoint
      if is_locked; then
        if [[ ! -e ready ]]; then
          echo "levanter-mars: being set up; nothing trains" >&2
          exit 1
        fi
        kill -TERM -- "-$(<leader)" || true # it may have ended by itself
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
}

# On one line, because this file may be replaced while it runs.
main "$@"; exit
