"""Supervise a process from the import of mpizero on, so that all ranks of a job end when one fails or leaves early.

The supervision works under plain ``mpiexec python script.py``. The guard does not notice a call of ``os._exit``, which
runs no exit handlers. Then the launcher must notice that a rank has ended: Open MPI's does, but MPICH's takes exit
status 0 for success. So a program should show its success by a file that it writes at its end. :class:`JobExit` handles
errors and the end of the program, :class:`Guard` begins and ends the supervision, and :func:`current` returns the guard
of the process. :class:`PythonHooks` and :class:`CExitHook` call the guard when an error or exit happens. A
:class:`ProcessSetting` is a setting that several users of a process share.

[Note: one guard] ``sys.excepthook``, ``threading.excepthook`` and ``atexit`` belong to the process, as MPI does. So
there is one guard per process: ``_GUARD``, the only module state of the package. The guard holds the data that the
hooks need, and none that a computation reads.

[Note: life of the guard] Supervision begins with :func:`install_in_job`, when mpizero is imported in a launcher's job,
or with the first communicator. Hooks catch errors and the end of the program. If there are several ranks, a thread
writes the status of this rank for the other ranks of the node. When the last communicator is closed, the hooks and the
thread are removed; the next communicator installs them again. With ``embedded=True`` mpizero is a *guest* inside
another program: its communicators neither install nor remove anything.

[Note: one report] If several ranks fail, only one of them reports. On a node, the first rank that enters itself in the
status table reports. Ranks of different nodes do not share a table. So ranks on nodes without rank 0 wait for
``_OTHER_NODE`` seconds first; if another node ends the job meanwhile, they are killed before they report. An error of
bad input (MpizeroError) is usually raised by all ranks together. In this case a minimum over the ranks finds the lowest
failing rank and its exit status. The lowest failing rank reports, and all ranks end without ``MPI_Abort``. A
RemoteError or PeerFailure only says that another rank failed, so it is reported only if no other rank reports.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar

from mpizero._util.launch import RANK_PROCESS, Launch, is_rank, is_several, job_name, launched_rank, mark, ranks_of_node
from mpizero._util.names import nearest
from mpizero._util.text import PACKAGE
from mpizero.errors import (
    CollectiveError,
    CollectiveMismatch,
    ConfigError,
    ExitStatus,
    MpizeroError,
    PeerFailure,
    RemoteError,
)
from mpizero.guard.call_trace import CallTrace, CommunicatorRegistry
from mpizero.guard.heartbeat import (
    BLOCKED,
    EXIT_PATIENCE,
    JOINS,
    LOOK_AT_LINKS,
    EarlyExit,
    Heartbeat,
    LinkWatch,
    MismatchWatch,
    Supervisor,
    agree_range,
    watch_arrival,
)
from mpizero.guard.remote_status import StatusGroups
from mpizero.guard.reports import await_delivery, describe_error, format_error, user_message, write_stderr
from mpizero.guard.status import StartupTable, StatusRecord, is_working, scratch_folders

#: Seconds from a rank's failure until its process is ended by force, whatever MPI does.
HARD_STOP = 4.0
#: Seconds in which the other ranks must raise an MpizeroError too, to end together: with a common communicator, and
#: without one, when a rank may still be loading the program.
_AGREEMENT, _AGREEMENT_AT_START = 0.7, 2.0
#: Seconds that a rank waits for another one to end the job, if it failed because of or after the other rank.
_CONSEQUENCE = 2.0
_OTHER_NODE = 0.3

_NORMAL = 2**62
_KEYBOARD_INTERRUPT = 130


class JobExit:
    """Handle errors and the end of the program, so that no rank ends without the others; the base class of Guard."""

    def __init__(self, launched: bool) -> None:
        self.process = 0
        self.rank, self.size, self.host = 0, 1, ""
        self.launched = launched
        self.hooks: PythonHooks | None = None
        self.statuses = StatusGroups()
        self.register = CommunicatorRegistry()
        self.supervisor = Supervisor()
        #: Runs the :class:`.LinkWatch`, whose queries must not delay the other checks.
        self.links = Supervisor()
        self.patience = EXIT_PATIENCE
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

    def _state(self) -> StatusRecord:
        return {"state": self._exit_state or "working", **self.context}

    def _mpi(self, join: bool = False) -> Any:
        """Return the module ``mpi4py.MPI`` if it is loaded, MPI is running and there are other ranks; else None.

        With ``join`` a rank that has not loaded MPI yet loads it now. Without MPI in this rank, the other ranks would
        wait for it in MPI_Init, because MPICH's launcher does not notice the end of a process that has not called
        MPI_Init.
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
            together = together and (self._all_ranks_comm is not None or not self.statuses.groups)
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
        """Store the status passed to ``sys.exit``, and the number of collectives begun on each communicator so far."""
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
            if self.should_report():
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
        """The mpi4py communicator of all ranks that only the guard uses; None if there is none yet.

        It is made with the first mpizero communicator of all ranks: the attribute ``control`` of a
        :class:`.StatusGroup`.
        """
        return next((group.control for group in self.statuses.groups if len(group.members) == self.size), None)

    def _agree_to_fail(self, mpi: Any, error: MpizeroError) -> int | None:
        """Agree with all ranks to end the job; return the common exit status, or None if not all ranks fail in time.

        The lowest rank whose error is not a consequence of another rank's error prints its error. The ranks exchange
        their exit statuses on a communicator of all ranks that only the guard uses. A rank that fails before it has
        made an mpizero communicator of all ranks uses COMM_WORLD. A rank that is making its first communicator takes
        part there, too, because making a communicator begins with the same reduction (:func:`.range_of`).
        """
        second = isinstance(error, RemoteError | PeerFailure)
        self._exit_state = "failed"
        error_status = (second << 56) | (self.rank << 8) | int(error.status)
        limit = _CONSEQUENCE if second else _AGREEMENT if self.statuses.groups else _AGREEMENT_AT_START
        agreed = agree_range(mpi, [self._all_ranks_comm or mpi.COMM_WORLD], error_status, lambda waited: waited > limit)
        if agreed is None or agreed[1] == JOINS:
            return None
        self._agreed = True
        self.statuses.close_startup_table(all_joined=True)  # the launcher may end the others when the first one ends
        if agreed[0] == error_status:
            write_stderr(f"{user_message(error)}\n")
        return agreed[0] & 0xFF

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
            requested = status if counts == self.register.counts() else 0
            early_exit = EarlyExit(self.statuses, self.register, requested, self.patience, self._end_early)
            early_exit.wait()
            if self.statuses.groups:
                with contextlib.suppress(mpi.Exception):
                    agree_range(mpi, [group.control for group in self.statuses.groups], _NORMAL, early_exit.look)
            if self.mismatch_watch is not None and (error := self.mismatch_watch.search(0.0)):
                self._end_mismatch(error)
        self.supervisor.stop()
        if self._requested[0] not in (None, 0):  # the launcher ends the others then
            self.statuses.close_startup_table(all_joined=True)

    def _wait_before_mpi(self) -> None:
        """Wait for the other ranks of this node to end; end the job if one of them starts MPI.

        A rank that starts MPI would wait for ever in MPI_Init, because this rank has ended its program without MPI.
        """
        self._exit_state = "leaving"
        if self.heartbeat is not None:
            self.heartbeat.beat()
        begun = time.monotonic()
        limit = begun + (EXIT_PATIENCE if self._requested[0] in (None, 0) else _CONSEQUENCE)
        while (now := time.monotonic()) < limit:
            if not self.statuses.others_work(now - begun):
                return
            others = self.statuses.read_startup_table()
            starts = [rank for rank, record in others.items() if record.get("starts") and is_working(record)]
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

        The first line names step and phase of the training, and ``origin``, the thread or exit handler that raised the
        error, if they are known.
        """
        context = ", ".join(f"{name} {value}" for name, value in self.context.items())
        head = " ".join(filter(None, [origin, f"at {context}" if context else ""]))
        body = f"{head}:\n{text}" if head else text
        prefix = f"[rank {self.rank}/{self.size} {self.host}]"
        return "".join(f"{prefix} {line}".rstrip() + "\n" for line in body.splitlines())

    def should_report(self) -> bool:
        """Tell whether this rank is the one that reports why the job ends, see [Note: one report].

        May wait for up to 2.3 seconds.
        """
        if not self.statuses.groups and self.statuses.startup_table is None:  # no status table: lower ranks first
            time.sleep(min(0.1 * self.rank, _CONSEQUENCE) + (_OTHER_NODE if self.rank else 0.0))
            return True
        if not (self.statuses.leads if self.statuses.groups else 0 in {self.rank, *self.statuses.read_startup_table()}):
            time.sleep(_OTHER_NODE)
        return self.statuses.become_reporter()

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
        if self.should_report():
            write_stderr(text)
            await_delivery()
        else:
            time.sleep(_CONSEQUENCE)
        self.statuses.close_startup_table(all_joined=True)
        if threading.current_thread() is threading.main_thread() or mpi.Query_thread() == mpi.THREAD_MULTIPLE:
            mpi.COMM_WORLD.Abort(int(status))
        os._exit(int(status))

    @staticmethod
    def _arm_hard_stop(delay: float) -> None:
        devnull = os.open(os.devnull, os.O_WRONLY)  # faulthandler needs an open file
        faulthandler.dump_traceback_later(HARD_STOP + delay, exit=True, file=devnull)


#: Environment variable and its values: "collectives" compares every collective before it starts; "gradients" checks in
#: every step that layers have written all gradients.
DEBUG, DEBUGGED = "MPIZERO_DEBUG", ("collectives", "gradients")
#: Environment variable; "1" says that this process belongs to another program and must not be changed, see
#: docs/embedding.md.
EMBEDDED = "MPIZERO_EMBEDDED"


class Guard(JobExit):
    """Install and remove the supervision of this process. There is one Guard per process, see [Note: one guard].

    A supervised process catches its uncaught errors and the end of its program, to end all ranks together. The process
    also writes its status for the other ranks.
    """

    def __init__(self) -> None:
        super().__init__(launched=is_several(os.environ))
        self.debug = frozenset(filter(None, map(str.strip, os.environ.get(DEBUG, "").split(","))))
        self.verifies = "collectives" in self.debug
        #: Name of the launcher, for reports; "" without one.
        self.launcher = Launch.of(os.environ).name
        #: Number of ranks of this node up to this one, per core, see [Note: shared cores] in comm/mpi.py.
        self.ranks_per_core = ranks_of_node(os.environ) / (os.cpu_count() or 1)
        self._c_exit_hook: CExitHook | None = None
        self._imported = self._keeps = self.shows_stacks = False
        #: The supervised communicators by trace, with their world ranks; () for those split off another one.
        self._watched: dict[CallTrace, tuple[int, ...]] = {}

    # ------------------------------------------------------------------ life

    def install_in_job(self) -> None:
        """Begin to supervise this process if a launcher has started it as a rank; a second call does nothing.

        Not collective; loads no MPI.
        """
        if not self._imported and is_rank(os.environ) and os.environ.get(EMBEDDED) != "1":
            self.install()
            self.is_guest()  # raises for any other value
        self._imported = True

    def install(self, *, keep: bool = False) -> None:
        """Set hooks for errors and exit, and begin to write this rank's status for the other ranks. Not collective.

        A second call only stores ``keep``. With ``keep`` the process stays supervised until its end, even without
        communicators; for processes that run only mpizero.
        """
        self._keeps |= keep
        if self.hooks is not None and self.hooks.live:
            return
        self._imported, self.process, self.host = True, os.getpid(), os.uname().nodename
        self.hooks = PythonHooks(self)
        if is_several(os.environ):
            os.environ[RANK_PROCESS] = mark(os.environ)
            self.rank = self.statuses.rank = launched_rank(os.environ)
            folder = next((folder for folder in scratch_folders() if os.access(folder, os.W_OK)), "")
            size = Launch.of(os.environ).size or 1
            try:
                name = job_name(os.environ)
                self.statuses.startup_table = StartupTable(name, self.rank, size, folder) if name else None
            except OSError as error:
                self.supervisor.warn_once(error)
            self._start_heartbeat()
        for word in sorted(self.debug.difference(DEBUGGED)):
            raise ConfigError(
                f'{DEBUG}={word!r}: expected "collectives", "gradients", both with a comma between, or nothing'
                f"{nearest(word, DEBUGGED)}"
            )

    def release(self) -> None:
        """Remove the hooks and end the supervision, unless :meth:`install` was called with ``keep``. Not collective.

        This method is called when the last communicator is closed, and by a configuration with ``embedded=True``.
        """
        if self.process == os.getpid() and self.hooks is not None and not self._keeps:
            self.hooks.restore()
            self._stop_supervision()

    def on_exit(self) -> None:
        """Wait for the other ranks at the end of this rank's program, then end the supervision."""
        super().on_exit()
        self._stop_supervision()

    def _stop_supervision(self) -> None:
        heartbeat, self.heartbeat, self.mismatch_watch = self.heartbeat, None, None
        if heartbeat is not None:
            heartbeat.extra_entries.clear()
            self.supervisor.remove(heartbeat.look)
        if self.shows_stacks:
            self.shows_stacks = False
            faulthandler.unregister(_SIGNAL)
        self.statuses.close()
        if self._c_exit_hook is not None:
            self._c_exit_hook.close()
            self._c_exit_hook = None
        os.environ.pop(RANK_PROCESS, None)
        self.links.stop()
        self.hooks, self.process = None, 0

    def release_to_host(self) -> None:
        """Remove the hooks for errors that the import of mpizero has set; do nothing if communicators are supervised.

        Not collective.
        """
        self._imported = True
        if not self._watched:
            self.release()

    def is_guest(self, embedded: bool = False) -> bool:
        """Tell whether mpizero runs inside another program's process, which it must not change. Not collective.

        True if ``embedded`` is true or the environment variable MPIZERO_EMBEDDED is "1".
        """
        if (value := os.environ.get(EMBEDDED, "")) not in ("", "0", "1"):
            raise ConfigError(f'{EMBEDDED}={value!r}: expected "1", or "0" or nothing')
        return embedded or value == "1"

    @contextlib.contextmanager
    def register_new(self, trace: CallTrace, comm: Any, timeout: float | None, *, guest: bool) -> Iterator[Any]:
        """Supervise the process while a new communicator is made inside a ``with`` statement, and register the new one.

        Collective over ``comm``, the mpi4py intracommunicator from which the new one is made. The ``with`` statement
        yields a function, which its body calls with the new communicator and :meth:`.Waiting.barrier`. This function is
        collective, connects the ranks outside MPI (:class:`.StatusGroups`), and returns their world ranks.
        """
        if not guest:
            self.install()
            if RANK_PROCESS in os.environ:
                os.environ[RANK_PROCESS] = mark(os.environ)  # now MPI is loaded
        members = self.world_ranks(comm)
        entry = self.register.add(trace, members, comm.Get_rank())
        try:
            if guest or len(members) == 1:
                yield lambda new_comm, barrier: members
            else:
                with watch_arrival(entry, self.supervisor, timeout, self._known_records, self._end_stuck):
                    yield lambda new_comm, barrier: self._join_group(new_comm, members, barrier)
        except BaseException:
            self.register.remove(trace)
            raise
        if not guest:
            self._watched[trace] = tuple(sorted(members))
            if comm.Get_rank() == 0 and (mpi := sys.modules["mpi4py.MPI"]).Query_thread() < mpi.THREAD_MULTIPLE:
                text = "MPI runs below thread level MULTIPLE: the watchdog cannot end a hanging job; "
                text += "unset MPI4PY_RC_THREAD_LEVEL and mpi4py.rc.thread_level, or be a guest: embedded=True"
                warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _known_records(self) -> dict[int, StatusRecord]:
        latest = {} if self.heartbeat is None else {self.rank: self.heartbeat.last_record}
        return self.statuses.read_startup_table() | self.statuses.read() | latest

    def _end_stuck(self, text: str) -> None:
        if not self.ending:
            self.end_job(self.with_prefix(text), ExitStatus.HANG)

    def _join_group(self, comm: Any, members: tuple[int, ...], barrier: Callable[[Any], None]) -> tuple[int, ...]:
        """Open a status group for the ranks of ``comm`` if there is none; return ``members``. Collective over ``comm``.

        A status group is ranks that read each other's status, by shared memory on a node and by TCP between nodes.
        ``members`` are the world ranks of ``comm``. The method also begins to write the status of this rank and to
        compare calls.
        """
        if not self.statuses.has_group(members):
            self.statuses.add_group(comm, members, self.host, self.supervisor.warn_once, barrier)
        self._start_heartbeat()
        self._watch_mismatches()
        if len(members) == self.size:
            self.statuses.close_startup_table(all_joined=True)
        return members

    def world_ranks(self, comm: Any) -> tuple[int, ...]:
        """Return the COMM_WORLD ranks of the ranks of ``comm``, an mpi4py communicator. Not collective."""
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        self.rank, self.size = world.Get_rank(), world.Get_size()
        self.statuses.rank = self.rank
        group, world_group = comm.Get_group(), world.Get_group()
        members = tuple(group.Translate_ranks(None, world_group))
        group.Free()
        world_group.Free()
        return members

    def register_split(self, trace: CallTrace, comm: Any, *, guest: bool) -> tuple[int, ...]:
        """Register a communicator that was split off from a registered one; return its world ranks.

        Not collective.
        """
        members = self.world_ranks(comm)
        self.register.add(trace, members, comm.Get_rank())
        if not guest:
            self._watched[trace] = ()
        return members

    def unregister(self, trace: CallTrace, *, free: bool) -> None:
        """Remove a closed communicator from the registry; after the last one, end the supervision.

        With ``free`` the MPI communicators of the supervision are freed too, if they are no longer needed; then the
        call is collective over the communicator's ranks, and MPI must not have been finalized.
        """
        self.register.remove(trace)
        members = self._watched.pop(trace, None)
        if members and members not in self._watched.values():
            self.statuses.remove_group(members, free=free)
        if members is not None and not self._watched:
            self.release()

    def before_mpi_starts(self) -> None:
        """Write for the other ranks of the node that this rank is about to start MPI, which waits for all ranks.

        Not collective. This is an entry of this rank's status record.
        """
        if self.heartbeat is not None and "mpi4py.MPI" not in sys.modules:
            self.heartbeat.extra_entries["starts"] = True
            self.heartbeat.refresh_stack()
            self._start_heartbeat()

    def _start_heartbeat(self) -> None:
        """Begin to write the status of this rank periodically; write it once if already begun. Not collective."""
        if self.heartbeat is not None:
            self.heartbeat.beat()
            return
        self.heartbeat = Heartbeat(self.statuses, self.register, self.supervisor, self._state)
        try:
            self.heartbeat.beat()
            self.supervisor.add(self.heartbeat.look)
        except Exception as error:  # a failure of the supervision must not end the run
            self.supervisor.warn_once(error)

    def _watch_mismatches(self) -> None:
        """Begin to compare the calls of this rank with the calls of the other ranks of its node. Not collective."""
        if self.mismatch_watch is None and self.heartbeat is not None:
            self.mismatch_watch = MismatchWatch(self.heartbeat, self._end_mismatch)
            self.heartbeat.listeners.append(self.mismatch_watch.look)
            self._c_exit_hook = CExitHook(self._on_c_exit)
        if not self.links.is_running and self.heartbeat and any(remote.leads for remote in self.statuses.remote):
            self.links.add(LinkWatch(self.heartbeat, self.supervisor, self._tell).look, LOOK_AT_LINKS)

    def _tell(self, text: str) -> None:
        if not self.ending:
            write_stderr(self.with_prefix(text))


