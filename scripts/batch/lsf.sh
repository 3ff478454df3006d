#!/usr/bin/env bash
# NOT TRIED, written from the manuals of LSF: a training as a job that is told before its time ends, saves, and is requeued
# by its exit status (-Q) until it is done.
#
#   bsub -n 64 -W 12:00 -wa USR1 -wt 5 -Q 99 -r scripts/batch/lsf.sh config.toml [--set SECTION.KEY=VALUE]...
#
# Directives below are read only from standard input (bsub <lsf.sh), which leaves no place for arguments: ARGUMENTS then.
# Environment: TRAIN and LAUNCH as in grid_engine.sh; in an array (-J "mpizero[1-4]") %a is the task's number.
#
#BSUB -J mpizero
#BSUB -n 8
#BSUB -W 4:00
#BSUB -wa USR1
#BSUB -wt 5
#BSUB -Q 99
#BSUB -r
#BSUB -o mpizero.%J.log
[ $# -gt 0 ] || read -ra arguments <<<"${ARGUMENTS:-}"
[ $# -gt 0 ] || set -- "${arguments[@]}"
[ "${LSB_JOBINDEX:-0}" = 0 ] || array_task=$LSB_JOBINDEX
job=$LSB_JOBID${array_task:+.$array_task} cancelled_by=TERM # of bkill, after a SIGINT
again() { exit 99; }
LAUNCH="${LAUNCH:-mpiexec} -n $LSB_DJOB_NUMPROC"
TRAIN=${TRAIN:-scripts/slurm/train.sbatch}
# shellcheck source=scripts/slurm/requeue.sbatch
. "$(dirname "$TRAIN")/requeue.sbatch"
exit 78 # it cannot be read
