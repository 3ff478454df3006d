"""Define every exception that mpizero raises on purpose, with its exit status."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from mpizero.frames import rendered
from mpizero.text import printable


class ExitStatus(IntEnum):
    """Name the exit statuses of the command line (as ``sysexits.h`` where it has a fitting name)."""

    OK = 0
    DATA = 65
    RANK_FAILED = 70
    INPUT_OUTPUT = 74
    PREEMPTED = 75
    HANG = 76
    CONFIG = 78


class MpizeroError(Exception):
    """Base class of all deliberate errors; the command line prints them as one line, without a traceback.

    Where one ends a job, the line names the user's own that led to it; ``MPIZERO_TRACEBACK=1`` shows the traceback.
    Their text is fit for a terminal, whatever it quotes: names, keys and values from files of others stand in it
    escaped (:func:`mpizero.text.printable`), and nobody who raises one has to think of it.
    """

    status: ExitStatus = ExitStatus.RANK_FAILED

    #: Where in a model it arose, if there: "block 'encoder.2'".
    place: str = ""

    def __str__(self) -> str:
        """Return the message, without anything that a terminal would obey; it begins with the place in the model."""
        return printable(", ".join(filter(None, [self.place, super().__str__()])), keep="\n")

    def _render_traceback_(self) -> list[str]:
        """Show the user's own line first: IPython and Jupyter ask for this."""
        return rendered(self)


class ConfigError(MpizeroError, ValueError):
    """Raised for a setting that cannot be used: the message names the key, the value and what is allowed."""

    status = ExitStatus.CONFIG


class ArgumentError(MpizeroError, TypeError):
    """Raised for arguments that a class or function does not take: the message names those given and those taken."""

    status = ExitStatus.CONFIG


class StateError(MpizeroError, RuntimeError):
    """Raised for a call that comes too early, too late or twice: on a closed model, or without a gradient yet."""


class UnsupportedError(MpizeroError, NotImplementedError):
    """Raised for what a model, layer or function of this kind cannot do; names what can, or what to add."""

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

    No other error about a checkpoint means that it is of no use: what cannot be opened now may be whole.
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
    """Raised when ranks have called different collectives; names the first that differs, and the lines that call it.

    Attributes
    ----------
    details : tuple of str
        Further lines of the report: the calls before and after.
    """

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.details = tuple(details)


class RemoteError(MpizeroError):
    """Raised when another rank has failed inside an agreed section; its own traceback says why."""


class PeerFailure(MpizeroError):
    """Raised when another thread of an in-process communicator has failed, so that this one cannot go on."""


class SharedMemoryError(MpizeroError):
    """Raised when there is not enough shared memory for a node's window."""

    status = ExitStatus.INPUT_OUTPUT


class OutOfMemoryError(MpizeroError, MemoryError):
    """Raised when the system refuses memory that a rank needs; names its use, and what needs less."""


class NonFiniteError(MpizeroError, ArithmeticError):
    """Raised when losses or gradients stay infinite or NaN for too many steps in a row."""


class IntegrityError(MpizeroError):
    """Raised when state in memory has changed by itself; names tensor, elements and rank."""


class ModelCheckError(MpizeroError, AssertionError):
    """Raised for a model that breaks the rules of training; names all that is wrong with it.

    Attributes
    ----------
    report : ModelReport
        What :func:`mpizero.testing.check_model` has looked at.
    """

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report
