"""Define every exception that mpizero raises on purpose, with its exit status."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from mpizero.frames import rendered
from mpizero.text import printable


class ExitStatus(IntEnum):
    """Name the exit statuses of the command line. Values are those of ``sysexits.h`` where it has a fitting name."""

    OK = 0
    DATA = 65
    RANK_FAILED = 70
    INPUT_OUTPUT = 74
    PREEMPTED = 75
    HANG = 76
    CONFIG = 78


class MpizeroError(Exception):
    """Base class of all deliberate errors; the command line prints them as one line, without a traceback.

    When such an error ends a job, the printed line also names the line of the user's code that led to it, and
    ``MPIZERO_TRACEBACK=1`` prints the whole traceback. The message is safe to print on a terminal: control characters
    in names, keys and values that it quotes are escaped (:func:`mpizero.text.printable`) by :meth:`__str__`, so the
    code that raises an error need not do it.
    """

    status: ExitStatus = ExitStatus.RANK_FAILED

    #: The place in the model where the error arose, such as "block 'encoder.2'"; "" if it did not arise in a model.
    place: str = ""

    def __str__(self) -> str:
        """Return the message with control characters escaped; it begins with the place in the model, if any."""
        return printable(", ".join(filter(None, [self.place, super().__str__()])), keep="\n")

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython and Jupyter print for this error: the line of the user's code comes first."""
        return rendered(self)


class ConfigError(MpizeroError, ValueError):
    """Raised for a setting that cannot be used: the message names the key, the value and what is allowed."""

    status = ExitStatus.CONFIG


class ArgumentError(MpizeroError, TypeError):
    """Raised for arguments that a class or function does not take; names the wrong ones and those that it takes."""

    status = ExitStatus.CONFIG


class StateError(MpizeroError, RuntimeError):
    """Raised for a call that comes too early, too late or twice, such as a step before there is a gradient."""


class UnsupportedError(MpizeroError, NotImplementedError):
    """Raised for an operation that this kind of model, layer or function does not support; says what to use or add."""

    status = ExitStatus.CONFIG


class UnknownNameError(MpizeroError, AttributeError):
    """Raised for a name that a module of this package does not have."""

    status = ExitStatus.CONFIG


class GridError(ConfigError):
    """Raised for group sizes that do not fit the number of ranks."""


class ScheduleError(ConfigError):
    """Raised for a pipeline schedule that cannot be run; names the stage and the instruction."""


class LayoutError(MpizeroError, ValueError):
    """Raised for a parameter, range or shape that does not fit the layout it is used with."""


class DataError(MpizeroError, ValueError):
    """Raised for training data that is missing, empty, damaged or too short."""

    status = ExitStatus.DATA


class CheckpointError(MpizeroError):
    """Raised for a checkpoint that is damaged, foreign, or of another model; names file, array and reason."""

    status = ExitStatus.DATA


class CheckpointDamagedError(CheckpointError):
    """Raised for a checkpoint whose checksums or sizes are not those that were written.

    Only this error means that the checkpoint is useless. After any other error the files may still be intact.
    """


class CheckpointVersionError(CheckpointError):
    """Raised for a checkpoint of a format version that this mpizero does not know."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """Raised for a checkpoint, or a file of it, that does not exist."""


class CheckpointIOError(CheckpointError, OSError):
    """Raised when the operating system refuses to write or read a checkpoint; ``errno`` says why."""

    status = ExitStatus.INPUT_OUTPUT


class CollectiveError(MpizeroError):
    """Raised for an MPI call that failed or did not match; names rank, operation, tag, element type and count."""

    status = ExitStatus.HANG


class CollectiveMismatch(CollectiveError):  # noqa: N818 - says what is wrong
    """Raised when ranks have called different collectives; names the first that differs, and each rank's source line.

    Attributes
    ----------
    details : tuple of str
        Further lines of the report: the calls before and after.
    """

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.details = tuple(details)


class RemoteError(MpizeroError):
    """Raised on a rank because another has failed in a section that all must pass (``all_ranks``); names its error."""


class PeerFailure(MpizeroError):
    """Raised when another thread of an in-process communicator has failed or ended, so this one cannot continue."""


class SharedMemoryError(MpizeroError):
    """Raised when there is not enough shared memory for a node's window."""

    status = ExitStatus.INPUT_OUTPUT


class OutOfMemoryError(MpizeroError, MemoryError):
    """Raised when the system refuses memory that a rank needs; says what the memory was for and how to need less."""


class NonFiniteError(MpizeroError, ArithmeticError):
    """Raised when losses or gradients stay infinite or NaN for too many steps in a row."""


class IntegrityError(MpizeroError):
    """Raised when state in memory has changed though no code wrote it; names tensor, elements and rank."""


class ModelCheckError(MpizeroError, AssertionError):
    """Raised for a model that breaks the rules of training; names all that is wrong with it.

    Attributes
    ----------
    report : ModelReport
        The result of :func:`mpizero.testing.check_model`.
    """

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report
