"""Every exception that mpizero raises on purpose, with the exit status that each means."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from mpizero.frames import rendered
from mpizero.text import printable


class ExitStatus(IntEnum):
    """Exit statuses of the command line (``sysexits.h`` where it has a fitting name)."""

    OK = 0
    DATA = 65
    RANK_FAILED = 70
    INPUT_OUTPUT = 74
    PREEMPTED = 75
    HANG = 76
    CONFIG = 78


class MpizeroError(Exception):
    """Base of all deliberate errors; the command line prints them as one line, without a traceback.

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
    """A setting that cannot be used: the message names the key, the value and what is allowed."""

    status = ExitStatus.CONFIG


class ArgumentError(MpizeroError, TypeError):
    """Arguments that a class or function does not take: the message names what was given and what is taken."""

    status = ExitStatus.CONFIG


class StateError(MpizeroError, RuntimeError):
    """A call that comes too early, too late or twice: on a model that is closed, or has no gradient yet."""


class UnsupportedError(MpizeroError, NotImplementedError):
    """What a model, layer or function of this kind cannot do; the message names what can, or what to add."""

    status = ExitStatus.CONFIG


class UnknownNameError(MpizeroError, AttributeError):
    """A name that a module of this package does not have."""

    status = ExitStatus.CONFIG


class GridError(ConfigError):
    """Group sizes that do not fit the number of ranks."""


class ScheduleError(ConfigError):
    """A pipeline schedule that cannot be run; names the stage and the instruction."""


class LayoutError(MpizeroError, ValueError):
    """A parameter, range or shape that does not fit the layout it is used with."""


class DataError(MpizeroError, ValueError):
    """Training data that is missing, empty, damaged or too short."""

    status = ExitStatus.DATA


class CheckpointError(MpizeroError):
    """A checkpoint that is damaged, foreign, or belongs to another model; names file, array and reason."""

    status = ExitStatus.DATA


class CheckpointDamagedError(CheckpointError):
    """A checkpoint whose bytes are not those that were written: a checksum or a size tells.

    No other error about a checkpoint means that it is of no use: what cannot be opened now may be whole.
    """


class CheckpointVersionError(CheckpointError):
    """A checkpoint of a format version that this mpizero does not know."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """A checkpoint, or a file of it, that does not exist."""


class CheckpointIOError(CheckpointError, OSError):
    """A checkpoint that the operating system refused to write or read; ``errno`` says why."""

    status = ExitStatus.INPUT_OUTPUT


class CollectiveError(MpizeroError):
    """An MPI call that failed or did not match; names rank, operation, tag, element type and count."""

    status = ExitStatus.HANG


class CollectiveMismatch(CollectiveError):  # noqa: N818 - says what is wrong
    """Ranks have called different collectives; names the first that differs, and the lines that call it.

    Attributes
    ----------
    details : tuple of str
        Further lines of the report: the calls before and after.
    """

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.details = tuple(details)


class RemoteError(MpizeroError):
    """Another rank failed inside an agreed section; its own traceback says why."""


class PeerFailure(MpizeroError):
    """Another thread of an in-process communicator failed, so this one cannot go on."""


class SharedMemoryError(MpizeroError):
    """Not enough shared memory for a node's window."""

    status = ExitStatus.INPUT_OUTPUT


class OutOfMemoryError(MpizeroError, MemoryError):
    """The system refuses memory that a rank needs; names what it was for, and what needs less."""


class NonFiniteError(MpizeroError, ArithmeticError):
    """Losses or gradients stayed infinite or NaN for too many steps in a row."""


class IntegrityError(MpizeroError):
    """State in memory has changed by itself; names tensor, elements and rank."""


class ModelCheckError(MpizeroError, AssertionError):
    """A model that is not what training takes it for; names all that is wrong with it.

    Attributes
    ----------
    report : ModelReport
        What :func:`mpizero.testing.check_model` has looked at.
    """

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report
