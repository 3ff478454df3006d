#!/usr/bin/env bash
# From nothing to a trained language model: makes .venv, trains on 8 MPI ranks, writes some text.
# Arguments go to the training, for example: scripts/quickstart.sh --set train.steps=100
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
VENV=${VENV:-$PWD/.venv}
RANKS=${RANKS:-8}
export OMP_NUM_THREADS=1 PIP_DISABLE_PIP_VERSION_CHECK=1

install_quickstart() {
    "$1/bin/pip" install -q -e '.[mpich,plot]'
}

say "1. Installing into $VENV: mpizero and MPICH, no compiler and no system package needed"
ensure_venv "$VENV" install_quickstart
"$VENV/bin/mpizero" --help >/dev/null

say "2. Training a GPT on the Python standard library, on $RANKS MPI ranks with ZeRO-2"
"$VENV/bin/mpiexec" -n "$RANKS" "$VENV/bin/python" -m mpizero train scripts/quickstart.toml "$@"

say "3. The run: loss in nats a byte (5.5 is guessing), validation, speed"
"$VENV/bin/python" -m mpizero watch run/quickstart --once

say "4. What it writes now"
"$VENV/bin/python" -m mpizero generate run/quickstart --prompt "def " --length 400 --temperature 0.6

cat <<DONE

Next:
  . $VENV/bin/activate
  python -m mpizero report run/quickstart                                          # pictures of the run: run/quickstart/report.html
  mpiexec -n 3 python -m mpizero train scripts/quickstart.toml --resume-from 600  # the last steps on other ranks: the same sha256
  mpiexec -n 2 python -m mpizero train scripts/quickstart.toml --set parallel.strategy=zero3 --set checkpoint.folder=run/zero3/checkpoints
  mpiexec -n 8 python scripts/train.py --help                                                   # the same from a script of your own
  scripts/test.sh --quick
DONE
