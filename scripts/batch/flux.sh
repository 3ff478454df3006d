#!/usr/bin/env bash
# NOT TRIED, written from the manuals of Flux: a training as a batch job that saves before its time ends, and submits itself
# again to the enclosing instance until it is done.
#
#   flux batch -n 64 -t 12h scripts/batch/flux.sh config.toml [--set SECTION.KEY=VALUE]...
#
# Environment: TRAIN as in grid_engine.sh; LAUNCH (flux run -n, the number of the job's cores), SCRIPT (this file).
#
#flux: -n8
#flux: -t 4h
#flux: --job-name=mpizero
#flux: --output=mpizero.{{id}}.log
ranks=$(flux resource list -n -o '{ncores}' -s all | head -n 1) left=$(flux job timeleft)
# Each submission has a number of its own: CHAIN keeps the first.
job=${CHAIN:-$(flux getattr jobid)} cancelled_by=TERM
arguments=("$@")
again() {
    flux --parent batch -n "$ranks" -t "${left}s" --env='*' --env=CHAIN="$job" "${SCRIPT:-scripts/batch/flux.sh}" \
        "${arguments[@]}"
}
LAUNCH=${LAUNCH:-flux run -n $ranks}
[ $# = 0 ] || set -- "$1" --set "train.time_limit=$left" "${@:2}"
TRAIN=${TRAIN:-scripts/slurm/train.sbatch}
# shellcheck source=scripts/slurm/requeue.sbatch
. "$(dirname "$TRAIN")/requeue.sbatch"
exit 78 # it cannot be read
