"""Train on samples that running simulations send: by messages of the same job, or through a folder between jobs.

A :class:`SampleForm` describes one sample, and checks, packs and unpacks samples. :class:`OnlineBatches` makes global
batches of an :class:`OnlineSource`, whose rank 0 asks a :class:`Receiver` for samples that have arrived.
:class:`OnlineJob` divides the ranks of a job into trainers and producers, which send their samples by an
:class:`OnlineProducer`. :class:`SpoolProducer` and :func:`spool_source` do the same between jobs that may be killed,
through a folder that both can access.

[Note: window] A producer numbers its samples and has at most ``window`` samples that are in no batch yet. For each
sample that a batch takes, the producer receives a message of 8 bytes. Rank 0 posts one receive for each producer, so
further messages of a producer wait in the producer's memory, and no rank blocks in a send or receive.

[Note: spool] A sample is one file, ``NAME-NUMBER.npz``. It is written under another name, synchronized to the disk and
renamed, so a file of that name is whole, and a sample whose ``put`` has returned survives SIGKILL and power failure.
The file is removed after all trainers have trained on the sample. Numbers are times in nanoseconds since 1970,
increased where necessary so that they ascend; so a producer that is started again needs no state.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

import numpy as np

from mpizero._util.checks import native, number, require, unmasked_samples, whole
from mpizero._util.names import explains
from mpizero._util.text import write_atomic
from mpizero.checkpoint.atomic_folder import sync_folder
from mpizero.checkpoint.format import read_regular
from mpizero.comm import Communicator, Request, as_communicator
from mpizero.comm.agreement import agree_equal, all_ranks
from mpizero.data.source import WHOLE, Slab, check_samples
from mpizero.errors import (
    ArgumentError,
    CheckpointError,
    CollectiveError,
    ConfigError,
    DataError,
    PeerFailure,
    StateError,
)
from mpizero.guard.reports import describe_error
from mpizero.layout.batch import Grains
from mpizero.types import Array


@dataclass(frozen=True)
class Sample:
    """Hold one sample, its producer and its number.

    Attributes
    ----------
    producer : str
        The producer's rank or name.
    number : int
        Number of the sample among those of its producer; later samples have larger numbers.
    x, y : numpy.ndarray
        Input and target, without an axis of samples.
    """

    producer: str
    number: int
    x: Array
    y: Array


@dataclass(frozen=True)
class SampleForm:
    """Hold shape and dtype of the input and the target of one sample.

    Attributes
    ----------
    x_shape, y_shape : tuple of int
        Shapes without an axis of samples.
    x_dtype, y_dtype : str
        The dtypes as NumPy's strings with byte order, such as "<f4".
    """

    x_shape: tuple[int, ...]
    y_shape: tuple[int, ...]
    x_dtype: str
    y_dtype: str

    @classmethod
    def like(cls, example: Any) -> SampleForm:
        """Return shapes and dtypes of ``example``, one sample of any values: a pair ``(x, y)`` of arrays."""
        if not isinstance(example, tuple | list) or len(example) != 2:
            raise ArgumentError(
                f"like={example!r:.80}: expected one sample, the pair (x, y) of arrays without an axis "
                "of samples, such as (np.zeros(3, np.float32), np.zeros(1, np.float32))"
            )
        x, y = _taken(example[0], "like: x"), _taken(example[1], "like: y")
        for name, part in (("x", x), ("y", y)):
            check_samples(part[None], f"like: {name}")
        return cls(x.shape, y.shape, x.dtype.str, y.dtype.str)

    @property
    def nbytes(self) -> int:
        """Number of bytes of one packed sample."""
        return sum(part.nbytes for part in self._empty())

    def _empty(self, count: int | None = None) -> tuple[Array, Array]:
        head = () if count is None else (count,)
        return np.empty(head + self.x_shape, self.x_dtype), np.empty(head + self.y_shape, self.y_dtype)

    def checked(self, x: Any, y: Any, where: str) -> tuple[Array, Array]:
        """Return contiguous ``x`` and ``y``; raise DataError, naming ``where``, if their shapes or dtypes differ."""
        x, y = _taken(x, f"{where}: x"), _taken(y, f"{where}: y")
        for name, part, shape, dtype in ("x", x, self.x_shape, self.x_dtype), ("y", y, self.y_shape, self.y_dtype):
            if part.shape != shape or part.dtype != np.dtype(dtype):
                raise DataError(
                    f"{where}: {name} is {part.dtype} of shape {part.shape}; the samples of this run are "
                    f"{np.dtype(dtype)} of shape {shape}: convert it, or give all ranks another `like`"
                )
        return np.ascontiguousarray(x), np.ascontiguousarray(y)

    def pack(self, x: Array, y: Array, into: Array) -> None:
        """Write the bytes of a sample from :meth:`checked` to the start of ``into``, an array of uint8."""
        data = x.tobytes() + y.tobytes()
        into[: len(data)] = np.frombuffer(data, np.uint8)

    def unpack(self, data: Array) -> tuple[Array, Array]:
        """Return a copy of the sample whose bytes are at the start of ``data``."""
        x, y = self._empty()
        raw = data.tobytes()
        x[...] = np.frombuffer(raw, x.dtype, x.size).reshape(x.shape)
        y[...] = np.frombuffer(raw, y.dtype, y.size, offset=x.nbytes).reshape(y.shape)
        return x, y

    def stack(self, samples: list[Sample], count: int) -> tuple[Array, Array]:
        """Return ``count`` samples stacked to arrays; these are uninitialized if ``samples`` is an empty list."""
        x, y = self._empty(count)
        for position, sample in enumerate(samples):
            x[position], y[position] = sample.x, sample.y
        return x, y


def _taken(values: Any, what: str) -> Array:
    return native(np.asarray(unmasked_samples(values, what)))


class Receiver(ABC):
    """Receive samples on rank 0 of the trainers; no method waits.

    Attributes
    ----------
    samples : list of Sample
        The samples that have arrived and are not in a batch yet, in the order in which batches take them.
    ended : set of str
        The producers that will send no more samples.
    failures : dict
        The error messages of the producers that have failed, by producer.
    complete : bool
        Whether all producers have ended and all of their samples are in ``samples``.
    first_end_stops : bool
        Whether no samples are taken any more once one producer has ended.
    """

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.ended: set[str] = set()
        self.failures: dict[str, str] = {}
        self.complete = self.first_end_stops = False

    @abstractmethod
    def poll(self, wanted: int) -> bool:
        """Receive samples until :attr:`samples` has ``wanted`` of them; tell whether anything has arrived."""

    @abstractmethod
    def waits_for(self) -> str:
        """Return a text that names the producers that have not ended."""

    @abstractmethod
    def release(self, samples: list[Sample]) -> None:
        """Remove what is stored of samples on which all ranks have trained."""

    @abstractmethod
    def stop(self) -> None:
        """Tell the producers that the training has ended."""

    @abstractmethod
    def gone(self) -> bool:
        """Process messages of producers after :meth:`stop`, without waiting; tell whether no producer is awaited."""


#: Tags of the messages with samples, and of the answers.
SAMPLE, ANSWER = 1, 2
#: Kinds of messages of producers: a sample, the end, an error.
PUT, END, ERROR = 0, 1, 2
#: Kinds of answers: a batch has taken one sample; the training has ended.
TAKEN, STOPPED = 0, 1
#: Bytes before a sample: its kind and its number, or the length of the text of an error.
HEADER = 16
#: Least number of bytes after the header, for the text of an error.
_TEXT = 2000


def message(form: SampleForm) -> Array:
    """Return a new buffer for one message of a producer."""
    return np.zeros(HEADER + max(form.nbytes, _TEXT), np.uint8)


class _Line:
    """Receive the messages of one producer, and answer them."""

    def __init__(self, comm: Communicator, rank: int, form: SampleForm) -> None:
        self.name, self.ended, self.error, self.stopped = f"rank {rank}", False, "", False
        self._comm, self._rank, self._form = comm, rank, form
        self.samples: deque[Sample] = deque()
        self.answers: list[Request] = []  # that have not left yet
        self._buffer = message(form)
        self._request: Request = comm.irecv(self._buffer, rank, SAMPLE)

    def receive(self) -> bool:
        """Receive one message if it has arrived; tell whether it has."""
        self.answers = [one for one in self.answers if not one.test()]
        if self.ended or not self._request.test():
            return False
        kind, number = self._buffer[:HEADER].view(np.int64).tolist()
        body = self._buffer[HEADER:]
        if kind == PUT:
            self.samples.append(Sample(self.name, number, *self._form.unpack(body)))
            self._request = self._comm.irecv(self._buffer, self._rank, SAMPLE)
        else:
            self.ended, self.error = True, body[:number].tobytes().decode(errors="replace") if kind == ERROR else ""
            if kind == END:  # one that has failed waits for the end of the training
                self.answer(STOPPED)
        return True

    def answer(self, what: int) -> None:
        """Start to send ``what`` to the producer: ``TAKEN`` for a sample that a batch takes, ``STOPPED`` at the end."""
        if self.stopped:
            return
        self.stopped = what == STOPPED
        self.answers.append(self._comm.isend(np.array([what]), self._rank, ANSWER))


class MessageReceiver(Receiver):
    """Receive samples on rank 0 from the ranks ``producers`` of ``comm``, one of each producer in turn.

    The next sample is always one of the next producer in turn, whichever message has arrived first; a producer that has
    ended is skipped. So the order of samples depends on the samples of each producer, and not on time.
    """

    def __init__(self, comm: Communicator, producers: range, form: SampleForm) -> None:
        super().__init__()
        self._lines = [_Line(comm, rank, form) for rank in producers]
        self._turn = 0

    def poll(self, wanted: int) -> bool:
        """Receive samples until :attr:`samples` has ``wanted`` of them; tell whether anything has arrived."""
        received = [line.receive() for line in self._lines]
        self.failures |= {line.name: line.error for line in self._lines if line.error}
        while len(self.samples) < wanted and (chosen := self._next()) is not None:
            self.samples.append(chosen.samples.popleft())
            chosen.answer(TAKEN)
        self.complete = all(line.ended and not line.samples for line in self._lines)
        return any(received)

    def _next(self) -> _Line | None:
        """Return the producer whose turn it is, and advance the turn; None if its sample has not arrived yet."""
        for _ in self._lines:
            line = self._lines[self._turn]
            if not line.samples:
                if not line.ended:
                    return None
                self.ended.add(line.name)
                if self.first_end_stops:
                    return None
            self._turn = (self._turn + 1) % len(self._lines)
            if line.samples:
                return line
        return None

    def waits_for(self) -> str:
        """Return a text that names the producers that have not ended."""
        return ", ".join(line.name for line in self._lines if not line.ended)

    def release(self, samples: list[Sample]) -> None:
        """Do nothing: samples that arrived by messages are stored in no file."""

    def stop(self) -> None:
        """Tell the producers that the training has ended."""
        for line in self._lines:
            line.answer(STOPPED)

    def gone(self) -> bool:
        """Receive and drop samples that are still in flight; tell whether all producers have ended."""
        for line in self._lines:
            line.receive()
            line.samples.clear()
        return all(line.ended and not line.answers for line in self._lines)


#: Longest pause between two checks for arrived messages, in seconds.
PAUSE = 0.005


def wait_until(done: Callable[[], bool]) -> None:
    """Call ``done`` until it returns True, and sleep in between, so that no MPI call blocks."""
    pause = 20e-6
    while not done():
        time.sleep(pause)
        pause = min(1.5 * pause, PAUSE)


class OnlineProducer:
    """Send samples to the trainers; made by :meth:`OnlineJob.producer`. No method is collective.

    A producer is a context manager: the end of the ``with`` block is the end of its samples. An exception in the block
    is sent to the trainers, which raise an error or go on without this producer; the exception leaves the block when
    the training has ended.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> like = np.zeros(2), np.zeros(1)  # one sample: its shapes and dtypes
    >>> def work(comm):
    ...     with mz.data.OnlineJob(comm, trainers=1, like=like) as job:
    ...         if job.trains:
    ...             with job.source() as source, mz.ShardingConfig(comm=job.group) as config:
    ...                 return len(next(mz.data.batches(source, config, global_batch=3))[0])
    ...         with job.producer() as producer:
    ...             while producer.put(np.ones(2), np.ones(1)):  # False when the trainers have done their steps
    ...                 pass
    ...             return "the trainers have ended"
    >>> mz.testing.run_in_threads(2, work)
    [3, 'the trainers have ended']
    """

    def __init__(self, comm: Communicator, form: SampleForm, window: int) -> None:
        self._comm, self._form, self._window = comm, form, window
        self._put = self._taken = 0
        self._stopped = self._closed = False
        self._sent: list[Request] = []
        self._answer = np.empty(1, np.int64)
        self._request: Request = comm.irecv(self._answer, 0, ANSWER)

    def put(self, x: Any, y: Any) -> bool:
        """Send one sample to the trainers, after waiting while ``window`` earlier ones are in no batch yet.

        Returns True if the sample was sent, and False if the trainers have ended: the sample is then not used, and the
        simulation may end, too. The arrays are copied.

        Raises
        ------
        DataError
            If an array has another shape or dtype than the samples of this run.
        StateError
            If the producer is closed.
        """
        if self._closed:
            raise StateError(f"OnlineProducer of rank {self._comm.rank} is closed: put comes before close()")
        x, y = self._form.checked(x, y, f"sample {self._put} of the producer on rank {self._comm.rank}")
        wait_until(lambda: self._listen() or self._put - self._taken < self._window)
        if self._stopped:
            return False
        data = message(self._form)
        self._form.pack(x, y, data[HEADER:])
        self._send(PUT, self._put, data)
        self._put += 1
        return True

    def close(self) -> None:
        """Tell the trainers that no more samples come, and wait until they have received all.

        A second call does nothing.
        """
        if not self._closed:
            self._end(END, "")

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the producer; tell the trainers of an error."""
        if error is None or self._closed:
            self.close()
        else:
            self._end(ERROR, describe_error(error))

    def _end(self, kind: int, text: str) -> None:
        self._closed = True
        data = message(self._form)
        encoded = np.frombuffer(text.encode(), np.uint8)[: data.size - HEADER]
        data[HEADER : HEADER + encoded.size] = encoded
        self._send(kind, encoded.size, data)
        wait_until(lambda: self._listen() and not self._sent)

    def _send(self, kind: int, number: int, data: Array) -> None:
        data[:HEADER].view(np.int64)[:] = kind, number
        self._sent.append(self._comm.isend(data, 0, SAMPLE))

    def _listen(self) -> bool:
        """Receive answers of the trainers that have arrived; tell whether the trainers have ended."""
        self._sent = [one for one in self._sent if not one.test()]
        while not self._stopped and self._request.test():
            if self._answer[0] == STOPPED:
                self._stopped = True
            else:
                self._taken += 1
                self._request = self._comm.irecv(self._answer, 0, ANSWER)
        return self._stopped


