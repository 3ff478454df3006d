"""Make nonblocking MPI messages progress while ranks compute."""

from __future__ import annotations

from collections.abc import Callable


class MessageProgress:
    """Call MPI regularly for all messages that this rank has in flight, so that they progress while it computes.

    MPI moves most messages only while the rank is inside an MPI call. Every object that leaves messages in flight
    registers its functions under a name: the parameter store ("parameters"), the gradient buffers ("rows", "waves"),
    the pipeline ("pipeline"). Runners call :meth:`poll` between two blocks of the model, and layers that consist of
    other layers call it between two of these. The allocator calls :meth:`finish` before every collective of the node,
    so that no other rank waits for messages of a rank that is blocked there ([Note: nobody waits for a rank that waits]
    in ``parallel/parameters/publication.py``).
    """

    def __init__(self) -> None:
        self._polls: dict[str, Callable[[], object]] = {}
        self._finishes: dict[str, Callable[[], object]] = {}

    def register(self, name: str, poll: Callable[[], object], finish: Callable[[], object] | None = None) -> None:
        """Register an object's functions, and drop those that were registered under the same name. Not collective.

        Parameters
        ----------
        name : str
            Name of the object that has messages in flight.
        poll : callable
            Lets the object's messages progress; not collective, and cheap if there are none.
        finish : callable, optional
            Waits for the object's messages that other ranks of the node depend on.
        """
        self._polls[name] = poll
        if finish is not None:
            self._finishes[name] = finish

    def poll(self) -> None:
        """Call all registered ``poll`` functions: make the messages in flight progress. Not collective."""
        for poll in self._polls.values():
            poll()

    def finish(self) -> None:
        """Call all registered ``finish`` functions: wait for the messages that other ranks of the node depend on.

        Collective over the data group.
        """
        for finish in self._finishes.values():
            finish()

    def close(self) -> None:
        """Call :meth:`finish` and remove all registered functions. Collective over the data group."""
        self.finish()
        self._polls.clear()
        self._finishes.clear()
