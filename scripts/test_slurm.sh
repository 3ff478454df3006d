#!/usr/bin/env bash
# The shipped batch scripts under a real Slurm: starts munged, slurmctld and slurmd on this machine, runs jobs, cleans up.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. scripts/environment.sh
. scripts/harness/cluster.sh

usage() {
    cat <<'HELP'
usage: scripts/test_slurm.sh [--python OPENMPI_PYTHON] [--mpich-python PYTHON] [--keep] [--help]

  --python        of an environment whose mpi4py uses Open MPI with PMIx (.venv-openmpi/bin/python)
  --mpich-python  of one with MPICH, for the job under srun --mpi=pmi2 (.venv-test/bin/python); "" leaves that out
  --keep          keep the folder with all logs

Root is needed; slurmctld, slurmd, slurm-client and munge are installed with apt-get where they are missing.
scripts/test.sh makes both environments. Exit status: 0 passed, 1 failed, 77 left out (the last line says why).
HELP
}

PYTHON=.venv-openmpi/bin/python MPICH_PYTHON=.venv-test/bin/python KEEP=false
while [ $# -gt 0 ]; do
    case $1 in
        --python) PYTHON=${2:?} && shift ;;
        --mpich-python) MPICH_PYTHON=${2?} && shift ;;
        --keep) KEEP=true ;;
        --help | -h) usage && exit 0 ;;
        *) usage >&2 && exit 64 ;;
    esac
    shift
done

have_slurm() {
    command -v munged slurmctld slurmd sbatch srun scontrol >/dev/null
}

[ "$(id -u)" = 0 ] || left_out "starting Slurm needs root"
have_slurm || { can_apt && apt_install slurmctld slurmd slurm-client munge >/dev/null 2>&1; }
have_slurm || left_out "slurmctld, slurmd, slurm-client and munge cannot be installed"
"$PYTHON" -c 'import mpi4py' 2>/dev/null || left_out "$PYTHON has no mpi4py; scripts/test.sh makes such an environment"
PYTHON=$(realpath -s "$PYTHON")
[ -z "$MPICH_PYTHON" ] || [ ! -x "$MPICH_PYTHON" ] || MPICH_PYTHON=$(realpath -s "$MPICH_PYTHON")

ROOT=$PWD
# Short: sockets lie there. Readable by all: munge's clients come to it.
BASE=$(mktemp -d /tmp/mzslurm.XXXXXX) && chmod 755 "$BASE"
export SLURM_CONF=$BASE/slurm.conf PYTHON OMP_NUM_THREADS=1 PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
# One node with fewer cores than ranks: waiting ranks give way. Open MPI believes 8 CPUs.
export OMPI_MCA_mpi_yield_when_idle=1

# ------------------------------------------------------------------------------------------ a cluster of one node

write_configuration() {
    local host=$1 controller=$2 node=$3
    cat >"$SLURM_CONF" <<CONF
ClusterName=mpizero
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$controller
SlurmdPort=$node
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$BASE/munge.socket
StateSaveLocation=$BASE/state
SlurmdSpoolDir=$BASE/spool
SlurmctldPidFile=$BASE/slurmctld.pid
SlurmdPidFile=$BASE/slurmd.pid
SlurmctldLogFile=$BASE/slurmctld.log
SlurmdLogFile=$BASE/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
MpiDefault=pmix
NodeName=$host NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=test Nodes=$host Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=$host MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
CONF
}

start_cluster() {
    local host ports
    host=$(hostname -s)
    read -ra ports <<<"$(free_ports)"
    mkdir "$BASE"/{state,spool}
    write_configuration "$host" "${ports[@]}"
    (umask 077 && head -c 128 /dev/urandom >"$BASE/munge.key")
    start munged munged --foreground --force --key-file="$BASE/munge.key" --socket="$BASE/munge.socket" \
        --pid-file="$BASE/munged.pid" --log-file="$BASE/munged.log" --seed-file="$BASE/munge.seed"
    wait_for 30 test -S "$BASE/munge.socket" || return 1
    start slurmctld slurmctld -D -i -f "$SLURM_CONF"
    start slurmd slurmd -D -f "$SLURM_CONF"
    wait_for 60 node_is_idle
}

