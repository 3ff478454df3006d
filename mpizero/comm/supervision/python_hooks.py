"""Replace the functions that Python calls for errors and at the end of a program, and restore them.

[Note: earlier hooks] The replaced functions are still called for errors that do not concern this package. If the user's
program has set its own ``sys.excepthook``, that is called before the job is ended. If other code has replaced one of
our hooks meanwhile, :meth:`PythonHooks.restore` leaves the function of that code in place, and our hook then only calls
the function that it has replaced. So each :class:`PythonHooks` is used once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol

_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep


class HookListener(Protocol):
    """Receive the events that :class:`PythonHooks` catches."""

    def on_error(self, error: BaseException, trace: TracebackType | None, origin: str) -> None:
        """Handle an uncaught error; ``origin`` names the thread or the exit handler, "" for the main program."""

    def on_exit_request(self, status: Any) -> None:
        """Handle a call of ``sys.exit`` with the argument ``status``."""

    def on_exit(self) -> None:
        """Handle the end of the program."""

    def has_other_ranks(self) -> bool:
        """Tell whether there are other ranks; then an error in a thread or an exit handler ends the job too."""


class PythonHooks:
    """Replace the error hooks of ``sys`` and ``threading``, and ``sys.exit``, and register a function with ``atexit``.

    In a forked child of this process, the hooks only call the functions that they have replaced.
    """

    def __init__(self, listener: HookListener) -> None:
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
        """Restore the replaced functions, and stop calling the listener; a second call does nothing."""
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
        """True while the listener receives events in this process."""
        return self._live and self._process == os.getpid()

    def show(self, error: BaseException, trace: TracebackType | None, *, hosts_only: bool = False) -> None:
        """Show an error by the ``sys.excepthook`` that was replaced.

        With ``hosts_only`` do this only if the user's program has set that function, not if it is Python's own.
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
        """Pass an error of a thread to the listener if there are other ranks and its traceback contains this package.

        Otherwise show the error by ``threading.__excepthook__``.
        """
        error = args.exc_value
        ours = error is not None and args.exc_type is not SystemExit and _passes_through_here(args.exc_traceback)
        if error is not None and ours and self.live and self._listener.has_other_ranks():
            name = args.thread.name if args.thread else "?"
            self._listener.on_error(error, args.exc_traceback, f"in thread {name!r}")
        else:
            threading.__excepthook__(args)

    def _on_unraisable(self, args: Any) -> None:
        """Pass an error of a function registered with atexit to the listener, if there are other ranks.

        All other errors are passed to the ``sys.unraisablehook`` that was replaced.
        """
        of_the_end = "atexit" in (args.err_msg or "") and args.exc_value is not None
        if of_the_end and self.live and self._listener.has_other_ranks():
            self._listener.on_error(args.exc_value, args.exc_traceback, "while leaving (atexit)")
        else:
            self._unraisablehook(args)

    def _on_exit(self, status: Any = None, /) -> NoReturn:
        """Replace ``sys.exit``: tell the listener the status, then exit.

        This is needed because no hook receives SystemExit, and functions registered with atexit do not get the status.
        """
        if self.live:
            self._listener.on_exit_request(status)
        self._exit(status)

    def _at_end(self) -> None:
        if self.live:
            self._listener.on_exit()


def _passes_through_here(trace: TracebackType | None) -> bool:
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            return True
        trace = trace.tb_next
    return False