T = TypeVar("T")

#: Most seconds for which the other ranks wait in one message for rank 0, which waits for producers: less than any
#: timeout of the watchdog.
ROUND = 0.5

OnEnd = Literal["drain", "stop"]
OnError = Literal["raise", "drain"]


class OnlineSource:
    """Provide samples that producers send while the model is trained; each sample is used once.

    :func:`mpizero.data.batches` and ``Trainer`` take it in place of a :class:`Source`. Rank 0 of the trainers receives
    all samples, and sends each global batch to all trainers. :meth:`OnlineJob.source` and :func:`spool_source` make an
    online source. The ranks that train use it as a context manager. Construction is not collective.

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
        """SHA-256 of shapes and dtypes of the samples, because the values are unknown before the samples arrive."""
        return hashlib.sha256(repr(self.form).encode()).hexdigest()

    def check_ranks(self, comm: Communicator) -> None:
        """Raise ArgumentError unless ``comm``, the ranks of the configuration, are the trainers. Not collective."""
        if (comm.size, comm.rank) != (self.comm.size, self.comm.rank):
            raise ArgumentError(
                f"batches: there are {comm.size} ranks, the online source has {self.comm.size} trainers: give "
                "ShardingConfig(comm=job.group)"
            )

    def next_batch(self, count: int) -> list[Sample]:
        """Return on rank 0 the ``count`` samples of the next global batch; fewer in the last one, none after that.

        Other ranks get a list of equal length with None in place of samples. Collective over the trainers. Samples of
        the previous batch are released, because all ranks have trained on them.

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
                samples = self._local_receiver.samples
                self._last, samples[:taken] = samples[:taken], []
                self._record()
                return self._last
            return cast("list[Sample]", [None] * taken)
        return []

    @property
    def _local_receiver(self) -> Receiver:
        assert self._receiver is not None, "only rank 0 receives"
        return self._receiver

    def _on_rank_0(self, function: Callable[[], T]) -> T | None:
        """Call ``function`` on rank 0 and return its result on all ranks; if it raises, all ranks raise. Collective.

        If ``function`` raises an error, the producers are told that the training has ended, after the trainers: a
        producer that has failed then ends, and may end the job.
        """
        result = None
        try:
            with all_ranks(self.comm, "online"):
                result = function() if self.comm.rank == 0 else None
        except BaseException:
            if self._receiver is not None:
                with suppress(CollectiveError, PeerFailure):  # of producers that have ended already
                    self._receiver.stop()
            raise
        broadcast: T | None = self.comm.broadcast_object(result, tag="online")
        return broadcast

    def _look(self, count: int, heard: float) -> tuple[bool, int | None]:
        """Receive samples for at most :data:`ROUND` seconds; tell whether any arrived, and return the batch's size.

        ``heard`` is the time at which a sample last arrived or, if none has, at which the batch was asked for.

        The size is None if the batch is not complete and more samples may come.
        """
        receiver, until, any_came = self._local_receiver, time.monotonic() + ROUND, False
        while True:
            came = receiver.poll(count)
            any_came |= came
            if receiver.failures and self._on_error == "raise":
                name, text = next(iter(receiver.failures.items()))
                raise DataError(f"the producer {name} has failed: {text}")
            if len(receiver.samples) >= count:
                return any_came, count
            if receiver.complete or (self._on_end == "stop" and receiver.ended):
                return any_came, len(receiver.samples)
            now = time.monotonic()
            if now - heard > self._timeout and not any_came:
                raise DataError(
                    f"no sample has arrived for {now - heard:.0f} s (timeout={self._timeout:g}), "
                    f"{len(receiver.samples)} of {count} of the next batch are there; not ended: "
                    f"{receiver.waits_for()}: let it end by close(), or give a longer timeout"
                )
            if now > until:
                return any_came, None
            if not came:
                time.sleep(PAUSE)

    def _release(self) -> None:
        if self._last:
            self._local_receiver.release(self._last)
            self._last = []

    def _record(self) -> None:
        """Append producers and numbers of the batch's samples to the journal, as one line of JSON."""
        self._batches += 1
        if self._journal is not None and self._last:
            line = {"batch": self._batches, "samples": [[one.producer, one.number] for one in self._last]}
            with self._journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Tell the producers that the training has ended, and wait until they know it; a second call does nothing.

        Collective over the trainers. A producer is told of the end in its next ``put``.
        """
        if self._closed:
            return
        self._closed = self._ended = True
        self._on_rank_0(self._release)
        self._on_rank_0(lambda: self._local_receiver.stop())
        while not self._on_rank_0(self._await_producers):
            pass

    def _await_producers(self) -> bool:
        until = time.monotonic() + ROUND
        while not (gone := self._local_receiver.gone()) and time.monotonic() < until:
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

    Every step of the iteration is collective over the trainers. The iteration ends with the samples; the last global
    batch may be short.

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
        self,
        source: OnlineSource,
        sizes: Any,
        global_batch: int,
        steps: int | None,
        consumed: int,
        group: Communicator,
        *,
        slab: Slab = WHOLE,
    ) -> None:
        self.consumed, self._slab = consumed, slab
        self._source, self._sizes, self._batch, self._left, self._group = source, sizes, global_batch, steps, group

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Do nothing, because the source is closed by its own ``with`` block."""

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
        local = Grains(count, size).samples_of(self._group.rank, self._group.size)
        self.consumed += count
        if self._left is not None:
            self._left -= 1
        return self._slab.of((np.ascontiguousarray(x[local]), np.ascontiguousarray(y[local])))


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
        One sample ``(x, y)``, without an axis of samples. Only its shapes and dtypes are used.
    window : int
        Largest number of samples of one producer that are in no batch yet.

    Attributes
    ----------
    trains : bool
        Whether this rank is a trainer.
    group : Communicator
        All trainers if this rank is a trainer, else all producers. A trainer passes ``group`` to
        ``ShardingConfig(comm=job.group)``; a simulation may use ``group`` for its own messages.

    Raises
    ------
    ConfigError
        On every rank, if no rank remains as producer, or arguments differ between ranks.

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
        self._owns_comm = self._comm is not comm
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
        """Return the source of this trainer. Not collective, but called on all trainers.

        ``options`` are ``on_end`` ("drain" or "stop": what follows when one producer ends), ``on_error`` ("raise" or
        "drain": what follows when one fails), ``timeout`` (most seconds without a sample) and ``journal`` (path of a
        file that records the samples of each batch); see docs/online.md.
        """
        if not self.trains:
            raise StateError(f"OnlineJob.source: rank {self._comm.rank} is a producer: it calls producer()")
        receiver = MessageReceiver(self._comm, self._producers, self._form) if self._comm.rank == 0 else None
        return OnlineSource(self.group, self._form, receiver, **options)

    def producer(self) -> OnlineProducer:
        """Return the object that sends this producer's samples. Not collective, but called on all producers."""
        if self.trains:
            raise StateError(f"OnlineJob.producer: rank {self._comm.rank} is a trainer: it calls source()")
        return OnlineProducer(self._comm, self._form, self._window)

    def close(self) -> None:
        """Free the communicators. Collective over all ranks of the job."""
        self.group.close()
        if self._owns_comm:
            self._comm.close()

    def __enter__(self) -> Self:
        """Return itself. Not collective."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the job, also after the SystemExit of a run that was asked to stop; after an error leave it open."""
        if error is None or isinstance(error, SystemExit):
            self.close()