_GUARD = Guard()


def install_in_job() -> None:
    """Begin to supervise this process if a launcher has started it as a rank; the import of mpizero calls this.

    Not collective; loads no MPI. The environment variable ``MPIZERO_EMBEDDED=1`` prevents the supervision, and
    ``ShardingConfig(embedded=True)`` ends it.
    """
    _GUARD.install_in_job()


def set_context(step: int | None = None, phase: str | None = None) -> None:
    """Store the training step and the phase of this rank, to be shown in reports; None keeps the stored value.

    Not collective.
    """
    if step is not None:
        _GUARD.context["step"] = step
    if phase is not None:
        _GUARD.context["phase"] = phase


def current() -> Guard:
    """Return the guard of this process, its only instance."""
    return _GUARD


class PythonHooks:
    """Replace the error hooks of ``sys`` and ``threading``, and ``sys.exit``, and register a function with ``atexit``.

    ``listener`` is called for errors, for calls of ``sys.exit``, and at the end of the program. In a forked child of
    this process, the hooks only call the functions that they have replaced.

    [Note: earlier hooks] The replaced functions are still called for errors that do not concern this package. If the
    user's program has set its own ``sys.excepthook``, this function is called before the job is ended. If other code
    has replaced one of our hooks meanwhile, :meth:`restore` leaves the function of that code in place, and our hook
    then only calls the function that it has replaced. So each :class:`PythonHooks` is used once.
    """

    def __init__(self, listener: JobExit) -> None:
        self._listener = listener
        self._process = os.getpid()
        self._live = True
        self._excepthook, sys.excepthook = sys.excepthook, self._on_exception
        self._unraisablehook, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        self._exit: Callable[..., NoReturn] = sys.exit
        sys.exit = self._on_exit
        # A foreign hook for threads (pytest's) collects their errors for a report of its own.
        if threading.excepthook is threading.__excepthook__:
            threading.excepthook = self._on_thread_exception
        atexit.register(self._at_end)

    def restore(self) -> None:
        """Restore the replaced functions, and stop calling ``listener``; a second call does nothing."""
        self._live = False
        atexit.unregister(self._at_end)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        if sys.unraisablehook == self._on_unraisable:
            sys.unraisablehook = self._unraisablehook
        if sys.exit == self._on_exit:
            sys.exit = self._exit
        if threading.excepthook == self._on_thread_exception:
            threading.excepthook = threading.__excepthook__

    @property
    def live(self) -> bool:
        """True while ``listener`` is called for errors and exits in this process."""
        return self._live and self._process == os.getpid()

    def show(self, error: BaseException, trace: TracebackType | None, *, hosts_only: bool = False) -> None:
        """Show an error by the ``sys.excepthook`` that was replaced.

        With ``hosts_only`` show it only if the user's program has set that hook, not if the hook is Python's own.
        """
        if not hosts_only:
            self._excepthook(type(error), error, trace)
        elif self._excepthook is not sys.__excepthook__:
            with contextlib.suppress(Exception):  # an error in it must not keep the job alive
                self._excepthook(type(error), error, trace)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self.live and not hasattr(sys, "ps1"):  # else a forked child, or an interactive session
            self._listener.on_error(error, trace, "")
        else:
            self._excepthook(kind, error, trace)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        """Pass an error of a thread to ``listener`` if there are other ranks and the traceback contains this package.

        All other errors of threads are shown by ``threading.__excepthook__``.
        """
        error = args.exc_value
        ours = error is not None and args.exc_type is not SystemExit and _passes_through_library(args.exc_traceback)
        if error is not None and ours and self.live and self._listener.has_other_ranks():
            name = args.thread.name if args.thread else "?"
            self._listener.on_error(error, args.exc_traceback, f"in thread {name!r}")
        else:
            threading.__excepthook__(args)

    def _on_unraisable(self, args: Any) -> None:
        """Pass an error of a function registered with atexit to ``listener``, if there are other ranks.

        All other errors are passed to the ``sys.unraisablehook`` that was replaced.
        """
        of_the_end = "atexit" in (args.err_msg or "") and args.exc_value is not None
        if of_the_end and self.live and self._listener.has_other_ranks():
            self._listener.on_error(args.exc_value, args.exc_traceback, "while leaving (atexit)")
        else:
            self._unraisablehook(args)

    def _on_exit(self, status: Any = None, /) -> NoReturn:
        """Replace ``sys.exit``: pass the status to the listener, then exit.

        ``sys.exit`` is replaced because no hook receives SystemExit, and functions registered with atexit do not get
        the status.
        """
        if self.live:
            self._listener.on_exit_request(status)
        self._exit(status)

    def _at_end(self) -> None:
        if self.live:
            self._listener.on_exit()


