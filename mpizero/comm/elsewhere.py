"""The boards of other nodes, asked by TCP: they can be read while MPI is stuck, as this node's can.

[Note: asking] The first two ranks of each node listen, in a daemon thread that calls no MPI, and answer whoever knows
the job's secret with the slots of their board. A rank asks only when something may be wrong: when it has ended and the
others have not, or when a watchdog has to say where everybody stands. What cannot be reached is left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

from mpizero.comm.board import Board, Slot

#: Ranks of each node that answer: the second where the first is stopped or holds the interpreter lock.
ANSWERING = 2
#: Seconds for one answer, and for those of all nodes.
_ANSWER, _ALL_ANSWERS = 0.3, 1.0
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR
_LOOPBACK = "127."


class Elsewhere:
    """What this rank can learn of other nodes, and what it tells them.

    Collective over the ranks that ``allgather`` (picklable object -> list of every rank's) reaches.
    """

    def __init__(self, board: Board, host: str, allgather: Callable[[Any], list[Any]]) -> None:
        self._board = board
        self._server: socket.socket | None = None
        self._doors: dict[str, list[tuple[str, int]]] = {}
        self._last: dict[int, Slot] = {}
        self._next, self._pause = 0.0, 0.5
        hosts = allgather(host)
        if len(set(hosts)) == 1:
            return
        if board.rank in board.ranks[:ANSWERING]:
            with contextlib.suppress(OSError):
                self._server = socket.create_server(("", 0))
        port = self._server.getsockname()[1] if self._server else 0
        told = allgather((port, addresses() if port else [], secrets.token_hex(16)))
        self._secret = str(told[0][2])
        for name, (port, places, _) in zip(hosts, told, strict=True):
            if name != host and port:
                self._doors.setdefault(name, []).extend((place, port) for place in places)
        if self._server:
            threading.Thread(target=self._answer, name="mpizero-elsewhere", daemon=True).start()

    def read(self) -> dict[int, Slot]:
        """Ask one rank of each other node for the slots of all its ranks; times are this host's. Not collective."""
        found: dict[int, Slot] = {}
        limit = monotonic() + _ALL_ANSWERS
        for doors in self._doors.values():
            for door in doors:
                if monotonic() > limit:
                    return found
                if slots := self._ask(door):
                    found |= slots
                    break
        return found

    def read_now_and_then(self) -> dict[int, Slot]:
        """Ask after ever longer pauses; between return what was known last. Not collective."""
        if self._doors and monotonic() > self._next:
            self._last = self.read()
            self._next, self._pause = monotonic() + self._pause, min(1.5 * self._pause, 30.0)
        return self._last

    def close(self) -> None:
        """Answer no more. Not collective."""
        if self._server:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread, which waits in accept
            self._server.close()

    def _ask(self, door: tuple[str, int]) -> dict[int, Slot]:
        with contextlib.suppress(OSError, ValueError), socket.create_connection(door, _ANSWER) as connection:
            connection.sendall(self._secret.encode())
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
            now = monotonic()
            return {int(rank): slot | {"beat": now - slot["age"]} for rank, slot in json.loads(answer).items()}
        return {}

    def _answer(self) -> None:
        assert self._server is not None
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            with contextlib.suppress(OSError), connection:
                connection.settimeout(_ANSWER)
                if hmac.compare_digest(connection.recv(len(self._secret)), self._secret.encode()):
                    now = monotonic()
                    slots = {rank: slot | {"age": now - slot["beat"]} for rank, slot in self._board.read().items()}
                    connection.sendall(json.dumps(slots).encode())


def addresses() -> list[str]:
    """Return the IPv4 addresses of this host, that of the loopback only where there is no other. Not collective."""
    found = list(_addresses([name for _, name in socket.if_nameindex()]))
    return [address for address in found if not address.startswith(_LOOPBACK)] or found


def _addresses(names: Sequence[str]) -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for name in names:
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(asked.fileno(), _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
                yield socket.inet_ntoa(answer[20:24])
