"""Run many short TCP queries concurrently in one thread. Each query has one deadline for its whole duration."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Generator
from time import monotonic
from typing import Self

#: Generator that plays one side of a query. It yields bytes, to send them, or an integer, to receive that many bytes;
#: received bytes are passed to it by ``send()``. It returns or raises when the query is over.
Script = Generator[bytes | int, bytes, None]

_PIECE = 1 << 16


class TcpQuery:
    """Hold a connection, and run a script that sends and receives on it, until ``ended`` is true.

    The script is a generator, see :data:`Script`. The query has to end within ``seconds``.
    """

    def __init__(self, connection: socket.socket, script: Script, seconds: float) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.deadline = monotonic() + seconds
        self.ended = False
        self._script = script
        self._out = memoryview(b"")
        self._in, self._wanted = bytearray(), 0
        self._started = False

    @property
    def events(self) -> int:
        """Event of the connection that the query waits for: ``selectors.EVENT_READ`` or ``EVENT_WRITE``."""
        return selectors.EVENT_WRITE if self._out else selectors.EVENT_READ

    def advance(self) -> None:
        """Send and receive as much as possible without waiting."""
        try:
            while True:
                if self._out:
                    self._out = self._out[self.connection.send(self._out) :]
                elif len(self._in) < self._wanted:
                    got = self.connection.recv(min(_PIECE, self._wanted - len(self._in)))
                    if not got:
                        self.ended = True
                        return
                    self._in += got
                else:
                    self._next()
        except BlockingIOError:
            pass
        except Exception:  # bad input of a stranger ends this query, and neither the thread nor the training
            self.ended = True

    def _next(self) -> None:
        received = bytes(self._in)
        self._in, self._wanted = bytearray(), 0
        step = self._script.send(received) if self._started else next(self._script)
        self._started = True
        if isinstance(step, int):
            self._wanted = step
        else:
            self._out = memoryview(step)


class TcpQueries:
    """Run at most ``limit`` queries concurrently; a new query beyond the limit ends the oldest one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._selector = selectors.DefaultSelector()
        self._live: list[TcpQuery] = []

    def listen(self, server: socket.socket) -> None:
        """Add a listening socket; :meth:`poll` returns it when a client connects."""
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def start(self, connection: socket.socket, script: Script, seconds: float) -> TcpQuery:
        """Start to run ``script`` on ``connection``; return the query, which ends after ``seconds`` at the latest."""
        query = TcpQuery(connection, script, seconds)
        if len(self._live) >= self._limit:
            self._end(self._live[0])
        self._live.append(query)
        self._selector.register(connection, query.events, query)
        self._advance(query)
        return query

    def poll(self, seconds: float | None) -> list[socket.socket]:
        """Wait for events of the sockets and handle them; return the listening sockets with new connections.

        Waits ``seconds`` at most (None: no limit), and not longer than until the next query must end.
        """
        now = monotonic()
        limits = [query.deadline - now for query in self._live] + ([] if seconds is None else [seconds])
        servers = []
        for key, _ in self._selector.select(max(0.0, min(limits)) if limits else None):
            if key.data is None:
                assert isinstance(key.fileobj, socket.socket)
                servers.append(key.fileobj)
            elif not key.data.ended:
                self._advance(key.data)
        now = monotonic()
        for query in [query for query in self._live if query.deadline <= now]:
            self._end(query)
        return servers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for query in tuple(self._live):
            self._end(query)
        self._selector.close()

    def _advance(self, query: TcpQuery) -> None:
        query.advance()
        if query.ended:
            self._end(query)
        else:
            self._selector.modify(query.connection, query.events, query)

    def _end(self, query: TcpQuery) -> None:
        query.ended = True
        self._live.remove(query)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(query.connection)
        query.connection.close()
