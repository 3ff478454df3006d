"""Supervise a process from the import of mpizero on, so that all ranks end when one fails.

[Note: one guard] ``sys.excepthook``, ``threading.excepthook`` and ``atexit`` belong to the process, as MPI does. So
there is one guard per process: ``_GUARD``, the only module state of the package. It holds what the hooks need and
nothing that a computation reads.

[Note: life of the guard] Supervision begins with :func:`install_in_job`, when mpizero is imported in a launcher's job,
or with the first communicator. Hooks catch errors and the end of the program (:mod:`.python_hooks`, :mod:`.job_exit`).
If there are several ranks, a thread writes the status of this rank for the other ranks of the node. When the last
communicator is closed, the hooks and the thread are removed; the next communicator installs them again. With
``embedded=True`` mpizero is a *guest* inside another program: its communicators neither install nor remove anything.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from mpizero._util.launch import RANK_PROCESS, Launch, is_rank, is_several, job_name, launched_rank, mark, ranks_of_node
from mpizero._util.names import nearest
from mpizero.comm.recording.call_trace import CallTrace
from mpizero.comm.status.scratch_files import scratch_folders
from mpizero.comm.status.startup_board import open_startup_board
from mpizero.comm.status.status_board import Slot
from mpizero.comm.supervision.arrival import watch_arrival
from mpizero.comm.supervision.c_exit_hook import CExitHook
from mpizero.comm.supervision.heartbeat import Heartbeat
from mpizero.comm.supervision.job_exit import JobExit
from mpizero.comm.supervision.mismatch_watch import MismatchWatch
from mpizero.comm.supervision.python_hooks import PythonHooks
from mpizero.comm.supervision.stack_signal import stop_showing
from mpizero.errors import ConfigError, ExitStatus

#: Environment variable and its values: "collectives" compares every collective before it starts; "gradients" checks in
#: every step that layers have written all gradients.
DEBUG, DEBUGGED = "MPIZERO_DEBUG", ("collectives", "gradients")
#: Environment variable; "1" says that this process belongs to another program and must not be changed, see
#: docs/embedding.md.
EMBEDDED = "MPIZERO_EMBEDDED"


class Guard(JobExit):
    """Install and remove the supervision of this process. There is one instance, see [Note: one guard].

    A supervised process catches its uncaught errors and the end of its program, to end all ranks together. It also
    writes its status for the other ranks.
    """

    def __init__(self) -> None:
        super().__init__(launched=is_several(os.environ))
        self.debug = frozenset(filter(None, map(str.strip, os.environ.get(DEBUG, "").split(","))))
        self.verifies = "collectives" in self.debug
        #: Name of the launcher, for reports; "" without one.
        self.launcher = Launch.of(os.environ).name
        #: The ranks of this node up to this one, for each core: [Note: shared cores] in requests.py.
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
        """Set hooks for errors and exit, and begin to write the status of this rank for others. Not collective.

        A second call only stores ``keep``. With ``keep`` the process stays supervised until its end, even without
        communicators. That is for processes that run nothing but mpizero.
        """
        self._keeps |= keep
        if self.hooks is not None and self.hooks.live:
            return
        self._imported, self.process, self.host = True, os.getpid(), os.uname().nodename
        self.hooks = PythonHooks(self)
        if is_several(os.environ):
            os.environ[RANK_PROCESS] = mark(os.environ)
            self.rank = self.peers.rank = launched_rank(os.environ)
            folder = next((folder for folder in scratch_folders() if os.access(folder, os.W_OK)), "")
            size = Launch.of(os.environ).size or 1
            name, warn_once = job_name(os.environ), self.supervisor.warn_once
            self.peers.startup_board = open_startup_board(name, self.rank, size, folder, warn_once)
            self._start_heartbeat()
        for word in sorted(self.debug.difference(DEBUGGED)):
            raise ConfigError(
                f'{DEBUG}={word!r}: expected "collectives", "gradients", both with a comma between, or nothing'
                f"{nearest(word, DEBUGGED)}"
            )

    def release(self) -> None:
        """Remove the hooks and end the supervision; do nothing if it was installed with ``keep``. Not collective.

        Called when the last communicator is closed, and by a configuration with ``embedded=True``.
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
            stop_showing()
        self.peers.close()
        if self._c_exit_hook is not None:
            self._c_exit_hook.close()
            self._c_exit_hook = None
        os.environ.pop(RANK_PROCESS, None)
        self.hooks, self.process = None, 0

    def release_to_host(self) -> None:
        """Remove the hooks that the import of mpizero has set; do nothing if communicators are supervised.

        Not collective.
        """
        self._imported = True
        if not self._watched:
            self.release()

    def is_guest(self, embedded: bool = False) -> bool:
        """Tell whether mpizero is a guest in another program's process. Not collective.

        True if ``embedded`` is true or the environment variable MPIZERO_EMBEDDED is "1".
        """
        if (value := os.environ.get(EMBEDDED, "")) not in ("", "0", "1"):
            raise ConfigError(f'{EMBEDDED}={value!r}: expected "1", or "0" or nothing')
        return embedded or value == "1"

    @contextlib.contextmanager
    def register_new(self, trace: CallTrace, comm: Any, timeout: float | None, *, guest: bool) -> Iterator[Any]:
        """Supervise the process while a new communicator is made inside a ``with`` statement, and register the new one.

        Collective over ``comm``, the mpi4py intracommunicator from which the new one is made. The value of the ``with``
        statement is a function. The body calls it with the new communicator and :meth:`.Waiting.meet`. The call is
        collective, connects the ranks outside MPI (``status/peer_groups.py``), and returns their world ranks.
        """
        if not guest:
            self.install()
            if RANK_PROCESS in os.environ:
                os.environ[RANK_PROCESS] = mark(os.environ)  # now MPI is loaded
        members = self.world_ranks(comm)
        entry = self.register.add(trace, members, comm.Get_rank())
        try:
            if guest or len(members) == 1:
                yield lambda own, meet: members
            else:
                with watch_arrival(entry, self.supervisor, timeout, self._known_slots, self._end_stuck):
                    yield lambda own, meet: self._join_group(own, members, meet)
        except BaseException:
            self.register.remove(trace)
            raise
        if not guest:
            self._watched[trace] = tuple(sorted(members))
            if comm.Get_rank() == 0 and (mpi := sys.modules["mpi4py.MPI"]).Query_thread() < mpi.THREAD_MULTIPLE:
                text = "MPI runs below thread level MULTIPLE: the watchdog cannot end a hanging job; "
                text += "unset MPI4PY_RC_THREAD_LEVEL and mpi4py.rc.thread_level, or be a guest: embedded=True"
                warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _known_slots(self) -> dict[int, Slot]:
        own = {} if self.heartbeat is None else {self.rank: self.heartbeat.last_slot}
        return self.peers.read_startup_board() | self.peers.read() | own

    def _end_stuck(self, text: str) -> None:
        if not self.ending:
            self.end_job(self.with_prefix(text), ExitStatus.HANG)

    def _join_group(self, comm: Any, members: tuple[int, ...], meet: Callable[[Any], None]) -> tuple[int, ...]:
        """Open a peer group for the ranks of ``comm`` if there is none; return ``members``. Collective over ``comm``.

        ``members`` are the world ranks of ``comm``. Also begins to write the status of this rank and to compare calls.
        """
        if not self.peers.has_group(members):
            self.peers.add_group(comm, members, self.host, self.supervisor.warn_once, meet)
        self._start_heartbeat()
        self._watch_mismatches()
        if len(members) == self.size:
            self.peers.close_startup_board(all_joined=True)
        return members

    def world_ranks(self, comm: Any) -> tuple[int, ...]:
        """Return the COMM_WORLD ranks of the ranks of ``comm``, an mpi4py communicator. Not collective."""
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        self.rank, self.size = world.Get_rank(), world.Get_size()
        self.peers.rank = self.rank
        group, everyone = comm.Get_group(), world.Get_group()
        members = tuple(group.Translate_ranks(None, everyone))
        group.Free()
        everyone.Free()
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

        With ``free`` the MPI communicators of the supervision are freed too, if they are no longer needed. Then the
        call is collective over the communicator's ranks, and MPI must not have been finalized.
        """
        self.register.remove(trace)
        members = self._watched.pop(trace, None)
        if members and members not in self._watched.values():
            self.peers.remove_group(members, free=free)
        if members is not None and not self._watched:
            self.release()

    def before_mpi_starts(self) -> None:
        """Write to this rank's status that it is about to start MPI, which waits for all ranks. Not collective."""
        if self.heartbeat is not None and "mpi4py.MPI" not in sys.modules:
            self.heartbeat.extra_entries["starts"] = True
            self.heartbeat.refresh_place()
            self._start_heartbeat()

    def _start_heartbeat(self) -> None:
        """Begin to write the status of this rank periodically; if it has begun, write it once. Not collective."""
        if self.heartbeat is not None:
            self.heartbeat.beat()
            return
        self.heartbeat = Heartbeat(self.peers, self.register, self.supervisor, self._state)
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
