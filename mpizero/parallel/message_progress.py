"""Make messages in flight progress while ranks compute."""

from __future__ import annotations

from collections.abc import Callable


class MessageProgress:
    """Poll all messages in flight between layers, and wait for those that other ranks of the node wait for.

    MPI moves most messages only while the rank is inside an MPI call. Every object that leaves messages in flight
    registers here by name: the parameter store ("parameters"), the gradient buffers ("rows", "waves"), the pipeline
    ("pipeline"). Runners call :meth:`poll` between blocks, and the library's layers between the layers they are made
    of. The allocator calls :meth:`finish` before every collective of the node: a rank that blocks there must not keep
    others waiting ([Note: nobody waits for a rank that waits] in ``parallel/parameters/publication.py``).
    """

    def __init__(self) -> None:
        self._polls: dict[str, Callable[[], object]] = {}
        self._finishes: dict[str, Callable[[], object]] = {}

    def register(self, name: str, poll: Callable[[], object], finish: Callable[[], object] | None = None) -> None:
        """Register functions that poll and finish some messages; they replace those of the same name. Not collective.

        Parameters
        ----------
        name : str
            Name of the object that has messages in flight.
        poll : callable
            Lets its messages progress; not collective, and cheap if there are none.
        finish : callable, optional
            Waits for those of its messages that other ranks of the node wait for.
        """
        self._polls[name] = poll
        if finish is not None:
            self._finishes[name] = finish

    def poll(self) -> None:
        """Make messages in flight progress. Not collective."""
        for poll in self._polls.values():
            poll()

    def finish(self) -> None:
        """Wait for messages that other ranks of the node wait for. Collective over the data group."""
        for finish in self._finishes.values():
            finish()

    def close(self) -> None:
        """Finish all messages and remove all registrations. Collective over the data group."""
        self.finish()
        self._polls.clear()
        self._finishes.clear()
