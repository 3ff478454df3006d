"""Many short conversations over TCP in one thread: none waits for another, each has one deadline for all of it."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Generator
from time import monotonic
from types import TracebackType
from typing import Self

#: What one end does: it yields bytes to send, or how many bytes it wants, which it is given; it returns or raises where
#: the conversation is over.
Script = Generator[bytes | int, bytes, None]

_PIECE = 1 << 16


class TcpQuery:
    """One end of a connection that follows a script; until it has ``ended``."""

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
        """The events of a selector that it waits for: to read or to write."""
        return selectors.EVENT_WRITE if self._out else selectors.EVENT_READ

    def advance(self) -> None:
        """Go on as far as it can without waiting. Not collective."""
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
        except Exception:  # whatever a stranger can cause: it ends their conversation, and neither thread nor training
            self.ended = True

    def _next(self) -> None:
        said = bytes(self._in)
        self._in, self._wanted = bytearray(), 0
        step = self._script.send(said) if self._started else next(self._script)
        self._started = True
        if isinstance(step, int):
            self._wanted = step
        else:
            self._out = memoryview(step)


class TcpQueries:
    """Conversations side by side, at most ``limit`` of them: then the oldest gives way to a new one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._selector = selectors.DefaultSelector()
        self._live: list[TcpQuery] = []

    def listen(self, server: socket.socket) -> None:
        """Let :meth:`turn` return this socket when somebody connects. Not collective."""
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def start(self, connection: socket.socket, script: Script, seconds: float) -> TcpQuery:
        """Begin a conversation that ends within ``seconds``. Not collective."""
        talk = TcpQuery(connection, script, seconds)
        if len(self._live) >= self._limit:
            self._end(self._live[0])
        self._live.append(talk)
        self._selector.register(connection, talk.events, talk)
        self._advance(talk)
        return talk

    def turn(self, seconds: float | None) -> list[socket.socket]:
        """Wait until something happens, for ``seconds`` at most; return the servers that somebody has connected to.

        Not collective.
        """
        now = monotonic()
        limits = [talk.deadline - now for talk in self._live] + ([] if seconds is None else [seconds])
        servers = []
        for key, _ in self._selector.select(max(0.0, min(limits)) if limits else None):
            if key.data is None:
                assert isinstance(key.fileobj, socket.socket)
                servers.append(key.fileobj)
            elif not key.data.ended:
                self._advance(key.data)
        now = monotonic()
        for talk in [talk for talk in self._live if talk.deadline <= now]:
            self._end(talk)
        return servers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for talk in tuple(self._live):
            self._end(talk)
        self._selector.close()

    def _advance(self, talk: TcpQuery) -> None:
        talk.advance()
        if talk.ended:
            self._end(talk)
        else:
            self._selector.modify(talk.connection, talk.events, talk)

    def _end(self, talk: TcpQuery) -> None:
        talk.ended = True
        self._live.remove(talk)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(talk.connection)
        talk.connection.close()
