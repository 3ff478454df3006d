"""Two trainers and two producers, which end as the first argument says; or one producer with a spool folder."""

import sys
import time
from pathlib import Path

import numpy as np

import mpizero as mz

kind, folder = sys.argv[1], Path(sys.argv[2])
LIKE = (np.zeros(1, np.float32), np.zeros(1, np.float32))


def spool():
    """Write samples until killed; print the number of each one that is accepted."""
    first = int(sys.argv[3])
    with mz.data.SpoolProducer(folder / "spool", "a", like=LIKE, window=1000) as producer:
        for number in range(first, first + int(sys.argv[4])):
            producer.put(np.full(1, number, np.float32), LIKE[1])
            print(number, flush=True)


def produce(job):
    count = 20
    with job.producer() as producer:
        for number in range(count):
            producer.put(np.full(1, number, np.float32), LIKE[1])
            if kind == "slow":
                time.sleep(0.25)
            if kind == "drains" and job.group.rank == 1 and number == 9:
                raise FloatingPointError("the solver has diverged")


def train(job):
    seen = 0
    config = mz.ShardingConfig(comm=job.group, micro_batch=1, timeout=3.0 if kind == "slow" else 600.0)
    options = {"on_error": "drain"} if kind == "drains" else {}
    with job.source(**options) as source, config:
        for x, _ in mz.data.batches(source, config, 30 if kind == "slow" else 4):
            seen += sum(config.communicator.allgather_object(len(x)))
    if job.group.rank == 0:
        print("trained", seen, flush=True)


if kind == "spool":
    spool()
else:
    with mz.data.OnlineJob(trainers=2, like=LIKE, window=4) as job:
        (train if job.trains else produce)(job)
