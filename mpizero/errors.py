"""Define every exception that mpizero raises on purpose, and the exit status of a job that ends with it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from mpizero.frames import rendered
from mpizero.text import printable


class ExitStatus(IntEnum):
    """Name the exit statuses of the command line, with the values of ``sysexits.h`` where it has a fitting name."""

    OK = 0
    DATA = 65
    RANK_FAILED = 70
    INPUT_OUTPUT = 74
    PREEMPTED = 75
    HANG = 76
    CONFIG = 78


class MpizeroError(Exception):
    """Base class of all errors that mpizero raises on purpose; the command line prints one line, without a traceback.

    When such an error ends a job, the printed line also names the line of the user's code that led to the error. With
    ``MPIZERO_TRACEBACK=1`` the whole traceback is printed. The message is safe to print on a terminal: :meth:`__str__`
    escapes control characters in the names, keys and values that the message quotes (:func:`mpizero.text.printable`),
    so the code that raises an error need not do it.
    """

    status: ExitStatus = ExitStatus.RANK_FAILED

    #: The place in the model where the error arose, such as "block 'encoder.2'"; "" if it did not arise in a model.
    place: str = ""

    def __str__(self) -> str:
        """Return :attr:`place`, if there is one, and the message, with control characters escaped."""
        return printable(", ".join(filter(None, [self.place, super().__str__()])), keep="\n")

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython and Jupyter print for this error: the user's line of code, then the message."""
        return rendered(self)


class ConfigError(MpizeroError, ValueError):
    """Raised for a setting that cannot be used; the message names the setting, its value and what is allowed."""

    status = ExitStatus.CONFIG


class ArgumentError(MpizeroError, TypeError):
    """Raised for arguments that a class or function does not take; the message names the wrong and the right ones."""

    status = ExitStatus.CONFIG


class StateError(MpizeroError, RuntimeError):
    """Raised for a call that comes too early, too late or twice, such as an optimizer step without a gradient."""


class MemberError(MpizeroError):
    """Raised on all ranks of an ensemble, after all members have ended, because some have failed; it names them."""


class UnsupportedError(MpizeroError, NotImplementedError):
    """Raised for an operation that a model, layer or function does not support; the message says what to use or add."""

    status = ExitStatus.CONFIG


class UnknownNameError(MpizeroError, AttributeError):
    """Raised when a name is read from a module of mpizero that does not define it."""

    status = ExitStatus.CONFIG


class GridError(ConfigError):
    """Raised for sizes of the data, tensor, pipeline or context groups that do not fit the number of ranks."""


class ScheduleError(ConfigError):
    """Raised for a pipeline schedule that cannot be run; the message names the stage and the instruction."""


class LayoutError(MpizeroError, ValueError):
    """Raised for a parameter, range of elements or shape that does not fit the parameters of the model."""


class DataError(MpizeroError, ValueError):
    """Raised for training data that is missing, empty, damaged or too short."""

    status = ExitStatus.DATA


class CheckpointError(MpizeroError):
    """Raised for a checkpoint that cannot be used; the message names the file, the array and the reason.

    The checkpoint may be damaged, written by another program, or belong to another model.
    """

    status = ExitStatus.DATA


class CheckpointDamagedError(CheckpointError):
    """Raised for a checkpoint whose checksums or sizes are not the ones that were written.

    Only this error means that the checkpoint is useless. After any other error the files may still be intact.

    Examples
    --------
    >>> import tempfile
    >>> from mpizero import checkpoint
    >>> with tempfile.TemporaryDirectory() as run:  # doctest: +ELLIPSIS
    ...     checkpoint.write(f"{run}/start", [], {}, comm="self")
    ...     with open(f"{run}/start/state.h5", "r+b") as file:
    ...         size = file.truncate(100)  # a disk has lost the rest
    ...     checkpoint.open_checkpoint(f"{run}/start", comm="self")
    Traceback (most recent call last):
        ...
    mpizero.errors.CheckpointDamagedError: cannot open checkpoint: ...: 100 bytes instead of 220: truncated or damaged
    """


class CheckpointVersionError(CheckpointError):
    """Raised for a checkpoint in a version of the file format that the installed mpizero does not know.

    Examples
    --------
    >>> import hashlib, tempfile
    >>> from pathlib import Path
    >>> from mpizero import checkpoint
    >>> with tempfile.TemporaryDirectory() as run:  # doctest: +ELLIPSIS
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
    >>> from mpizero import checkpoint
    >>> checkpoint.open_checkpoint("no such folder", comm="self")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    mpizero.errors.CheckpointMissingError: cannot open checkpoint: .../no such folder: does not exist
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
    """

    status = ExitStatus.HANG


class CollectiveMismatch(CollectiveError):  # noqa: N818 - says what is wrong
    """Raised when ranks have called different collectives.

    The message names the first collective that differs, and the source line from which each rank called it.

    Attributes
    ----------
    details : tuple of str
        Further lines of the report: the collectives that ranks called before and after.
    """

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.details = tuple(details)


class RemoteError(MpizeroError):
    """Raised on a rank because another rank has failed in an operation that all ranks must complete (``all_ranks``).

    The message contains the error of that other rank.
    """


class PeerFailure(MpizeroError):
    """Raised on one thread of an in-process communicator when another of its threads has failed or ended."""


class SharedMemoryError(MpizeroError):
    """Raised when a node has too little shared memory for a shared window."""

    status = ExitStatus.INPUT_OUTPUT


class OutOfMemoryError(MpizeroError, MemoryError):
    """Raised when the system refuses memory; the message says what the memory was for and how to need less."""


class NonFiniteError(MpizeroError, ArithmeticError):
    """Raised when losses or gradients stay infinite or NaN for too many steps in a row."""


class IntegrityError(MpizeroError):
    """Raised when parameters or optimizer state in memory have changed although no code wrote them.

    The message names the tensor, the elements and the rank.
    """


class ModelCheckError(MpizeroError, AssertionError):
    """Raised for a model that breaks a rule on which training relies; the message names every rule that it breaks.

    Attributes
    ----------
    report : ModelReport
        The result of :func:`mpizero.testing.check_model`.
    """

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report
