#!/usr/bin/env bash
# The batch script for Grid Engine under a real one: starts sge_qmaster and sge_execd on this machine, runs jobs, cleans up.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. scripts/environment.sh
. scripts/harness/cluster.sh

usage() {
    cat <<'HELP'
usage: scripts/test_grid_engine.sh [--python PYTHON] [--keep] [--help]

  --python  of an environment with mpi4py, beside whose mpiexec it lies (.venv-test/bin/python)
  --keep    keep the folder with all logs

Root is needed. Debian's packages of Grid Engine are unpacked into a temporary folder where they are not installed: they
would bring a mail server, and start daemons. Exit status: 0 passed, 1 failed, 77 left out (the last line says why).
HELP
}

PYTHON=.venv-test/bin/python KEEP=false
while [ $# -gt 0 ]; do
    case $1 in
        --python) PYTHON=${2:?} && shift ;;
        --keep) KEEP=true ;;
        --help | -h) usage && exit 0 ;;
        *) usage >&2 && exit 64 ;;
    esac
    shift
done

[ "$(id -u)" = 0 ] || left_out "starting Grid Engine needs root"
"$PYTHON" -c 'import mpi4py' 2>/dev/null || left_out "$PYTHON has no mpi4py; scripts/test.sh makes such an environment"
PYTHON=$(realpath -s "$PYTHON")
ROOT=$PWD
BASE=$(mktemp -d /tmp/mzsge.XXXXXX) && chmod 755 "$BASE"
# Programs find their libraries in PROGRAMS alone.
PROGRAMS=/usr/lib/gridengine FILES=
export PYTHON OMP_NUM_THREADS=1 PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} MPIR_CVAR_ENABLE_HEAVY_YIELD=1
export LAUNCH=$(dirname "$PYTHON")/mpiexec TRAIN=$ROOT/scripts/slurm/train.sbatch

# ------------------------------------------------------------------------------------------ a cluster of one node

unpack() {
    mkdir "$BASE/packages" && cd "$BASE/packages" || return 1
    { apt-get update -qq && apt-get download -qq gridengine-{master,exec,client,common} libjemalloc2; } >/dev/null 2>&1
    for package in *.deb; do
        dpkg -x "$package" "$BASE/files" || return 1
    done
    cd "$ROOT" && FILES=$BASE/files && ln -s "$FILES$PROGRAMS" $PROGRAMS
    export LD_LIBRARY_PATH=$FILES/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    # Jobs do not get this variable.
    mkdir $PROGRAMS/lx-amd64 && printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s/qstat "$@"\n' "$LD_LIBRARY_PATH" $PROGRAMS \
        >$PROGRAMS/lx-amd64/qstat && chmod +x $PROGRAMS/lx-amd64/qstat
}

