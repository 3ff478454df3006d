"""Run the periodic checks of a process in one thread, which calls no MPI.

[Note: stopped time] The time in which a process is stopped (SIGSTOP, ``scontrol suspend``, a paused machine) must not
count as waiting time, though clocks go on. Ranks are also stopped and resumed at slightly different moments. If the
supervisor's thread wakes far too late, the process was stopped, and :meth:`Supervisor.since` does not count that time.
If only one rank is stopped, the threads of the other ranks notice it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

from mpizero.comm.failure_report import write_stderr

#: Seconds between two checks, unless a listener asks for shorter ones.
TICK = 0.25
#: Name of the thread.
HEARTBEAT = "mpizero-heartbeat"
#: If more than so many ticks, and so many seconds, pass between two checks, the process was stopped.
_LATE_TICKS, _LATE = 3, 0.5
#: Most stops that are kept separately; older ones are merged.
_STOPS = 32


#: A function that is called with ``time.monotonic()``. It returns for how many seconds it need not be called again, or
#: None if it wants to be called at every tick.
Listener = Callable[[float], float | None]


class Supervisor:
    """Call listeners periodically with ``time.monotonic()``, in a daemon thread that ends with the last listener.

    A listener that has nothing to look at for a while says so by its result, and costs nothing until then: a process
    may have a watchdog for each of hundreds of ranks that are its threads.

    If a listener raises, a warning is printed once, and the listener is still called periodically: a failing check must
    not end the run.
    """

    def __init__(self) -> None:
        self._listeners: dict[Listener, float] = {}
        self._next: dict[Listener, float] = {}
        self._changing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._stops: list[tuple[float, float]] = []
        self._warned = False

    @property
    def tick(self) -> float:
        """Seconds between two calls of each listener that has not asked for a longer pause."""
        return min(tuple(self._listeners.values()), default=TICK)

    @property
    def is_running(self) -> bool:
        """True while the thread runs; False also if it could not start, because of the user's limit of threads."""
        return self._thread is not None and self._thread.is_alive()

    def add(self, listener: Listener, tick: float = TICK) -> None:
        """Call ``listener(now)`` from now on, in the supervisor's thread: at least every ``tick`` seconds.

        After a call that returned a number, that many seconds pass before the next one.
        """
        with self._changing:
            self._listeners[listener] = tick
            self._next.pop(listener, None)
            if not self.is_running:
                self._stop = threading.Event()
                thread = threading.Thread(target=self._run, args=(self._stop,), name=HEARTBEAT, daemon=True)
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError as error:  # this user may have no more threads
                    self.warn_once(error)

    def remove(self, listener: Listener) -> None:
        """Stop calling ``listener``; a second call does nothing."""
        with self._changing:
            self._listeners.pop(listener, None)
            self._next.pop(listener, None)
            thread, last = self._thread, not self._listeners
            if last:
                self._thread = None
                self._stop.set()
        if last and thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(1.0)

    def stop(self) -> None:
        """Remove all listeners, which ends the thread."""
        for listener in tuple(self._listeners):
            self.remove(listener)

    def since(self, moment: float, now: float) -> float:
        """Return the seconds from ``moment`` to ``now``, without the time in which the process was stopped.

        Both are times of ``time.monotonic()``.
        """
        stopped = sum(min(seconds, end - moment) for end, seconds in tuple(self._stops) if end > moment)
        return max(0.0, now - moment - stopped)

    def warn_once(self, error: BaseException) -> None:
        """Print a warning that part of the supervision does not work on this rank; a second call does nothing."""
        if not self._warned:
            self._warned = True
            write_stderr(f"mpizero: stuck or missing ranks may not be noticed here: {type(error).__name__}: {error}\n")

    def _run(self, stop: threading.Event) -> None:
        last = monotonic()
        while not stop.wait(self.tick):
            now = monotonic()
            self._note(last, now)
            last = now
            for listener in [one for one in tuple(self._listeners) if self._next.get(one, now) <= now]:
                try:
                    pause = listener(now) or 0.0
                    with self._changing:
                        if listener in self._listeners:  # it may have been removed meanwhile
                            self._next[listener] = now + pause
                except Exception as error:
                    self.warn_once(error)

    def _note(self, last: float, now: float) -> None:
        late = max(_LATE_TICKS * self.tick, _LATE)
        if now - last > late:
            stops = [*self._stops, (now, now - last - late)]
            if len(stops) > _STOPS:  # the two oldest become one
                (_, first), (end, second), *rest = stops
                stops = [(end, first + second), *rest]
            self._stops = stops