_STOP_FILE = "TRAINING_HAS_ENDED"


def _write(path: Path, data: bytes) -> None:
    """Write a file that is whole and durable when it appears under its name."""
    write_atomic(path, data)
    sync_folder(path.parent)


#: Pause between two looks into the folder, in seconds.
_SPOOL_PAUSE = 0.05


@explains
class SpoolProducer:
    """Write samples into a folder from which a training job takes them, without MPI.

    A producer is a context manager: the end of the ``with`` block is the end of its samples, and the trainers get the
    text of an exception in the block.

    Parameters
    ----------
    folder : path
        The folder; it is made if it does not exist.
    name : str
        Name of this producer: letters, digits and "_". Only one process at a time may use it. A process that was
        killed, at any time, can be started again under the same name.
    like : pair of arrays
        One sample ``(x, y)``, without an axis of samples. Only its shapes and dtypes are used.
    window : int
        Largest number of samples of this producer in the folder.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> import mpizero as mz
    >>> like = np.zeros(2), np.zeros(1)  # one sample: its shapes and dtypes
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with mz.data.SpoolProducer(folder, "solver_1", like=like) as producer:
    ...         producer.put(np.ones(2), np.ones(1))  # the sample is on the disk
    ...     sorted(path.suffix for path in Path(folder).iterdir())
    True
    ['.end', '.npz']
    """

    def __init__(self, folder: str | os.PathLike[str], name: str, *, like: Any, window: int = 64) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_]+", name):
            raise ConfigError(f'SpoolProducer: name={name!r:.80}: expected letters, digits and "_"')
        self.name, self._form = name, SampleForm.like(like)
        self._window = require("SpoolProducer: window", window, whole(1, of=" of samples"))
        self._folder = Path(folder).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._end_file.unlink(missing_ok=True)
        for left in self._folder.glob(f".{name}[-.]*.tmp"):  # by a process of this name that was killed
            left.unlink(missing_ok=True)
        self._last = max((number for number, _ in self._files()), default=0)
        self._closed = False

    @property
    def _end_file(self) -> Path:
        return self._folder / f"{self.name}.end"

    def _files(self) -> list[tuple[int, str]]:
        return [(number, name) for number, owner, name in _samples_in(self._folder) if owner == self.name]

    def put(self, x: Any, y: Any) -> bool:
        """Write one sample; wait while ``window`` samples of this producer are in the folder.

        Returns True once the sample is on the disk, and False if the training has ended.

        Raises
        ------
        DataError
            If an array has another shape or dtype than the samples of this run.
        """
        if self._closed:
            raise StateError(f"SpoolProducer {self.name!r} is closed: put comes before close()")
        x, y = self._form.checked(x, y, f"a sample of the producer {self.name!r}")
        while len(self._files()) >= self._window and not self._stopped:
            time.sleep(_SPOOL_PAUSE)
        if self._stopped:
            return False
        self._last = max(self._last + 1, time.time_ns())
        buffer = io.BytesIO()
        np.savez(buffer, x=x, y=y)
        _write(self._folder / f"{self.name}-{self._last:020d}.npz", buffer.getvalue())
        return True

    @property
    def _stopped(self) -> bool:
        return (self._folder / _STOP_FILE).exists()

    def close(self, error: str = "") -> None:
        """Tell the trainers that no more samples come; a text ``error`` tells them that the producer has failed."""
        if not self._closed:
            self._closed = True
            _write(self._end_file, error.encode())

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the producer; tell the trainers of an error."""
        self.close("" if error is None else describe_error(error))


_SAMPLE_FILE = re.compile(r"(?P<name>[A-Za-z0-9_]+)-(?P<number>\d{20})\.npz")


def _samples_in(folder: Path) -> list[tuple[int, str, str]]:
    """Return the number, the producer and the file name of all samples in a folder, sorted by number."""
    matches = [match for name in os.listdir(folder) if (match := _SAMPLE_FILE.fullmatch(name))]
    return sorted((int(match["number"]), match["name"], match.string) for match in matches)


def _untrusted(path: Path, read: Callable[[Path], T]) -> T:
    """Return the result of ``read`` for a file that is not trusted; raise DataError if ``read`` rejects the file."""
    try:
        return read(path)
    except (OSError, CheckpointError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error).removeprefix(f"{path}: ")
        raise DataError(f"{path}: not a readable sample or end: {reason}") from None


#: Most bytes of the error that a producer leaves.
MOST_TEXT = 1 << 20


class SpoolReceiver(Receiver):
    """Read samples from a spool folder; of the files that are there, the smallest numbers are read first."""

    def __init__(self, folder: Path, form: SampleForm, producers: int) -> None:
        super().__init__()
        self._folder, self._form, self._count = folder, form, producers
        self._read_names: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _STOP_FILE).unlink(missing_ok=True)

    def poll(self, wanted: int) -> bool:
        """Receive samples until :attr:`samples` has ``wanted`` of them; tell whether anything has arrived."""
        self._see_ends()  # before the samples: what a producer has written before its end is seen below
        new = [one for one in _samples_in(self._folder) if one[2] not in self._read_names]
        for ordinal, producer, name in new[: max(0, wanted - len(self.samples))]:
            self.samples.append(Sample(producer, ordinal, *self._read(name)))
            self._read_names.add(name)
        self.complete = len(self.ended) >= self._count and not new
        return bool(new)

    def _see_ends(self) -> None:
        ended = {path.stem: path for path in self._folder.glob("*.end")}
        self.ended = set(ended)
        texts = {name: _untrusted(path, lambda path: read_regular(path, MOST_TEXT)) for name, path in ended.items()}
        self.failures = {name: text.decode(errors="replace") for name, text in texts.items() if text}

    def _read(self, name: str) -> tuple[Any, Any]:
        path = self._folder / name
        from mpizero.checkpoint.npz import read_arrays

        arrays = _untrusted(path, lambda path: read_arrays(path, self._form.nbytes))
        if missing := {"x", "y"} - arrays.keys():
            raise DataError(f"{path}: not a readable sample: it has no array {min(missing)!r}")
        return self._form.checked(arrays["x"], arrays["y"], str(path))

    def waits_for(self) -> str:
        """Return a text that names the producers that have not ended."""
        return f"{self._count - len(self.ended)} of {self._count} producers of {self._folder}"

    def release(self, samples: list[Sample]) -> None:
        """Remove the files of samples on which all ranks have trained."""
        for one in samples:
            name = f"{one.producer}-{one.number:020d}.npz"
            (self._folder / name).unlink(missing_ok=True)
            self._read_names.discard(name)

    def stop(self) -> None:
        """Tell the producers that the training has ended."""
        _write(self._folder / _STOP_FILE, b"")

    def gone(self) -> bool:
        """Return True, because this job does not wait for producers of other jobs."""
        return True


def spool_source(
    comm: Communicator, folder: str | os.PathLike[str], *, like: Any, producers: int, **options: Any
) -> OnlineSource:
    """Return a source of the samples that :class:`SpoolProducer` of other jobs write into ``folder``.

    Collective over ``comm``, the ranks that train (``config.communicator``). Only rank 0 reads the folder. The samples
    end when ``producers`` producers have ended and every sample is in a batch. ``options`` are as for
    :meth:`OnlineJob.source`: on_end, on_error, timeout, journal.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import mpizero as mz
    >>> like = np.zeros(2), np.zeros(1)  # one sample: its shapes and dtypes
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with mz.data.SpoolProducer(folder, "solver_1", like=like) as producer:  # in a process of its own
    ...         for i in range(3):
    ...             accepted = producer.put(np.full(2, 1.0 * i), np.full(1, 1.0 * i))
    ...     with mz.ShardingConfig(comm="self", micro_batch=2) as config:
    ...         with mz.data.spool_source(config.communicator, folder, like=like, producers=1) as source:
    ...             [y.ravel().tolist() for x, y in mz.data.batches(source, config, global_batch=2)]
    [[0.0, 1.0], [2.0]]
    """
    with all_ranks(comm):
        form = SampleForm.like(like)
        require("spool_source: producers", producers, whole(1))
        receiver = SpoolReceiver(Path(folder).absolute(), form, producers) if comm.rank == 0 else None
        return OnlineSource(comm, form, receiver, **options)
