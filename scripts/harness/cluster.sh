# What test_slurm.sh and test_grid_engine.sh share: daemons, waiting, a small training, a table of checks. Bash; they set
# BASE (a new folder), KEEP (whether to keep it) and PYTHON.

STARTED=()
TABLE='' STATUS=0

left_out() {
    echo "left out: $*"
    exit 77
}

# start NAME COMMAND...: a daemon in the foreground of a background job, so that its process is known.
start() {
    local name=$1
    shift
    "$@" </dev/null >"$BASE/$name.out" 2>&1 &
    STARTED+=($!)
}

# end_daemons: end what `start` has started, no matter what it is, and remove the folder.
end_daemons() {
    local process
    for process in "${STARTED[@]}"; do
        kill "$process" 2>/dev/null
    done
    wait "${STARTED[@]}" 2>/dev/null
    if $KEEP; then echo "logs: $BASE"; else rm -rf "$BASE"; fi
}

free_ports() {
    "$PYTHON" - <<'PORTS'
import socket
found = [socket.socket() for _ in range(2)]
for one in found:
    one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in found))
PORTS
}

# wait_for SECONDS COMMAND...: until the command succeeds.
wait_for() {
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.1
    done
}

# steps RUN: how many have been done.
steps() {
    wc -l 2>/dev/null <"$1/metrics.jsonl" || echo 0
}

has_steps() {
    [ "$(steps "$1")" -ge "$2" ]
}

# told RUN KEY: a value of the run's result.
told() {
    "$PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1] + "/run_complete"))[sys.argv[2]])' "$1" "$2" 2>/dev/null
}

# expect WHAT FOUND WANTED: a line of the report; false, and part of the failure's reason, where they differ.
REASON=''
expect() {
    [ "$2" = "$3" ] && return
    REASON+="$1 is '$2', not '$3'; "
    return 1
}

expect_text() {
    grep -qE "$2" "$1" && return
    REASON+="$(basename "$1") has no '$2'; "
    return 1
}

# expect_result RUN RANKS: the run has ended on so many ranks with the hash of an uninterrupted one.
expect_result() {
    expect ranks "$(told "$1" ranks)" "$2"
    expect hash "$(told "$1" parameters_sha256)" "$HASH"
}

# check NAME FUNCTION: run it, and add a line to the table. The function leaves in NOTE what is worth telling.
check() {
    local name=$1 started=$SECONDS result=ok
    REASON='' NOTE=''
    "$2" || { result=FAILED && STATUS=1; }
    TABLE+=$(printf '%-34s %-6s %4d s  %s' "$name" $result $((SECONDS - started)) "${REASON:-$NOTE}")$'\n'
    [ $result = ok ] || tail -n 25 ./*.log
}

# split RUN OPTION... -- SETTING...: set OPTIONS, and SETTINGS, each after --set, for a training in the folder RUN.
split() {
    local setting folder=$1/checkpoints
    OPTIONS=() SETTINGS=()
    while shift && [ "$1" != -- ]; do
        OPTIONS+=("$1")
    done
    for setting in "checkpoint.folder=$folder" "${@:2}"; do
        SETTINGS+=(--set "$setting")
    done
}

HASH=''
uninterrupted() {
    "$PYTHON" -m mpizero train config.toml --set checkpoint.folder=whole/checkpoints >whole.log 2>&1
    HASH=$(told whole parameters_sha256)
    NOTE="parameters_sha256 ${HASH:0:16}..."
    [ -n "$HASH" ]
}

# seeded SEED STEPS: train in one process in the folder seed_SEED.
seeded() {
    "$PYTHON" -m mpizero train config.toml --set train.seed="$1" --set train.steps="$2" \
        --set "checkpoint.folder=seed_$1/checkpoints" >"seed_$1.log" 2>&1
}

# write_inputs STEPS: a text and a configuration, in a folder which becomes the current one.
write_inputs() {
    mkdir "$BASE/work" && cd "$BASE/work" || exit 1
    "$PYTHON" -c 'open("text.txt", "wb").write(bytes(32 + (i * i) % 90 for i in range(30000)))'
    cat >config.toml <<TOML
[model]
name = "gpt"
dim = 16
layers = 1
heads = 2
sequence = 16
[data]
text = "text.txt"
[train]
steps = $1
global_batch = 8
micro_batch = 1
validate_every = 0
[optimizer]
lr = 1e-2
TOML
}

# summarize: print the table; the exit status is 1 if a check has failed.
summarize() {
    say "summary"
    printf '%s\ntotal %d s\n' "$TABLE" $SECONDS
    exit $STATUS
}
