#!/usr/bin/env bash
# From nothing to a trained language model: makes .venv, trains on 4 MPI ranks (RANKS), shows curve, text and sha256.
# Arguments go to the training, for example: scripts/quickstart.sh --set train.steps=100
set -euo pipefail
shopt -s nullglob
cd "$(dirname "$0")/.."
. scripts/environment.sh
VENV=${VENV:-$PWD/.venv} RANKS=${RANKS:-4}
CONFIG=scripts/quickstart.toml RUN=run/quickstart STEPS=400
PACKAGES=12 KERNELS=20 # installed, compiled: where the bars end
export OMP_NUM_THREADS=1 PIP_DISABLE_PIP_VERSION_CHECK=1

install_quickstart() { # only what the training needs; Python compiles the modules that are imported, not all
    "$1/bin/python" -m pip install --no-compile -e '.[mpich]'
}

# stage TELL COMMAND...: runs a command with its output in $LOG; TELL calls `bar` for what is done until then.
stage() {
    local tell=$1 pause=10 follower began=$SECONDS status=0
    shift
    if [ -t 1 ]; then pause=0.3; fi
    touch "$WORK/began"
    : >"$LOG"
    while sleep "$pause" >/dev/null; do "$tell" || true; done 2>/dev/null &
    follower=$!
    trap 'kill '"$follower"' 2>/dev/null || true' EXIT
    ("$@") >"$LOG" 2>&1 </dev/null || status=$?
    kill "$follower" 2>/dev/null && wait "$follower" 2>/dev/null || true
    trap - EXIT
    TOOK="$((SECONDS - began)) s"
    [ ! -t 1 ] || printf '\r\033[K'
    return "$status"
}

# bar DONE TOTAL TEXT: drawn over the last one on a terminal; elsewhere a line, if the text is a new one.
bar() {
    local full=$(($1 < $2 ? 30 * $1 / $2 : 30)) done
    [ "$3" != "${LAST:-}" ] || return 0
    LAST=$3
    printf -v done '%*s' "$full" ''
    if [ -t 1 ]; then printf '\r   [%s%*s] %s\033[K' "${done// /#}" "$((30 - full))" '' "$3"; else echo "   $3"; fi
}

broken() { # WORDS: what a stage has written, and the way out
    tail -n 20 "$LOG" >&2
    fail "
$1
The whole output is in $LOG."
}

tell_install() {
    local installed=("$VENV"/lib/python*/site-packages/*.dist-info) found
    found=$(grep -cE '^(Collecting|Processing|Obtaining) ' "$LOG" || true)
    bar $((found + ${#installed[@]})) $((2 * PACKAGES)) "$found of $PACKAGES packages found, ${#installed[@]} installed"
}

compiled() { printf '%s\n' "$CACHE"/*.o | grep -c . || true; }

tell_kernels() { bar "$(compiled)" "$KERNELS" "$(compiled) of $KERNELS kernels"; }

tell_training() {
    local done=0 loss=
    if [ "$RUN/metrics.jsonl" -nt "$WORK/began" ]; then
        done=$(wc -l <"$RUN/metrics.jsonl")
        loss=$(tail -n 1 "$RUN/metrics.jsonl" | sed -n 's/.*"loss": \([0-9.]*\).*/, loss \1/p' | cut -c1-13)
    fi
    bar "$done" "$STEPS" "step $done of $STEPS$loss"
}

train() { # RANKS ARGUMENTS...
    "$VENV/bin/mpiexec" -n "$1" "$VENV/bin/python" -m mpizero train "$CONFIG" "${@:2}"
}

for argument; do
    case ${argument#--set=} in
        checkpoint.folder=*) RUN=$(dirname "${argument#*folder=}") ;;
        train.steps=*) STEPS=${argument##*=} ;;
    esac
done
find_python >/dev/null
{ mkdir -p run && [ -w . ]; } || fail "$PWD cannot be written: copy these sources to a folder of yours, and start there"
WORK=$(mktemp -d) && LOG=$WORK/output

cat <<PLAN
A language model that learns to write Python, on $RANKS MPI ranks. On two idle cores the first time takes about 90 s:
  1. install mpizero, MPICH and what they need, as wheels, into $VENV (15 s)
  2. compile the $KERNELS kernels of this model for this CPU, once (30 s)
  3. train $STEPS steps on the sources of Python's standard library (25 s)
  4. show the curve of the loss, what the model writes, the sha256 of its parameters
PLAN

say "1. Installing"
stage tell_install ensure_venv "$VENV" install_quickstart || broken "Nothing was trained: the installation failed.
Without a network give pip its packages (PIP_FIND_LINKS=FOLDER PIP_NO_INDEX=1), behind a proxy set HTTPS_PROXY;
PYTHON=/path/to/python takes another Python (3.11 or newer), VENV=FOLDER another place. Then start again."
if [ -s "$LOG" ]; then echo "   done in $TOOK"; else echo "   it is there already: $VENV"; fi

say "2. Compiling"
CACHE=$("$VENV/bin/python" -c 'from mpizero.kernels import machine_code as m; print(m.folder(m.cpu_identity()))')
if [ "$(compiled)" -ge "$KERNELS" ]; then
    echo "   they are there already: $CACHE"
else
    stage tell_kernels train 2 \
        --set train.steps=1 --set optimizer.warmup=0 --set checkpoint.folder="$WORK/one/checkpoints" ||
        broken "Nothing was trained: a first step failed; $VENV/bin/mpizero doctor looks at MPI, cores and memory."
    echo "   $(compiled) kernels in $TOOK, kept in $CACHE"
fi

say "3. Training"
stage tell_training train "$RANKS" "$@" || broken "The training has ended with status $?; docs/failures.md says what it means."
echo "   done in $TOOK"
SHA=$(sed -n 's/.*"parameters_sha256": "\([0-9a-f]*\)".*/\1/p' "$LOG" | tail -n 1)

say "4. The loss in nats a byte (5.5 is guessing)"
"$VENV/bin/python" -m mpizero watch "$RUN" --once
say "What it writes"
"$VENV/bin/python" -m mpizero generate "$RUN" --prompt "    def __init__(self" --length 200 --temperature 0.7

saved=("$RUN"/checkpoints/step_*)
half=$((10#${saved[0]##*step_}))
again="$VENV/bin/python -m mpizero train $CONFIG${*:+ ${*@Q}}"
say "From nothing to sha256 $SHA in $SECONDS s"
cat <<DONE
Two more commands, which end with the same sha256: from a checkpoint on 3 ranks, and by ZeRO-3 on 2, each with half of all:
  $VENV/bin/mpiexec -n 3 $again${saved[1]:+ --resume-from $half}
  $VENV/bin/mpiexec -n 2 $again --set parallel.strategy=zero3 --set checkpoint.folder=run/zero3/checkpoints
DONE
rm -r "$WORK"
