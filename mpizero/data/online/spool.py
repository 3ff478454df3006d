"""Bring samples from jobs that may be killed to a training job, through a folder that both see.

[Note: spool] A sample is one file, ``NAME-NUMBER.npz``. It is written under another name, synchronized to the disk and
renamed, so a file of that name is whole, and a sample whose ``put`` has returned survives SIGKILL and power failure.
Trainers remove it after all of them have trained on it. Numbers are nanoseconds since 1970, made to ascend, so a
producer that is started again needs no state.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from mpizero._util.checks import require, whole
from mpizero._util.names import explains
from mpizero.checkpoint.format.regular_files import read_regular
from mpizero.checkpoint.tools.npz import read_arrays
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.data.online.receiver import Receiver
from mpizero.data.online.sample import Sample, SampleForm
from mpizero.data.online.stream import OnlineSource
from mpizero.errors import CheckpointError, ConfigError, DataError, StateError
from mpizero.guard.reports import describe_error

_FILE = re.compile(r"(?P<name>[A-Za-z0-9_]+)-(?P<number>\d{20})\.npz")
_STOPPED = "TRAINING_HAS_ENDED"
_PAUSE = 0.05
#: Most bytes of the error that a producer leaves.
MOST_TEXT = 1 << 20
T = TypeVar("T")


def _write(folder: Path, name: str, data: bytes) -> None:
    """Write a file that is whole and durable when it appears under its name."""
    temporary = folder / f".{name}.tmp"
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / name)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@explains
class SpoolProducer:
    """Write samples into a folder, from which a training job takes them. It needs no MPI and may be killed at any time.

    It is a context manager: the end of the block is the end of this producer's samples, and an exception in it is told
    to the trainers.

    Parameters
    ----------
    folder : path
        The folder; it is made if it does not exist.
    name : str
        Name of this producer, letters, digits and "_"; one process at a time has it. Started again under its name
        after it was killed, it goes on.
    like : pair of arrays
        One sample ``(x, y)``, without an axis of samples. Only its shapes and dtypes count.
    window : int
        The most samples of this producer in the folder.

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
        for left in self._folder.glob(f".{name}-*.tmp"):  # by a process of this name that was killed
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
            If shape or dtype of an array is not that of the samples of this run.
        """
        if self._closed:
            raise StateError(f"SpoolProducer {self.name!r} is closed: put comes before close()")
        x, y = self._form.checked(x, y, f"a sample of the producer {self.name!r}")
        while len(self._files()) >= self._window and not self._stopped:
            time.sleep(_PAUSE)
        if self._stopped:
            return False
        self._last = max(self._last + 1, time.time_ns())
        buffer = io.BytesIO()
        np.savez(buffer, x=x, y=y)
        _write(self._folder, f"{self.name}-{self._last:020d}.npz", buffer.getvalue())
        return True

    @property
    def _stopped(self) -> bool:
        return (self._folder / _STOPPED).exists()

    def close(self, error: str = "") -> None:
        """Tell the trainers that no more samples come, because of ``error`` if there is one."""
        if not self._closed:
            self._closed = True
            _write(self._folder, self._end_file.name, error.encode())

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the producer; tell the trainers of an error."""
        self.close("" if error is None else describe_error(error))


def _samples_in(folder: Path) -> list[tuple[int, str, str]]:
    """Return the number, the producer and the file name of all samples in a folder, sorted by number."""
    matches = [found for name in os.listdir(folder) if (found := _FILE.fullmatch(name))]
    return sorted((int(found["number"]), found["name"], found.string) for found in matches)


def _untrusted(path: Path, read: Callable[[Path], T]) -> T:
    """Return what ``read`` reads of a file that anybody may have written; DataError if it is not what it should be."""
    try:
        return read(path)
    except (OSError, CheckpointError) as error:
        told = (error.strerror or str(error)) if isinstance(error, OSError) else str(error).removeprefix(f"{path}: ")
        raise DataError(f"{path}: not a readable sample or end: {told}") from None


class SpoolReceiver(Receiver):
    """Read samples from a spool folder, in the order of their numbers among those that are there."""

    def __init__(self, folder: Path, form: SampleForm, producers: int) -> None:
        super().__init__()
        self._folder, self._form, self._count = folder, form, producers
        self._held: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _STOPPED).unlink(missing_ok=True)
        self._complete = False

    def poll(self, wanted: int) -> bool:
        """Take in what has arrived, until ``arrivals`` has ``wanted`` samples; tell whether anything has."""
        self._see_ends()  # before the samples: what a producer has written before its end is seen below
        new = [one for one in _samples_in(self._folder) if one[2] not in self._held]
        for number, producer, name in new[: max(0, wanted - len(self.arrivals.samples))]:
            self.arrivals.samples.append(Sample(producer, number, *self._read(name)))
            self._held.add(name)
        self._complete = len(self.arrivals.ended) >= self._count and not new
        return bool(new)

    def _see_ends(self) -> None:
        ended = {path.stem: path for path in self._folder.glob("*.end")}
        self.arrivals.ended = set(ended)
        texts = {name: _untrusted(path, lambda path: read_regular(path, MOST_TEXT)) for name, path in ended.items()}
        self.arrivals.failures = {name: text.decode(errors="replace") for name, text in texts.items() if text}

    def _read(self, name: str) -> tuple[Any, Any]:
        path = self._folder / name
        found = _untrusted(path, lambda path: read_arrays(path, self._form.nbytes))
        if missing := {"x", "y"} - found.keys():
            raise DataError(f"{path}: not a readable sample: it has no array {min(missing)!r}")
        return self._form.checked(found["x"], found["y"], str(path))

    @property
    def complete(self) -> bool:
        """True if all producers have ended and all of their samples are in ``arrivals``."""
        return self._complete

    def waits_for(self) -> str:
        """Return a text that names the producers that have not ended."""
        return f"{self._count - len(self.arrivals.ended)} of {self._count} producers of {self._folder}"

    def release(self, samples: list[Sample]) -> None:
        """Remove the files of samples on which all ranks have trained."""
        for one in samples:
            name = f"{one.producer}-{one.number:020d}.npz"
            (self._folder / name).unlink(missing_ok=True)
            self._held.discard(name)

    def stop(self) -> None:
        """Tell the producers that nobody trains any more."""
        _write(self._folder, _STOPPED, b"")

    def gone(self) -> bool:
        """Return True: producers of other jobs are not waited for."""
        return True


def spool_source(
    comm: Communicator, folder: str | os.PathLike[str], *, like: Any, producers: int, **options: Any
) -> OnlineSource:
    """Return a source of the samples that :class:`SpoolProducer` of other jobs write into ``folder``.

    Collective over ``comm``, the ranks that train (``config.communicator``). Only rank 0 reads the folder. The run ends
    when ``producers`` producers have ended and no sample is left. ``options`` are those of :class:`OnlineSource`:
    on_end, on_error, timeout, journal.

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
