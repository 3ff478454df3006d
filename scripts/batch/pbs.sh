#!/usr/bin/env bash
# NOT TRIED, written from the manuals of OpenPBS: a training as a job that saves before its walltime ends, and submits
# itself again until it is done. `qsub` passes no arguments to a script: they are in ARGUMENTS.
#
#   qsub -l select=2:ncpus=32:mpiprocs=32 -l walltime=12:00:00 -v ARGUMENTS="config.toml" scripts/batch/pbs.sh
#
# Environment (qsub -v): TRAIN and LAUNCH as in grid_engine.sh; in an array (-J 1-4) %a is the task's number.
#
#PBS -N mpizero
#PBS -l select=1:ncpus=8:mpiprocs=8
#PBS -l walltime=04:00:00
#PBS -j oe
#PBS -r y
cd "$PBS_O_WORKDIR" || exit 78
read -ra arguments <<<"${ARGUMENTS:-}"
set -- "${arguments[@]}"
array_task=${PBS_ARRAY_INDEX:-}
# Each submission has a number of its own: CHAIN keeps the first. qdel and the end of the walltime send SIGTERM.
job=${CHAIN:-$PBS_JOBID} cancelled_by=TERM
described=$(qstat -f "$PBS_JOBID")
value() { sed -n "s/^ *$1 = //p" <<<"$described"; }
again() { # A task of an array goes on as a job of its own: %a has become its number.
    qsub -l select="$(value Resource_List.select)" -l walltime="$(value Resource_List.walltime)" -q "$(value queue)" \
        -v CHAIN="$job",TRAIN="$TRAIN",LAUNCH="$mpiexec",PYTHON="${PYTHON:-python}",ARGUMENTS="${ARGUMENTS//%a/$array_task}" \
        "$0"
}
mpiexec=${LAUNCH:-mpiexec} LAUNCH="${LAUNCH:-mpiexec} -n $(wc -l <"$PBS_NODEFILE")"
[ $# = 0 ] || set -- "$1" --set "train.time_limit=$(value Resource_List.walltime)" "${@:2}"
TRAIN=${TRAIN:-scripts/slurm/train.sbatch}
# shellcheck source=scripts/slurm/requeue.sbatch
. "$(dirname "$TRAIN")/requeue.sbatch"
exit 78 # it cannot be read