node_is_idle() {
    [ "$(sinfo --noheader --format=%T 2>/dev/null)" = idle ]
}

no_jobs() {
    [ -z "$(squeue --noheader 2>/dev/null)" ]
}

# End only what was started here: jobs through Slurm, daemons by their process.
stop_cluster() {
    if [ ${#STARTED[@]} -gt 2 ]; then
        squeue --noheader --format=%A 2>/dev/null | xargs -r scancel --signal=KILL --full 2>/dev/null
        squeue --noheader --format=%A 2>/dev/null | xargs -r scancel 2>/dev/null
        wait_for 20 no_jobs
    fi
    end_daemons
}

# ------------------------------------------------------------------------------------------ jobs

# field JOB NAME: a field of `scontrol show job`.
field() {
    scontrol show --oneliner job "$1" | tr ' ' '\n' | sed -n "s/^$2=//p" | head -n 1
}

# state_is JOB PATTERN
state_is() {
    [[ $(field "$1" JobState) =~ ^($2)$ ]]
}

# was_requeued JOB: it has run, has left the node, and waits to run again.
was_requeued() {
    [ "$(field "$1" Restarts)" -gt 0 ] && state_is "$1" PENDING &&
        grep -qF "[$1.batch] done with job" "$BASE/slurmd.log"
}

# submit SCRIPT RUN OPTION... -- SETTING...: print the job's number.
submit() {
    split "${@:2}"
    sbatch --parsable --output="$2.log" "${OPTIONS[@]}" "$ROOT/scripts/slurm/$1.sbatch" config.toml "${SETTINGS[@]}"
}

# again JOB: let a job that was put into the queue again start soon; Slurm would wait two minutes, so as to be sure that
# the credential of the session before, of which whole seconds count, does not pass for the new one's.
again() {
    sleep 2
    scontrol update JobId="$1" StartTime=now
}

# ------------------------------------------------------------------------------------------ checks

# 8 tasks, a signal in mid-epoch, saved, requeued by the script itself, resumed on 4 tasks.
signalled() {
    local job
    job=$(submit requeue signalled --ntasks=8 --time=20 --) || return 1
    wait_for 240 has_steps signalled 5 || { REASON="no step in 240 s" && return 1; }
    scancel --signal=USR1 --batch "$job"
    wait_for 120 was_requeued "$job" || { REASON="not requeued: $(field "$job" JobState)" && return 1; }
    NOTE="stopped after step $(steps signalled)"
    scontrol update JobId="$job" NumTasks=4 NumCPUs=4
    again "$job"
    wait_for 240 state_is "$job" 'COMPLETED|FAILED|CANCELLED|TIMEOUT'
    expect state "$(field "$job" JobState)" COMPLETED
    expect restarts "$(field "$job" Restarts)" 1
    expect_text signalled.log "stopped by SIGUSR1 on rank [0-7] after step $(("${NOTE##* }")): saved"
    expect_result signalled 4
    NOTE+=" on 8 tasks, requeued, ended on 4 with the same hash"
    [ -z "$REASON" ]
}

# Slurm's own time limit, of which 3 minutes all but 2 seconds are kept for saving; then submitted again.
timed() {
    local job
    job=$(submit train timed --ntasks=4 --time=3 --signal=B:USR1@1 -- train.time_reserve=179) || return 1
    wait_for 240 state_is "$job" 'COMPLETED|FAILED|CANCELLED|TIMEOUT'
    expect status "$(field "$job" ExitCode)" 75:0
    expect_text timed.log 'stopped by the time limit \(Slurm.s: 1[0-9]* s left, 179 s kept for saving\) after step'
    NOTE="exit status 75 after step $(steps timed)"
    if [ -x "$MPICH_PYTHON" ]; then
        job=$(PYTHON=$MPICH_PYTHON LAUNCH="srun --mpi=pmi2" submit train timed --ntasks=3 --time=20 --) || return 1
    else
        job=$(submit train timed --ntasks=3 --time=20 --) || return 1
    fi
    wait_for 240 state_is "$job" 'COMPLETED|FAILED|CANCELLED|TIMEOUT'
    expect state "$(field "$job" JobState)" COMPLETED
    expect_result timed 3
    NOTE+=", resumed on 3 tasks$([ -x "$MPICH_PYTHON" ] && echo " (MPICH, PMI2)"), the same hash"
    [ -z "$REASON" ]
}

# The batch script of a new project, signalled: it saves, and puts itself into the queue again.
projected() {
    local job steps=train.steps=900 whole
    "$PYTHON" -m mpizero new project --kind numpy >/dev/null || return 1
    (cd project && "$PYTHON" -m mpizero train config.toml --set $steps --set checkpoint.folder=whole/checkpoints) >project.log 2>&1
    whole=$(told project/whole parameters_sha256)
    job=$(PATH=$(dirname "$PYTHON"):$PATH sbatch --parsable --chdir=project --output=project.log --time=20 \
        project/job_openmpi.sbatch --set $steps) || return 1
    wait_for 120 has_steps project/run 5 || { REASON="no step in 120 s" && return 1; }
    scancel --signal=USR1 --batch "$job"
    wait_for 120 was_requeued "$job" || { REASON="not requeued: $(field "$job" JobState)" && return 1; }
    NOTE="stopped after step $(steps project/run)"
    again "$job"
    wait_for 240 state_is "$job" 'COMPLETED|FAILED|CANCELLED|TIMEOUT'
    expect state "$(field "$job" JobState)" COMPLETED
    expect restarts "$(field "$job" Restarts)" 1
    expect hash "$(told project/run parameters_sha256)" "$whole"
    NOTE+=", requeued, ended with the hash of one process"
    [ -z "$REASON" ]
}

# Jobs of both scripts that are cancelled while they train: saved, and not put into the queue again.
cancelled() {
    local job jobs
    rm -rf project/run
    jobs=("$(submit requeue cancelled --ntasks=2 --time=20 -- train.steps=9000)"
        "$(PATH=$(dirname "$PYTHON"):$PATH sbatch --parsable --chdir=project --output=cancelled_project.log --ntasks=2 \
            --time=20 project/job_openmpi.sbatch --set train.steps=90000)") || return 1
    wait_for 120 has_steps cancelled 2 && wait_for 120 has_steps project/run 2 || { REASON="no step" && return 1; }
    scancel "${jobs[@]}"
    for job in "${jobs[@]}"; do
        wait_for 120 state_is "$job" 'COMPLETED|FAILED|CANCELLED|TIMEOUT|PENDING'
        expect state "$(field "$job" JobState)" CANCELLED
        expect restarts "$(field "$job" Restarts)" 0
    done
    for log in cancelled project/cancelled_project; do
        expect_text $log.log 'requeue: exit status 75; not requeued: the job is COMPLETING for Slurm: it was cancelled'
    done
    NOTE="saved, and not requeued"
    [ -z "$REASON" ]
}

# Another job takes the node: Slurm itself puts this one into the queue again, once; and then it goes on.
preempted() {
    local job
    job=$(submit requeue preempted --ntasks=2 --time=20 --) || return 1
    wait_for 120 has_steps preempted 2 || { REASON="no step in 120 s" && return 1; }
    sbatch --partition=urgent --ntasks=8 --output=/dev/null --wrap true >/dev/null
    wait_for 120 was_requeued "$job" || { REASON="not requeued: $(field "$job" JobState)" && return 1; }
    again "$job"
    wait_for 240 state_is "$job" 'COMPLETED|FAILED|CANCELLED|TIMEOUT'
    expect state "$(field "$job" JobState)" COMPLETED
    expect restarts "$(field "$job" Restarts)" 1
    expect_text preempted.log 'not requeued: the job is COMPLETING for Slurm: .*or Slurm itself puts it into the queue'
    expect hash "$(told preempted parameters_sha256)" "$HASH"
    NOTE="saved, requeued once, by Slurm, ended with the same hash"
    [ -z "$REASON" ]
}

# A job that finds no train.sbatch.
lost() {
    local job
    job=$(TRAIN=none submit requeue lost --ntasks=1 --time=20 --) || return 1
    wait_for 60 state_is "$job" 'COMPLETED|FAILED|CANCELLED|TIMEOUT'
    expect status "$(field "$job" ExitCode)" 78:0
    expect restarts "$(field "$job" Restarts)" 0
    NOTE="exit status 78, not requeued"
    [ -z "$REASON" ]
}

# A rank that is killed at the same step in every session: requeued once, then never again.
failing() {
    local job
    job=$(MPIZERO_FAULT=train.step:1:3:kill submit requeue failing --ntasks=2 --time=20 -- checkpoint.every=0) || return 1
    wait_for 240 was_requeued "$job" && again "$job"
    wait_for 240 state_is "$job" 'COMPLETED|FAILED|CANCELLED|TIMEOUT'
    expect state "$(field "$job" JobState)" FAILED
    expect restarts "$(field "$job" Restarts)" 1
    expect_text failing.log 'not requeued: it has ended twice at the same checkpoint \(no checkpoint\)'
    NOTE="exit status $(field "$job" ExitCode): requeued once, not twice"
    [ -z "$REASON" ]
}

# Two tasks of an array, each with a folder and a seed of its own; one is stopped, and only that one is requeued. It is the
# last, whose number is that of the whole array.
arrayed() {
    local job task
    job=$(submit requeue 'array_%a' --array=1-2 --ntasks=2 --time=20 -- train.steps=800 train.seed=%a) || return 1
    wait_for 120 has_steps array_1 2 && wait_for 120 has_steps array_2 2 || { REASON="no step" && return 1; }
    scancel --signal=USR1 --batch "${job}_2"
    wait_for 120 state_is "${job}_2" PENDING || { REASON="not requeued: $(field "${job}_2" JobState)" && return 1; }
    wait_for 60 grep -qF "[$job.batch] done with job" "$BASE/slurmd.log"
    again "${job}_2"
    for task in 1 2; do
        wait_for 240 state_is "${job}_$task" 'COMPLETED|FAILED|CANCELLED|TIMEOUT'
        expect "state of task $task" "$(field "${job}_$task" JobState)" COMPLETED
        expect "restarts of task $task" "$(field "${job}_$task" Restarts)" $((task - 1))
        seeded $task 800
        expect "hash of task $task" "$(told array_$task parameters_sha256)" "$(told seed_$task parameters_sha256)"
    done
    NOTE="one of two tasks requeued, both with their seed's hash"
    [ -z "$REASON" ]
}

# doctor_says KIND PYTHON PATTERN: what doctor finds on two tasks under srun --mpi=KIND.
doctor_says() {
    srun --ntasks=2 --mpi="$1" "$2" -m mpizero doctor >"doctor-$1.log" 2>&1
    expect_text "doctor-$1.log" "$3"
}

# MPICH's ranks that think they are alone are told so, once; Open MPI's cannot start then.
examined() {
    doctor_says pmix "$PYTHON" 'ok +launch +srun --mpi=pmix: 2 ranks on 1 node'
    expect_text doctor-pmix.log 'time limit +Slurm does not say'
    NOTE='all is well with --mpi=pmix'
    if [ -x "$MPICH_PYTHON" ]; then
        doctor_says none "$MPICH_PYTHON" 'FAIL +launch +srun has started 2 processes, but each sees 1'
        expect findings "$(grep -c 'FAIL' doctor-none.log)" 1
        NOTE+='; --mpi=none is named'
    fi
    [ -z "$REASON" ]
}

trap stop_cluster EXIT
trap 'exit 130' INT TERM
say "Slurm in $BASE"
if start_cluster; then
    srun --version
    write_inputs 400
    check "one process, uninterrupted" uninterrupted
    check "signal, requeue, 8 -> 4 tasks" signalled
    check "Slurm's time limit, 4 -> 3 tasks" timed
    check "the same failure twice" failing
    check "a new project's script, 4 tasks" projected
    check "cancelled, both scripts" cancelled
    check "preempted by another job" preempted
    check "train.sbatch is missing" lost
    check "an array of two tasks" arrayed
    check "doctor" examined
else
    tail -n 5 "$BASE"/*.out "$BASE"/*.log
    STATUS=1 TABLE="the cluster does not start"
fi
summarize
