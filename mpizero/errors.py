"""Define the exceptions that several modules of mpizero raise, and the exit status of a job that each of them ends."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from mpizero._util.text import printable, rendered


class ExitStatus(IntEnum):
    """Name the exit statuses of the command line; the values are those of ``sysexits.h`` for similar errors.

    Examples
    --------
    >>> from mpizero.errors import CheckpointError, ExitStatus
    >>> CheckpointError.status is ExitStatus.DATA, int(ExitStatus.DATA)
    (True, 65)
    """

    OK = 0
    DATA = 65
    RANK_FAILED = 70
    INPUT_OUTPUT = 74
    PREEMPTED = 75
    HANG = 76
    CONFIG = 78


class MpizeroError(Exception):
    """Base class of mpizero's own errors; the command line prints each on one line, without a traceback.

    When such an error ends a job, the printed line also names the line of the user's code that led to the error. With
    ``MPIZERO_TRACEBACK=1`` the whole traceback is printed. The message is safe to print on a terminal: :meth:`__str__`
    escapes control characters in the names, keys and values that the message quotes
    (:func:`mpizero._util.text.printable`), so the code that raises an error need not escape them.

    Examples
    --------
    >>> import mpizero as mz
    >>> try:
    ...     mz.ShardingConfig(threads=0)
    ... except mz.errors.MpizeroError as error:
    ...     print(error, int(error.status))
    threads=0: expected a whole number from 1 to 1024 78
    """

    status: ExitStatus = ExitStatus.RANK_FAILED

    #: The place in the model where the error arose, such as "block 'encoder.2'"; "" if it did not arise in a model.
    place: str = ""

    def __str__(self) -> str:
        """Return the message with control characters escaped, after :attr:`place` and a comma if that is not empty."""
        return printable(", ".join(filter(None, [self.place, super().__str__()])), keep="\n")

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython and Jupyter print for this error: the user's line of code, then the message."""
        return rendered(self)


class ConfigError(MpizeroError, ValueError):
    """Raised for a setting that cannot be used; the message names the setting, its value and what is allowed.

    Examples
    --------
    >>> import mpizero as mz
    >>> mz.ShardingConfig(clip=-1.0)
    Traceback (most recent call last):
    mpizero.errors.ConfigError: clip=-1.0: expected a finite number > 0
    """

    status = ExitStatus.CONFIG


class ArgumentError(MpizeroError, TypeError):
    """Raised for arguments that a class or function does not take; the message names the wrong and the right ones.

    Examples
    --------
    >>> import mpizero as mz
    >>> mz.AdamW(learning_rate=0.1)
    Traceback (most recent call last):
    mpizero.errors.ArgumentError: AdamW: there is no argument 'learning_rate' (did you mean 'lr'?); ...
    """

    status = ExitStatus.CONFIG


class StateError(MpizeroError, RuntimeError):
    """Raised for a call that comes too early, too late or twice, such as an optimizer step without a gradient.

    Examples
    --------
    >>> import mpizero as mz
    >>> mz.ShardedOptimizer(mz.AdamW()).step()
    Traceback (most recent call last):
    mpizero.errors.StateError: ShardedOptimizer has no model yet: call set_model first, ...
    """


class MemberError(MpizeroError):
    """Raised on all ranks of an ensemble when all members have ended and some have failed, which the message names.

    Examples
    --------
    >>> import mpizero as mz
    >>> mz.run_members(lambda member: {"loss": 1 / 0}, 1, "self", on_failure="continue")
    Traceback (most recent call last):
    mpizero.errors.MemberError: 1 of 1 members have failed: member 0: ZeroDivisionError: ...
    """


class UnsupportedError(MpizeroError, NotImplementedError):
    """Raised for an operation that a model, layer or function does not support; the message says what to use or add.

    Examples
    --------
    >>> import mpizero as mz
    >>> model = mz.FunctionModel({"w": [1.0]}, lambda parameters, batch: (0.0, {"w": [0.0]}, 1.0))
    >>> with mz.distribute(model, None, "ddp") as placed:
    ...     placed.predict([[1.0]])
    Traceback (most recent call last):
    mpizero.errors.UnsupportedError: FunctionModel has no predict function: give one, FunctionModel(..., predict=...)
    """

    status = ExitStatus.CONFIG


class UnknownNameError(MpizeroError, AttributeError):
    """Raised when a name is read from a module of mpizero that does not define it.

    Examples
    --------
    >>> import mpizero as mz
    >>> mz.optim.Adamw
    Traceback (most recent call last):
    mpizero.errors.UnknownNameError: module 'mpizero.optim' has no attribute 'Adamw' (did you mean 'AdamW'?)
    """

    status = ExitStatus.CONFIG


class GridError(ConfigError):
    """Raised for sizes of the data, tensor, pipeline or context groups that do not fit the number of ranks.

    Examples
    --------
    >>> import mpizero as mz
    >>> mz.layout.Axes.build(6, pipeline=4)
    Traceback (most recent call last):
    mpizero.errors.GridError: 6 ranks are not a multiple of pipeline=4 x tensor=1 x context=1 = 4 ranks ...
    """


