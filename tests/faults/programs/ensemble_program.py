"""Four members on two ranks each, of which member 2 raises on both of its ranks; the argument is on_failure."""

import sys
import time

import mpizero as mz


def train(member):
    if member.number == 2:
        raise FloatingPointError("diverged")
    time.sleep(2.0)  # longer than the timeout of who waits
    with mz.ShardingConfig(comm=member.comm, timeout=1.0) as config:
        return {"ranks": len(config.communicator.allgather_object(0))}


mz.run_members(train, 4, run=sys.argv[2], on_failure=sys.argv[1])
