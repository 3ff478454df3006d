"""Two members on two ranks each, of which one raises on both: ``ensemble_program.py ON_FAILURE FOLDER``."""

import sys
import time

import mpizero as mz


def train(member):
    if member.number == 1:
        raise FloatingPointError("diverged")
    time.sleep(2.0)  # ranks that have failed wait
    with mz.ShardingConfig(comm=member.comm) as config:
        return {"ranks": len(config.communicator.allgather_object(0))}


mz.run_members(train, 2, run=f"{sys.argv[2]}/run", on_failure=sys.argv[1])
