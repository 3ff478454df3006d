"""Divide the ranks of a job into trainers and producers."""

from __future__ import annotations

from typing import Any, Self

from mpizero._util.checks import require, whole
from mpizero._util.names import explains
from mpizero.comm import Communicator, as_communicator
from mpizero.comm.agreement import agree_equal, all_ranks
from mpizero.data.online.messages import MessageReceiver
from mpizero.data.online.producer import OnlineProducer
from mpizero.data.online.sample import SampleForm
from mpizero.data.online.stream import OnlineSource
from mpizero.errors import ConfigError, StateError


@explains
class OnlineJob:
    """Divide the ranks of ``comm`` into trainers, the first ones, and producers, which send them samples.

    Construction and :meth:`close` are collective over ``comm``. docs/online.md says how to use it.

    Parameters
    ----------
    comm : mpi4py communicator, Communicator or None
        All ranks of the job; None is all ranks that the launcher has started.
    trainers : int
        Number of ranks that train, from rank 0 on; all others produce.
    like : pair of arrays
        One sample ``(x, y)``, without an axis of samples. Only its shapes and dtypes count.
    window : int
        The most samples of one producer that are not in a batch yet.

    Attributes
    ----------
    trains : bool
        Whether this rank is a trainer.
    group : Communicator
        The trainers, or the producers: those to which this rank belongs. A trainer passes it to
        ``ShardingConfig(comm=job.group)``; a simulation may use it for its own messages.

    Raises
    ------
    ConfigError
        On every rank, if no rank is left to produce, or arguments differ between ranks.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> like = np.zeros(2), np.zeros(1)  # one sample: its shapes and dtypes
    >>> def work(comm):  # in a job: work(None), under mpiexec -n 2
    ...     with mz.data.OnlineJob(comm, trainers=1, like=like) as job:
    ...         if not job.trains:
    ...             with job.producer() as producer:
    ...                 return [producer.put(np.full(2, 1.0 * i), np.full(1, 1.0 * i)) for i in range(4)]
    ...         with job.source() as source, mz.ShardingConfig(comm=job.group, micro_batch=2) as config:
    ...             return [y.ravel().tolist() for x, y in mz.data.batches(source, config, global_batch=2)]
    >>> mz.testing.run_in_threads(2, work)
    [[[0.0, 1.0], [2.0, 3.0]], [True, True, True, True]]
    """

    def __init__(self, comm: Any = None, *, trainers: int, like: Any, window: int = 64) -> None:
        self._comm = as_communicator(comm, "online job")
        self._own = self._comm is not comm
        with all_ranks(self._comm):
            self._form = SampleForm.like(like)
            self._window = require("OnlineJob: window", window, whole(1, of=" of samples"))
            require("OnlineJob: trainers", trainers, whole(1, of=" of ranks"))
            if trainers >= (size := self._comm.size):
                raise ConfigError(
                    f"OnlineJob: trainers={trainers}: the job has {size} ranks, at least one must produce"
                )
        settings = {"trainers": trainers, "like": str(self._form), "window": window}
        agree_equal(self._comm, lambda: {"the arguments of OnlineJob": settings}, "agree OnlineJob")
        self.trains = self._comm.rank < trainers
        self._producers = range(trainers, self._comm.size)
        self.group: Communicator = self._comm.split(
            int(not self.trains), name="trainers" if self.trains else "producers"
        )

    def source(self, **options: Any) -> OnlineSource:
        """Return the source of this trainer, with the ``options`` on_end, on_error, timeout and journal.

        Not collective, but called on all trainers.
        """
        if not self.trains:
            raise StateError(f"OnlineJob.source: rank {self._comm.rank} is a producer: it calls producer()")
        receiver = MessageReceiver(self._comm, self._producers, self._form) if self._comm.rank == 0 else None
        return OnlineSource(self.group, self._form, receiver, **options)

    def producer(self) -> OnlineProducer:
        """Return what this rank gives samples by. Not collective, but called on all producers."""
        if self.trains:
            raise StateError(f"OnlineJob.producer: rank {self._comm.rank} is a trainer: it calls source()")
        return OnlineProducer(self._comm, self._form, self._window)

    def close(self) -> None:
        """Free the communicators. Collective over all ranks of the job."""
        self.group.close()
        if self._own:
            self._comm.close()

    def __enter__(self) -> Self:
        """Return itself. Not collective."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the job, also after the SystemExit of a run that was asked to stop; after an error leave it open."""
        if error is None or isinstance(error, SystemExit):
            self.close()