# fill NAME VALUE...: in a configuration read from standard input.
fill() {
    local words=()
    while [ $# -gt 0 ]; do
        words+=(-e "s|^$1 .*|$1 $2|")
        shift 2
    done
    sed "${words[@]}"
}

start_cluster() {
    local host shared=$FILES/usr/share/gridengine common=$BASE/default/common
    host=$(hostname)
    read -ra ports <<<"$(free_ports)"
    export SGE_ROOT=$BASE SGE_CELL=default SGE_QMASTER_PORT=${ports[0]} SGE_EXECD_PORT=${ports[1]}
    export PATH=$PROGRAMS:$PATH
    mkdir -p "$common" "$BASE"/{qmaster,execd} && ln -s "$shared/util" "$BASE/util"
    echo "$host" >"$common/act_qmaster"
    echo "$host localhost" >"$common/host_aliases"
    fill admin_user none spooling_method classic spooling_lib libspoolc spooling_params "$common;$BASE/qmaster" \
        binary_path $PROGRAMS qmaster_spool_dir "$BASE/qmaster" <"$shared/default-bootstrap" >"$common/bootstrap"
    fill execd_spool_dir "$BASE/execd" min_uid 0 min_gid 0 \
        reporting_params 'accounting=true reporting=false flush_time=0:0:1 accounting_flush_time=0:0:0' <"$shared/default-configuration" >"$BASE/configuration"
    spoolinit classic libspoolc "$common;$BASE/qmaster" init
    spooldefaults configuration "$BASE/configuration"
    spooldefaults complexes "$shared/util/resources/centry"
    spooldefaults usersets "$shared/util/resources/usersets"
    spooldefaults managers root
    SGE_ND=1 start qmaster sge_qmaster # in the foreground
    wait_for 60 qconf -sh >/dev/null 2>&1 || return 1
    qconf -as "$host" >/dev/null
    SGE_ND=1 start execd sge_execd
    qconf -ssconf | fill schedule_interval 0:0:1 load_formula slots job_load_adjustments NONE >"$BASE/scheduler"
    cat >"$BASE/environment" <<'PE'
pe_name mpi
slots 99
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule $fill_up
control_slaves TRUE
job_is_first_task FALSE
urgency_slots min
accounting_summary FALSE
qsort_args NONE
PE
    qconf -sq | fill qname all.q hostlist "$host" slots 8 pe_list mpi load_thresholds NONE notify 00:01:00 >"$BASE/queue"
    qconf -Msconf "$BASE/scheduler" >/dev/null && qconf -Ap "$BASE/environment" && qconf -Aq "$BASE/queue" &&
        wait_for 60 node_is_ready
}

node_is_ready() {
    qstat -f | grep -q 'all.q@.* 0/0/8 .*lx-amd64 *$'
}

no_jobs() {
    [ -z "$(qstat 2>/dev/null)" ]
}

# End only what was started here: jobs through Grid Engine, daemons by their process.
stop_cluster() {
    if [ ${#STARTED[@]} -gt 1 ]; then
        qdel -u root >/dev/null 2>&1
        wait_for 90 no_jobs
    fi
    [ -z "$FILES" ] || rm -f $PROGRAMS
    end_daemons
}

# ------------------------------------------------------------------------------------------ jobs

# submit RUN OPTION... -- SETTING...: print the job's number.
submit() {
    split "$@"
    qsub -terse -V -o "$1.log" "${OPTIONS[@]}" "$ROOT/scripts/batch/grid_engine.sh" config.toml "${SETTINGS[@]}"
}

# state JOB: as qstat shows it; nothing once it has ended.
state() {
    qstat | awk -v job="$1" '$1 == job { print $5 }'
}

has_ended() {
    [ -z "$(state "$1")" ] && qacct -j "$1" >/dev/null 2>&1
}

was_rescheduled() {
    [[ $(state "$1") == *Rq ]]
}

has_line() {
    grep -q "$2" "$1" 2>/dev/null
}

# status JOB: the exit status of its last session.
status() {
    qacct -j "$1" | sed -n 's/^exit_status *\([0-9]*\).*/\1/p' | tail -n 1
}

sessions() {
    qacct -j "$1" | grep -c ^exit_status
}

# ------------------------------------------------------------------------------------------ checks

# 4 slots, a signal in mid-epoch, saved, rescheduled by the exit status, resumed on 2 slots.
signalled() {
    local job
    job=$(submit signalled -pe mpi 4 --) || return 1
    wait_for 120 has_steps signalled 5 || { REASON="no step in 120 s" && return 1; }
    qhold "$job" >/dev/null && qmod -sj "$job" >/dev/null
    wait_for 120 was_rescheduled "$job" || { REASON="not rescheduled: $(state "$job")" && return 1; }
    NOTE="stopped after step $(steps signalled)"
    qalter -pe mpi 2 "$job" >/dev/null && qrls "$job" >/dev/null
    wait_for 240 has_ended "$job"
    expect status "$(status "$job")" 0
    expect sessions "$(sessions "$job")" 2
    expect_text signalled.log "stopped by SIGUSR1 on rank [0-3] after step $(("${NOTE##* }")): saved"
    expect_result signalled 2
    NOTE+=" on 4 slots, rescheduled, ended on 2 with the same hash"
    [ -z "$REASON" ]
}

# The time limit, twice; then a file STOP, after which the job is not rescheduled.
limited() {
    local job
    job=$(submit limited -pe mpi 2 -l h_rt=0:1:0 -- train.steps=90000 train.time_reserve=48) || return 1
    wait_for 120 has_line limited.log ', restart 2' || { REASON="not rescheduled: $(state "$job")" && return 1; }
    touch limited/STOP
    wait_for 120 has_ended "$job"
    expect status "$(status "$job")" 75
    expect sessions "$(sessions "$job")" 3
    expect_text limited.log 'stopped by the time limit \(train.time_limit: [0-9]* s left, 48 s kept for saving\) after step'
    expect_text limited.log 'not requeued: stopped by the file'
    NOTE="saved and rescheduled twice, until a file STOP"
    [ -z "$REASON" ]
}

# qdel of a job that trains: SIGUSR2, saved, and not rescheduled.
cancelled() {
    local job
    job=$(submit cancelled -pe mpi 2 -- train.steps=90000) || return 1
    wait_for 120 has_steps cancelled 2 || { REASON="no step" && return 1; }
    qdel "$job" >/dev/null
    wait_for 90 has_ended "$job"
    expect status "$(status "$job")" 75
    expect sessions "$(sessions "$job")" 1
    expect_text cancelled.log 'exit status 75; not requeued: SIGUSR2 says that the job was cancelled'
    NOTE="saved, and not rescheduled"
    [ -z "$REASON" ]
}

# A rank that is killed at the same step in every session: rescheduled once, then never again.
failing() {
    local job
    job=$(MPIZERO_FAULT=train.step:1:3:kill submit failing -pe mpi 2 -- checkpoint.every=0) || return 1
    wait_for 240 has_ended "$job"
    expect sessions "$(sessions "$job")" 2
    expect_text failing.log 'not requeued: it has ended twice at the same checkpoint \(no checkpoint\)'
    NOTE="exit status $(status "$job"): rescheduled once, not twice"
    [ -z "$REASON" ]
}

lost() {
    local job
    job=$(TRAIN=none/train.sbatch submit lost -pe mpi 1 --) || return 1
    wait_for 60 has_ended "$job"
    expect status "$(status "$job")" 78
    expect sessions "$(sessions "$job")" 1
    NOTE="exit status 78, not rescheduled"
    [ -z "$REASON" ]
}

# Two tasks of an array, each with a folder of its own; the first is stopped, and only it is rescheduled.
ensemble() {
    local job
    job=$(submit 'ensemble_%a' -t 1-2 -pe mpi 2 -o 'ensemble_$TASK_ID.log' -- train.steps=800 train.seed=%a) || return 1
    job=${job%%.*}
    wait_for 120 has_steps ensemble_1 2 || { REASON="no step" && return 1; }
    qmod -sj "$job.1" >/dev/null
    wait_for 240 has_ended "$job"
    wait_for 120 test -e ensemble_1/run_complete
    expect sessions "$(sessions "$job")" 3
    for task in 1 2; do
        expect "ranks of task $task" "$(told ensemble_$task ranks)" 2
        seeded $task 800
        expect "hash of task $task" "$(told ensemble_$task parameters_sha256)" "$(told seed_$task parameters_sha256)"
    done
    NOTE="one of two tasks rescheduled, both with their seed's hash"
    [ -z "$REASON" ]
}

trap stop_cluster EXIT
trap 'exit 130' INT TERM
say "Grid Engine in $BASE"
[ -x $PROGRAMS/sge_qmaster ] || unpack || left_out "Debian's packages of Grid Engine cannot be had"
if start_cluster; then
    write_inputs 400
    check "one process, uninterrupted" uninterrupted
    check "signal, rescheduled, 4 -> 2 slots" signalled
    check "time limit h_rt" limited
    check "the same failure twice" failing
    check "cancelled" cancelled
    check "requeue.sbatch is missing" lost
    check "an array of two tasks" ensemble
else
    tail -n 5 "$BASE"/*.out "$BASE"/qmaster/messages
    STATUS=1 TABLE="the cluster does not start"
fi
summarize
