"""End all ranks of a job when one fails or leaves early; one of them reports why.

It works under plain ``mpiexec python script.py``. It does not notice ``os._exit``, which runs no Python code. Then the
launcher must notice that a rank has ended (Open MPI's does; MPICH's takes status 0 for success), so a program should
mark success by a file.

[Note: one report] If several ranks fail, only one of them reports. On a node it is the first rank that claims the
report on the status board. Ranks of other nodes cannot be asked. So ranks on nodes without rank 0 wait for
``_OTHER_NODE`` seconds first; if another node ends the job meanwhile, they are killed before they report. An error of
bad input (MpizeroError) is usually raised by all ranks at once. Then a minimum over the ranks finds the lowest failing
rank and its exit status. That rank reports, and all ranks end without ``MPI_Abort``. A RemoteError or PeerFailure only
says that another rank failed, so it is reported only if no other rank reports.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any, NoReturn

from mpizero.comm.failure_report import await_delivery, describe_error, format_error, user_message, write_stderr
from mpizero.comm.recording.call_trace import CallTrace
from mpizero.comm.recording.registry import CommunicatorRegistry
from mpizero.comm.status.peer_groups import PeerGroups
from mpizero.comm.status.startup_board import is_working
from mpizero.comm.status.status_board import Slot
from mpizero.comm.supervision.arrival import JOINS
from mpizero.comm.supervision.early_exit import BLOCKED, PATIENCE, EarlyExit, agree_range
from mpizero.comm.supervision.heartbeat import Heartbeat
from mpizero.comm.supervision.mismatch_watch import MismatchWatch
from mpizero.comm.supervision.python_hooks import PythonHooks
from mpizero.comm.supervision.supervisor import Supervisor
from mpizero.errors import CollectiveError, CollectiveMismatch, ExitStatus, MpizeroError, PeerFailure, RemoteError

#: Seconds after its failure in which a rank's process is ended by force, whatever MPI does.
HARD_STOP = 4.0
#: Seconds in which the other ranks must raise an MpizeroError too, to end together: with a common communicator, and
#: without one, when a rank may still be loading the program.
_AGREEMENT, _AGREEMENT_AT_START = 0.7, 2.0
#: Seconds for which ranks that fail because of another rank, or after it, wait to be ended.
_CONSEQUENCE = 2.0
_OTHER_NODE = 0.3

_NORMAL = 2**62
_KEYBOARD_INTERRUPT = 130


class JobExit:
    """Handle errors and the end of the program, so that no rank ends without the others. Base class of Guard."""

    def __init__(self, launched: bool) -> None:
        self.process = 0
        self.rank, self.size, self.host = 0, 1, ""
        self.launched = launched
        self.hooks: PythonHooks | None = None
        self.peers = PeerGroups()
        self.register = CommunicatorRegistry()
        self.supervisor = Supervisor()
        self.patience = PATIENCE
        self.heartbeat: Heartbeat | None = None
        self.mismatch_watch: MismatchWatch | None = None
        self.context: dict[str, Any] = {}
        self._exit_state = ""
        self._agreed = False
        self._requested: tuple[Any, dict[str, int]] = (0, {})
        self._ending_lock = threading.Lock()

    def _end_mismatch(self, error: CollectiveMismatch) -> None:
        if not self.ending:
            self.end_job(self.with_prefix(describe_error(error)), error.status)

    def _state(self) -> Slot:
        return {"state": self._exit_state or "working", **self.context}

    def _mpi(self, join: bool = False) -> Any:
        """Return the module ``mpi4py.MPI`` if it is loaded, MPI is running and there are other ranks; else None.

        With ``join`` a rank that has not loaded MPI yet loads it now. Otherwise the other ranks would wait for this
        rank in MPI_Init, because MPICH's launcher does not notice the end of a process that has not called MPI_Init.
        """
        if join and self.launched and self.process == os.getpid() and "mpi4py.MPI" not in sys.modules:
            self._arm_hard_stop(0.0)
            with contextlib.suppress(Exception):
                from mpi4py import MPI  # noqa: F401
            faulthandler.cancel_dump_traceback_later()
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is None or self.process != os.getpid() or not mpi.Is_initialized() or mpi.Is_finalized():
            return None
        if self.size == 1:  # no communicator with all ranks was made yet
            self.rank, self.size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
        return mpi if self.size > 1 else None

    # ------------------------------------------------------------------ events of the hooks

    def on_error(self, error: BaseException, trace: TracebackType | None, origin: str) -> None:
        """Report an uncaught error, and end all ranks.

        ``origin`` names the thread or the exit handler that raised the error; it is "" for the main program.
        """
        assert self.hooks is not None
        mpi = self._mpi(join=True)
        if isinstance(error, MpizeroError):
            self.hooks.show(error, trace, hosts_only=True)
            # After a failed collective the ranks are not in step, and their communicators are of no more use.
            together = not origin and not isinstance(error, CollectiveError)
            together = together and (self._all_ranks_comm is not None or not self.peers.groups)
            status = self._agree_to_fail(mpi, error) if mpi and together else None
            if status is None and mpi:
                delay = 0.0 if together else self._consequence_delay(error, mpi)
                self.end(mpi, self.with_prefix(user_message(error), origin), error.status, delay)
            if status is None:
                write_stderr(f"{user_message(error)}\n")
            self._exit(error.status if status is None else status)
        elif mpi is None:
            self.hooks.show(error, trace)
        else:
            self.hooks.show(error, trace, hosts_only=True)
            code = _KEYBOARD_INTERRUPT if isinstance(error, KeyboardInterrupt) else ExitStatus.RANK_FAILED
            delay = _AGREEMENT if self._consequence_delay(error, mpi) else 0.0
            self.end(mpi, self.with_prefix(format_error(error, trace), origin), code, delay)

    def on_exit_request(self, status: Any) -> None:
        """Store the status that was passed to ``sys.exit``, and how many collectives have been called until now."""
        self._requested = (status, self.register.counts())

    def has_other_ranks(self) -> bool:
        """Tell whether MPI is running with other ranks, which must end too if this rank fails."""
        return self._mpi() is not None

    def _on_c_exit(self) -> None:
        """Report why the MPI library has called C's ``exit()``, and end the process with an exit status other than 0.

        Does nothing if the calls of the ranks do not show why.
        """
        if self.process != os.getpid() or self.mismatch_watch is None or not self._ending_lock.acquire(blocking=False):
            return
        call = next((entry.trace for entry in self.register.live if entry.trace.entered), None)
        error: CollectiveError | None = self.mismatch_watch.search(_OTHER_NODE if call is None else BLOCKED)
        if error is None and call is not None:
            error = CollectiveError(
                f"the MPI library ended this process in {call.operation} {call.tag!r} of {call.name!r}"
            )
        if error is not None:
            if self.claims_report():
                write_stderr(self.with_prefix(describe_error(error)))
                await_delivery()
            else:
                time.sleep(_AGREEMENT)
            os._exit(ExitStatus.HANG)

    @staticmethod
    def _consequence_delay(error: BaseException, mpi: Any) -> float:
        """Return the seconds to wait before this rank reports ``error``; 0 if another rank cannot have caused it.

        Another rank may have caused an MPI exception, because MPI reports the death of a rank to the other ranks.
        """
        if isinstance(error, RemoteError | PeerFailure):
            return _CONSEQUENCE
        return _AGREEMENT if isinstance(error, mpi.Exception) else 0.0

    # ------------------------------------------------------------------ ending together

    @property
    def _all_ranks_comm(self) -> Any:
        """The mpi4py communicator of the peer group of all ranks, used only by the guard; None without this group."""
        return next((group.control for group in self.peers.groups if len(group.members) == self.size), None)

    def _agree_to_fail(self, mpi: Any, error: MpizeroError) -> int | None:
        """Agree with all ranks to end now; return the common exit status, or None if not all ranks fail in time.

        The lowest rank whose error is not a consequence of another rank's error prints its error. The ranks agree on
        the communicator of the peer group of all ranks. A rank that fails before it has made any communicator uses
        COMM_WORLD, on which the first operation of a rank that makes the first communicator is its counterpart.
        """
        second = isinstance(error, RemoteError | PeerFailure)
        self._exit_state = "failed"
        mine = (second << 56) | (self.rank << 8) | int(error.status)
        limit = _CONSEQUENCE if second else _AGREEMENT if self.peers.groups else _AGREEMENT_AT_START
        found = agree_range(mpi, [self._all_ranks_comm or mpi.COMM_WORLD], mine, lambda waited: waited > limit)
        if found is None or found[1] == JOINS:
            return None
        self._agreed = True
        self.peers.close_startup_board(all_joined=True)  # the launcher may end the others when the first one ends
        if found[0] == mine:
            write_stderr(f"{user_message(error)}\n")
        return found[0] & 0xFF

    def _exit(self, status: int) -> NoReturn:
        # -m mpi4py has noted status 1 for the error it saw pass, and would abort with it at the end.
        if (runner := sys.modules.get("mpi4py.run")) is not None:
            runner.set_abort_status(int(status))
        raise SystemExit(int(status))

    def on_exit(self) -> None:
        """Wait for the other ranks at the end of the program; end the job if they cannot finish without this rank."""
        mpi = self._mpi()
        if mpi is None and self.launched and self.process == os.getpid() and "mpi4py.MPI" not in sys.modules:
            self._wait_before_mpi()
        elif mpi is not None and not self._agreed and not self._ending_lock.locked():
            self._exit_state = "leaving"
            if self.heartbeat is not None:
                self.heartbeat.beat()  # so that the others see all calls of this rank
            status, counts = self._requested  # if collectives came after it, the program has caught the exit
            asked = status if counts == self.register.counts() else 0
            early_exit = EarlyExit(self.peers, self.register, asked, self.patience, self._end_early)
            early_exit.wait()
            if self.peers.groups:
                with contextlib.suppress(mpi.Exception):
                    agree_range(mpi, [group.control for group in self.peers.groups], _NORMAL, early_exit.look)
            if self.mismatch_watch is not None and (error := self.mismatch_watch.compare_at_exit()):
                self._end_mismatch(error)
        self.supervisor.stop()
        if self._requested[0] not in (None, 0):  # the launcher ends the others then
            self.peers.close_startup_board(all_joined=True)

    def _wait_before_mpi(self) -> None:
        """Wait for the other ranks of this node to end; end the job if one of them starts MPI.

        That rank would wait for ever in MPI_Init, because this rank has ended its program without MPI.
        """
        self._exit_state = "leaving"
        if self.heartbeat is not None:
            self.heartbeat.beat()
        begun = time.monotonic()
        limit = begun + (PATIENCE if self._requested[0] in (None, 0) else _CONSEQUENCE)
        while (now := time.monotonic()) < limit:
            if not self.peers.others_work(now - begun):
                return
            others = self.peers.read_startup_board()
            starts = [rank for rank, slot in others.items() if slot.get("starts") and is_working(slot)]
            if starts and self._mpi(join=True) is not None:
                self._end_early(f"rank {starts[0]} starts MPI, which takes all ranks, at {others[starts[0]]['place']}")
            time.sleep(0.1)

    def _end_early(self, reason: str) -> None:
        if (mpi := self._mpi()) is not None:
            text = f"left early: the program has ended here, but {reason}"
            self.end(mpi, self.with_prefix(text), ExitStatus.RANK_FAILED)

    # ------------------------------------------------------------------ reporting

    def with_prefix(self, text: str, origin: str = "") -> str:
        """Return the report ``text`` with ``[rank r/N host]`` before every line.

        The first line names ``origin``, step and phase, if they are known.
        """
        place = ", ".join(f"{name} {value}" for name, value in self.context.items())
        head = " ".join(filter(None, [origin, f"at {place}" if place else ""]))
        body = f"{head}:\n{text}" if head else text
        prefix = f"[rank {self.rank}/{self.size} {self.host}]"
        return "".join(f"{prefix} {line}".rstrip() + "\n" for line in body.splitlines())

    def claims_report(self) -> bool:
        """Tell whether this rank is the one that reports why the job ends, see [Note: one report].

        May wait for up to 2.3 seconds.
        """
        if not self.peers.groups and self.peers.startup_board is None:  # no status board: lower ranks first
            time.sleep(min(0.1 * self.rank, _CONSEQUENCE) + (_OTHER_NODE if self.rank else 0.0))
            return True
        if not (self.peers.leads if self.peers.groups else 0 in {self.rank, *self.peers.read_startup_board()}):
            time.sleep(_OTHER_NODE)
        return self.peers.claim()

    @property
    def ending(self) -> bool:
        """True once this rank has begun to end the job."""
        return self._ending_lock.locked()

    def is_registered(self, trace: CallTrace) -> bool:
        """Tell whether ``trace`` belongs to an open MPI communicator of this process."""
        return any(entry.trace is trace for entry in self.register.live)

    def end_job(self, text: str, status: int) -> None:
        """End all ranks as :meth:`end` does; do nothing if MPI is not running or there are no other ranks."""
        if (mpi := self._mpi()) is not None:
            self.end(mpi, text, status)

    def end(self, mpi: Any, text: str, status: int, delay: float = 0.0) -> NoReturn:
        """Write ``text`` to standard error if no other rank reports, and end all ranks with exit status ``status``.

        ``mpi`` is the module ``mpi4py.MPI``, and ``delay`` the number of seconds to wait first.
        """
        if not self._ending_lock.acquire(blocking=False):
            threading.Event().wait()  # another thread of this rank ends the job
        self._arm_hard_stop(delay)
        self._exit_state = "failed"
        time.sleep(delay)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if self.claims_report():
            write_stderr(text)
            await_delivery()
        else:
            time.sleep(_CONSEQUENCE)
        self.peers.close_startup_board(all_joined=True)
        if threading.current_thread() is threading.main_thread() or mpi.Query_thread() == mpi.THREAD_MULTIPLE:
            mpi.COMM_WORLD.Abort(int(status))
        os._exit(int(status))

    @staticmethod
    def _arm_hard_stop(delay: float) -> None:
        devnull = os.open(os.devnull, os.O_WRONLY)  # faulthandler needs an open file
        faulthandler.dump_traceback_later(HARD_STOP + delay, exit=True, file=devnull)
