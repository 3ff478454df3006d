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
    "$1/bin/pip" install -q -e '.[mpich]'
}

say "1. Installing into $VENV: mpizero and MPICH, no compiler and no system package needed"
ensure_venv "$VENV" install_quickstart
"$VENV/bin/mpizero" --help >/dev/null

say "2. Training a GPT on the Python standard library, on $RANKS MPI ranks with ZeRO-2"
"$VENV/bin/mpiexec" -n "$RANKS" "$VENV/bin/python" -m mpizero train scripts/quickstart.toml "$@"

say "3. The loss, step by step (nats a byte; 5.5 is guessing)"
"$VENV/bin/python" - run/quickstart/metrics.jsonl <<'SHOW'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
first = rows[0]["loss"]
for row in rows[:: max(1, len(rows) // 12)] + rows[-1:]:
    print(f"{row['step']:6d}  {row['loss']:6.3f}  {'#' * round(60 * row['loss'] / first)}")
for row in rows:
    if "validation_loss" in row:
        print(f"validation after step {row['step']}: {row['validation_loss']:.3f}")
SHOW

say "4. What it writes now"
"$VENV/bin/python" -m mpizero generate run/quickstart --prompt "def " --length 400 --temperature 0.6

cat <<DONE

Next:
  . $VENV/bin/activate
  mpiexec -n 3 python -m mpizero train scripts/quickstart.toml --resume-from 600  # the last steps on other ranks: the same sha256
  mpiexec -n 2 python -m mpizero train scripts/quickstart.toml --set parallel.strategy=zero3 --set checkpoint.folder=run/zero3/checkpoints
  mpiexec -n 8 python scripts/train.py --help                                                   # the same from a script of your own
  scripts/test.sh --quick
DONE