class ScheduleError(ConfigError):
    """Raised for a pipeline schedule that cannot be run; the message names the stage and the instruction.

    Examples
    --------
    >>> from dataclasses import replace
    >>> from mpizero.layout import Costs, build_schedule, simulate
    >>> schedule = build_schedule("1f1b", stages=2, micro_batches=2)
    >>> simulate(replace(schedule, programs=schedule.programs[::-1]), Costs.uniform(2))
    Traceback (most recent call last):
    mpizero.errors.ScheduleError: schedule '1f1b', stage 0: forward of chunk 1, micro-batch 0 is not this stage's work
    """


class LayoutError(MpizeroError, ValueError):
    """Raised for a parameter, range of elements or shape that does not fit the parameters of the model.

    Examples
    --------
    >>> import mpizero as mz
    >>> mz.layout.Partition(10, 3).shard(3)
    Traceback (most recent call last):
    mpizero.errors.LayoutError: shard 3 does not exist: there are 3 shards
    """


class DataError(MpizeroError, ValueError):
    """Raised for training data that is missing, empty, damaged or too short.

    Examples
    --------
    >>> import mpizero as mz
    >>> mz.data.TextSource("/no/such/*.txt", sequence=8)
    Traceback (most recent call last):
    mpizero.errors.DataError: /no/such/*.txt: the pattern matches no file
    """

    status = ExitStatus.DATA


class CheckpointError(MpizeroError):
    """Raised for a checkpoint that cannot be used; the message names the file, the array and the reason.

    The checkpoint may be damaged, written by another program, or belong to another model.

    Examples
    --------
    >>> import mpizero as mz
    >>> mz.checkpoint.from_bytes(b"an image of another program")
    Traceback (most recent call last):
    mpizero.errors.CheckpointError: 27 bytes that do not end like a serialized model: truncated or foreign
    """

    status = ExitStatus.DATA


class CheckpointDamagedError(CheckpointError):
    """Raised for a checkpoint whose content no longer has the checksums or sizes that were stored with it.

    Only this error means that the checkpoint is useless. After any other error the files may still be intact.

    Examples
    --------
    >>> import mpizero as mz
    >>> with mz.DDPModel(mz.nn.MLP(1, [], 2), mz.ShardingConfig(comm="self")) as model:
    ...     image = bytearray(model.serialize())
    ...     image[8] ^= 1  # one bit has changed
    ...     model.deserialize(bytes(image))
    Traceback (most recent call last):
    mpizero.errors.CheckpointDamagedError: serialized model: checksum mismatch in the HDF5 structure ...
    """


class CheckpointVersionError(CheckpointError):
    """Raised for a checkpoint in a version of the file format that the installed mpizero does not know.

    Examples
    --------
    >>> import hashlib, tempfile
    >>> from pathlib import Path
    >>> from mpizero import checkpoint
    >>> with tempfile.TemporaryDirectory() as run:
    ...     checkpoint.write(f"{run}/start", [], {}, comm="self")
    ...     manifest = Path(run, "start", "manifest.json")
    ...     body = manifest.read_text().splitlines(True)[0].replace('"version":1', '"version":2')  # of a newer mpizero
    ...     with manifest.open("w") as file:
    ...         print(body, '{"sha256":"', hashlib.sha256(body.encode()).hexdigest(), '"}', sep="", file=file)
    ...     checkpoint.open_checkpoint(f"{run}/start", comm="self")
    Traceback (most recent call last):
        ...
    mpizero.errors.CheckpointVersionError: cannot open checkpoint: ...format version 2, this mpizero reads version 1
    """


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """Raised for a checkpoint, or a file of it, that does not exist.

    Examples
    --------
    >>> import mpizero as mz
    >>> mz.checkpoint.open_checkpoint("run/none")
    Traceback (most recent call last):
    mpizero.errors.CheckpointMissingError: cannot open checkpoint: ...run/none: does not exist
    """


class CheckpointIOError(CheckpointError, OSError):
    """Raised when the operating system refuses to write or read a checkpoint; ``errno`` says why.

    Examples
    --------
    >>> from mpizero import checkpoint
    >>> try:
    ...     checkpoint.write("/dev/null/start", [], {}, comm="self")  # below a file that is no folder
    ... except checkpoint.CheckpointIOError as error:
    ...     print(error.errno, error)
    17 checkpoint /dev/null/start was not written: /dev/null: File exists
    """

    status = ExitStatus.INPUT_OUTPUT


class CollectiveError(MpizeroError):
    """Raised for an MPI call that failed, or that differs from the calls of other ranks.

    The message names the rank, the operation, the tag, the element type and the number of elements.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> mz.comm.as_communicator("self").broadcast(np.zeros((2, 2))[:, 0])
    Traceback (most recent call last):
    mpizero.errors.CollectiveError: [rank 0] broadcast on 'world' float64[2]: the array is not C-contiguous; send a copy
    """

    status = ExitStatus.HANG