def _passes_through_library(trace: TracebackType | None) -> bool:
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(PACKAGE):
            return True
        trace = trace.tb_next
    return False


class CExitHook:
    """Call ``function`` if C's ``exit()``, which Python's hooks do not notice, is called before :meth:`close`.

    MPICH calls ``exit()`` when a message of a blocking collective is too long for its buffer, whatever error handler is
    set. During such an exit, functions registered by C's ``atexit`` still run, and the supervision's thread is alive.

    Does nothing if the C library cannot register such functions. The hook must be closed before the interpreter ends,
    because ``function`` is Python code.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._called)
        self._owner = ctypes.create_string_buffer(1)  # its address marks the entry as ours, to be removed again
        self._remove: Callable[..., object] | None = None
        with contextlib.suppress(AttributeError, OSError, TypeError):
            library = ctypes.CDLL(None)
            self._remove = library["__cxa_finalize"]
            library["__cxa_atexit"](self._callback, None, ctypes.byref(self._owner))

    def _called(self, _: object) -> None:
        if self._function is not None:
            self._function()

    def close(self) -> None:
        """Unregister the function; a second call does nothing."""
        self._function = None
        remove, self._remove = self._remove, None
        if remove is not None:
            remove(ctypes.byref(self._owner))


#: The signal by which other processes ask this one for its stacks; it needs no interpreter lock. 0 where there is none.
#: It is a real-time one, above those that C libraries and debuggers use, next to that of :class:`.LockTimer`. SIGUSR1
#: and SIGUSR2 belong to the program and to batch systems: a handler of theirs that is set before, after or while this
#: library works stays in place.
_SIGNAL = signal.SIGRTMIN + 12 if hasattr(signal, "SIGRTMIN") else 0


def show_stacks_on_request() -> bool:
    """Make this process write its stacks to standard error on each :func:`ask_for_stacks`; False if it cannot."""
    with contextlib.suppress(ValueError, OSError, AttributeError, RuntimeError):  # a standard error of its own
        if _SIGNAL and signal.getsignal(_SIGNAL) is signal.SIG_DFL:
            faulthandler.register(_SIGNAL, file=sys.__stderr__ or 2, all_threads=True)
            return True
    return False


def ask_for_stacks(process: int) -> None:
    """Make a process that has called :func:`show_stacks_on_request` write its stacks, even while it is stuck.

    Raises
    ------
    OSError
        If there is no such process.
    """
    os.kill(process, _SIGNAL)


Value = TypeVar("Value")


class ProcessSetting(Generic[Value]):
    """Give a process-wide setting the value of its newest holder, and restore the original value after the last one.

    A holder is a caller of :meth:`hold`, until it calls the function that the method has returned.

    Parameters
    ----------
    apply : callable
        Sets a value; called under a lock, with the newest holder's value, whenever a holder is added or removed.
    restore : callable
        Restores the value from before the first holder; called when the last holder is removed.
    """

    def __init__(self, apply: Callable[[Value], object], restore: Callable[[], object]) -> None:
        self._apply, self._restore = apply, restore
        self._values: dict[object, Value] = {}
        self._lock = threading.RLock()  # a holder may be collected, and so leave, while another one comes

    def hold(self, value: Value) -> Callable[[], None]:
        """Set ``value`` until the returned function is called, or a later call sets another value. Not collective.

        A second call of the returned function does nothing.
        """
        key = object()
        with self._lock:
            self._apply(value)
            self._values[key] = value

        def leave() -> None:
            with self._lock:
                if self._values.pop(key, self) is self:
                    return
                if self._values:
                    self._apply(next(reversed(self._values.values())))
                else:
                    self._restore()

        return leave
