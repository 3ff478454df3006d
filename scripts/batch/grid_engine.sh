#!/usr/bin/env bash
# A training as a job of Grid Engine: it saves before its time (h_rt) ends, and is rescheduled until it is done.
#
#   qsub -pe mpi 64 -l h_rt=12:00:00 scripts/batch/grid_engine.sh config.toml [--set SECTION.KEY=VALUE]...
#
# Environment (qsub -v): TRAIN (scripts/slurm/train.sbatch below the folder of submission; requeue.sbatch lies beside it),
# LAUNCH (mpiexec; -n is added), and what these two take. In an array (-t 1-4), %a in an argument is the task's number.
#
#$ -S /bin/bash
#$ -N mpizero -cwd -j y -o $JOB_NAME.$JOB_ID.log
#$ -pe mpi 8
#$ -l h_rt=04:00:00
# SIGUSR1 before a suspension, SIGUSR2 before a SIGKILL. No s_rt: 8.1.9 kills a rescheduled job at that time.
#$ -notify
#$ -r y
[ "$SGE_TASK_ID" = undefined ] || array_task=$SGE_TASK_ID
job=$JOB_ID${array_task:+.$array_task} cancelled_by=USR2
again() { exit 99; } # which asks to be rescheduled
# MPICH's mpiexec dies of the SIGUSR2 that Grid Engine sends to all processes; train.sbatch passes it on as SIGUSR1.
mpiexec=${LAUNCH:-mpiexec} LAUNCH=ranks
ranks() {
    trap '' USR2
    exec "$mpiexec" -n "$NSLOTS" "$@"
}
limit=$(PATH=$PATH:${SGE_BINARY_PATH:-} qstat -j "$JOB_ID" | sed -n 's/^hard resource_list:.*h_rt=\([0-9]*\).*/\1/p')
[ -n "$limit" ] || echo "no h_rt can be read from qstat: without train.time_limit nothing is saved before the time ends" >&2
[ $# = 0 ] || [ -z "$limit" ] || set -- "$1" --set "train.time_limit=$limit" "${@:2}"
TRAIN=${TRAIN:-scripts/slurm/train.sbatch}
# shellcheck source=scripts/slurm/requeue.sbatch
. "$(dirname "$TRAIN")/requeue.sbatch"
exit 78 # it cannot be read