class CollectiveMismatch(CollectiveError):  # noqa: N818 - says what is wrong
    """Raised when ranks have called different collectives.

    The message names the first collective that differs, and the source line from which each rank called it.

    Attributes
    ----------
    details : tuple of str
        Lines that are printed below the message: the collectives that ranks called before and after the first
        difference.

    Examples
    --------
    >>> import mpizero as mz
    >>> mz.testing.run_in_threads(2, lambda comm: comm.barrier() if comm.rank else comm.allgather_object(1))
    Traceback (most recent call last):
    mpizero.errors.CollectiveMismatch: collective #1 of 'world' differs between ranks: rank 0: allgather_object at ...
    """

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.details = tuple(details)


class RemoteError(MpizeroError):
    """Raised on a rank because another rank has failed in an operation that all ranks must complete.

    The operation is a ``with`` block of ``all_ranks`` (``comm/agreement.py``). The message contains the error of that
    other rank.

    Examples
    --------
    >>> import mpizero as mz
    >>> from mpizero.comm.agreement import all_ranks
    >>> def work(comm):
    ...     try:
    ...         with all_ranks(comm):
    ...             1 / comm.rank
    ...     except (ZeroDivisionError, mz.errors.RemoteError) as error:
    ...         return type(error).__name__
    >>> mz.testing.run_in_threads(2, work)
    ['ZeroDivisionError', 'RemoteError']
    """


class PeerFailure(MpizeroError):
    """Raised on one thread of an in-process communicator when another of its threads has failed or ended.

    Examples
    --------
    >>> import mpizero as mz
    >>> first, second = mz.InMemoryCommunicator.group(2)
    >>> first.abort(ValueError("no samples"))
    >>> second.barrier()
    Traceback (most recent call last):
    mpizero.errors.PeerFailure: [rank 1] the thread of rank 0 failed: ValueError: no samples
    """


class SharedMemoryError(MpizeroError):
    """Raised when a node has too little shared memory for a shared window.

    Examples
    --------
    >>> import mpizero as mz
    >>> mz.comm.as_communicator("self").allocate_shared(1 << 60)
    Traceback (most recent call last):
    mpizero.errors.SharedMemoryError: a window of 1152921504606846976 bytes for 'world' does not fit into this process
    """

    status = ExitStatus.INPUT_OUTPUT


class OutOfMemoryError(MpizeroError, MemoryError):
    """Raised when the system refuses memory; the message says what the memory was for and how to need less.

    Examples
    --------
    >>> import mpizero as mz
    >>> issubclass(mz.errors.OutOfMemoryError, MemoryError), mz.errors.OutOfMemoryError.status.name
    (True, 'RANK_FAILED')
    """


class NonFiniteError(MpizeroError, ArithmeticError):
    """Raised when losses or gradients stay infinite or NaN for too many steps in a row.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> config = mz.Config(bad_steps=mz.BadSteps(limit=1, warn=False))
    >>> with mz.distribute(mz.nn.MLP(1, [], 2), mz.SGD(0.1), "ddp", config=config) as model:
    ...     model.train(np.array([[np.nan]], np.float32), np.array([0]))
    Traceback (most recent call last):
    mpizero.errors.NonFiniteError: step 1: skipped 1 steps in a row: ...
    """


class IntegrityError(MpizeroError):
    """Raised when parameters or optimizer state in memory have changed although no code wrote them.

    The message names the tensor, the elements and the rank.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> config = mz.Config(check_every=1)
    >>> x, y = np.ones((2, 1), np.float32), np.array([0, 1])
    >>> with mz.distribute(mz.nn.MLP(1, [], 2), mz.SGD(0.1), "ddp", config=config) as model:
    ...     _ = model.train(x, y)
    ...     model._engine.store.values[0] += 1.0  # no code of a user does that
    ...     model.train(x, y)
    Traceback (most recent call last):
    mpizero.errors.IntegrityError: state in memory is damaged: parameter 'output.linear.weight', elements 0 to 1, ...
    """


class ModelCheckError(MpizeroError, AssertionError):
    """Raised for a model that does not compute what training relies on; the message names everything that is wrong.

    Attributes
    ----------
    report : ModelReport
        The result of :func:`mpizero.testing.check_model`.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> def mean(parameters, batch):  # wrong: it must be the sum over the samples
    ...     return float(np.mean(parameters["w"] * batch[0])), {"w": np.array([batch[0].mean()])}, float(len(batch[0]))
    >>> model = mz.FunctionModel({"w": np.ones(1)}, mean)
    >>> mz.testing.check_model(model, np.arange(1.0, 5.0), np.zeros(4), comm="self")
    Traceback (most recent call last):
    mpizero.errors.ModelCheckError: the model is wrong ...
    """

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report
