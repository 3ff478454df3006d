"""Make global batches of the samples that producers send while the model is trained."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

import numpy as np

from mpizero._util.checks import number, require
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.data.online.producer import PAUSE
from mpizero.data.online.receiver import Receiver
from mpizero.data.online.sample import Sample, SampleForm
from mpizero.errors import ArgumentError, ConfigError, DataError
from mpizero.layout.batch import Grains

T = TypeVar("T")

#: Most seconds for which the other ranks wait in one message for rank 0, which waits for producers: less than any
#: timeout of the watchdog.
ROUND = 0.5

OnEnd = Literal["drain", "stop"]
OnError = Literal["raise", "drain"]


class OnlineSource:
    """Provide samples that producers send while the model is trained; each sample is used once.

    :func:`mpizero.data.batches` and ``Trainer`` take it in place of a :class:`Source`. Rank 0 of the trainers receives
    all samples, and every rank gets each global batch from it. Made by :meth:`OnlineJob.source` and
    :func:`spool_source`; it is a context manager on the trainers. Construction is not collective.

    Attributes
    ----------
    comm : Communicator
        The ranks that train.
    form : SampleForm
        Shapes and dtypes of a sample.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import mpizero as mz
    >>> like = np.zeros(2), np.zeros(1)  # one sample: its shapes and dtypes
    >>> with tempfile.TemporaryDirectory() as folder, mz.ShardingConfig(comm="self", micro_batch=2) as config:
    ...     with mz.data.SpoolProducer(folder, "solver_1", like=like) as producer:
    ...         accepted = producer.put(np.ones(2), np.ones(1))
    ...     with mz.data.spool_source(config.communicator, folder, like=like, producers=1, timeout=60) as source:
    ...         print(type(source).__name__, [x.shape for x, y in mz.data.batches(source, config, global_batch=2)])
    OnlineSource [(1, 2)]
    """

    def __init__(
        self,
        comm: Communicator,
        form: SampleForm,
        receiver: Receiver | None,
        *,
        on_end: OnEnd = "drain",
        on_error: OnError = "raise",
        timeout: float = 600.0,
        journal: str | os.PathLike[str] | None = None,
    ) -> None:
        for name, value, known in (("on_end", on_end, ("drain", "stop")), ("on_error", on_error, ("raise", "drain"))):
            if value not in known:
                raise ConfigError(f"OnlineSource: {name}={value!r}: expected {' or '.join(map(repr, known))}")
        self.comm, self.form = comm, form
        self._receiver, self._on_end, self._on_error = receiver, on_end, on_error
        if receiver is not None:
            receiver.first_end_stops = on_end == "stop"
        self._timeout = require("OnlineSource: timeout", timeout, number(above=True))
        self._journal = Path(journal).absolute() if journal is not None else None
        self._batches = 0
        self._last: list[Sample] = []
        self._ended = self._closed = False

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the form of the samples, which are not known before they arrive."""
        return hashlib.sha256(repr(self.form).encode()).hexdigest()

    def check_ranks(self, comm: Communicator) -> None:
        """Raise ArgumentError if ``comm``, the ranks that train by their configuration, are others. Not collective."""
        if (comm.size, comm.rank) != (self.comm.size, self.comm.rank):
            raise ArgumentError(
                f"batches: config has {comm.size} ranks, the online source has {self.comm.size} trainers: give "
                "ShardingConfig(comm=job.group)"
            )

    def next_batch(self, count: int) -> list[Sample]:
        """Return on rank 0 the ``count`` samples of the next global batch; fewer at the end, none after it.

        Other ranks get a list of as many None. Collective over the trainers. Samples of the batch before it are
        released: all ranks have trained on them.

        Raises
        ------
        DataError
            If a producer has failed and ``on_error`` is "raise", or nothing has arrived for ``timeout`` seconds.
        """
        self._on_rank_0(self._release)
        heard = time.monotonic()
        while not self._ended:
            arrived, taken = self._on_rank_0(partial(self._look, count, heard)) or (False, None)
            heard = time.monotonic() if arrived else heard
            if taken is None:
                continue
            self._ended = taken < count
            if self.comm.rank == 0:
                found = self._receiver_here.arrivals.samples
                self._last, found[:taken] = found[:taken], []
                self._record()
                return self._last
            return cast("list[Sample]", [None] * taken)
        return []

    @property
    def _receiver_here(self) -> Receiver:
        assert self._receiver is not None, "only rank 0 receives"
        return self._receiver

    def _on_rank_0(self, function: Callable[[], T]) -> T | None:
        """Call ``function`` on rank 0 and return its result on all ranks, which raise its error together. Collective.

        The receiver's producers are released if it raises.
        """
        result = None
        with all_ranks(self.comm, "online"):
            if self.comm.rank == 0:
                try:
                    result = function()
                except BaseException:
                    self._receiver_here.stop()
                    raise
        found: T | None = self.comm.broadcast_object(result, tag="online")
        return found

    def _look(self, count: int, heard: float) -> tuple[bool, int | None]:
        """Receive for :data:`ROUND` seconds at most; tell whether anything came, and how many samples make the batch.

        The number is None if the batch is not complete and more samples may come.
        """
        receiver, until, any_came = self._receiver_here, time.monotonic() + ROUND, False
        while True:
            came = receiver.poll(count)
            any_came |= came
            arrivals = receiver.arrivals
            if arrivals.failures and self._on_error == "raise":
                name, text = next(iter(arrivals.failures.items()))
                raise DataError(f"the producer {name} has failed: {text}")
            if len(arrivals.samples) >= count:
                return any_came, count
            if receiver.complete or (self._on_end == "stop" and arrivals.ended):
                return any_came, len(arrivals.samples)
            now = time.monotonic()
            if now - heard > self._timeout and not any_came:
                raise DataError(
                    f"no sample has arrived for {now - heard:.0f} s (timeout={self._timeout:g}), "
                    f"{len(arrivals.samples)} of {count} of the next batch are there; not ended: "
                    f"{receiver.waits_for()}: let it end by close(), or give a longer timeout"
                )
            if now > until:
                return any_came, None
            if not came:
                time.sleep(PAUSE)

    def _release(self) -> None:
        if self._last:
            self._receiver_here.release(self._last)
            self._last = []

    def _record(self) -> None:
        """Append the origin of the batch's samples to the journal, one line of JSON."""
        self._batches += 1
        if self._journal is not None and self._last:
            line = {"batch": self._batches, "samples": [[one.producer, one.number] for one in self._last]}
            with self._journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Tell the producers that nobody trains any more, and wait until they have heard; a second call does nothing.

        Collective over the trainers. A producer hears it in its next ``put``.
        """
        if self._closed:
            return
        self._closed = self._ended = True
        self._on_rank_0(self._release)
        self._on_rank_0(lambda: self._receiver_here.stop())
        while not self._on_rank_0(self._farewell):
            pass

    def _farewell(self) -> bool:
        until = time.monotonic() + ROUND
        while not (gone := self._receiver_here.gone()) and time.monotonic() < until:
            time.sleep(PAUSE)
        return gone

    def __enter__(self) -> Self:
        """Return itself. Not collective."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the source; after an error only tell the producers, because other ranks may not have raised.

        Collective over the trainers if the block has not raised, or has raised a SystemExit, as all trainers do when
        their run was asked to stop.
        """
        if error is None or isinstance(error, SystemExit):
            self.close()
        elif self._receiver is not None:
            self._receiver.stop()


class OnlineBatches:
    """Iterate over this rank's samples ``(x, y)`` of the global batches of an :class:`OnlineSource`.

    Every step of the iteration is collective over the trainers. It ends when the samples do; the last global batch may
    be short.

    Attributes
    ----------
    consumed : int
        Number of samples of all global batches that the iterator has passed, over all ranks.
    epoch : int
        Always 0: each sample is used once.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import mpizero as mz
    >>> like = np.zeros(2), np.zeros(1)  # one sample: its shapes and dtypes
    >>> with tempfile.TemporaryDirectory() as folder, mz.ShardingConfig(comm="self", micro_batch=2) as config:
    ...     with mz.data.SpoolProducer(folder, "solver_1", like=like) as producer:
    ...         accepted = [producer.put(np.ones(2), np.ones(1)) for i in range(5)]
    ...     with mz.data.spool_source(config.communicator, folder, like=like, producers=1) as source:
    ...         stream = mz.data.batches(source, config, global_batch=2)
    ...         print([len(x) for x, y in stream], stream.consumed)  # the last batch is short
    [2, 2, 1] 5
    """

    epoch = 0

    def __init__(
        self, source: OnlineSource, sizes: Any, global_batch: int, steps: int | None, consumed: int, group: Communicator
    ) -> None:
        self.consumed = consumed
        self._source, self._sizes, self._batch, self._left, self._group = source, sizes, global_batch, steps, group

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Do nothing, because the source is closed by its own block."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Any, Any]:
        if self._left == 0:
            raise StopIteration
        samples = self._source.next_batch(self._batch)
        if not samples:
            raise StopIteration
        source, count = self._source, len(samples)
        x, y = source.form.stack(samples if source.comm.rank == 0 else [], count)
        for part in (x, y):
            source.comm.broadcast(part, tag="online")
        model = hasattr(self._sizes, "wrapped_model")  # not a configuration
        size = self._sizes.grain_size(count, (x, y)) if model else self._sizes.grain_size(count)
        own = Grains(count, size).samples_of(self._group.rank, self._group.size)
        self.consumed += count
        if self._left is not None:
            self._left -= 1
        return np.ascontiguousarray(x[own]), np.ascontiguousarray(y[own])
