"""The boards of other nodes, asked by TCP: they can be read while MPI is stuck, as this node's can.

[Note: asking] The first two ranks of each node listen, in a daemon thread that calls no MPI, and answer whoever knows
the job's secret with the slots of their board. A rank asks only when something may be wrong: when it has ended and the
others have not, or when a watchdog has to say where everybody stands. What cannot be reached is left out.

[Note: strangers] Anybody on the network can connect. The secret, made anew for each job and told by MPI, is never sent:
the listener sends a number that it has never used, the asker one of its own with an HMAC of both, and the answer begins
with an HMAC of both and of itself. So nothing that was overheard can be used again, or altered; it can be read. Whoever
does not finish in time is cut off, the oldest makes way where there are many, and of those who come from none of the
job's addresses so few are talked to that the training does not notice.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from mpizero.comm.status.received_slots import SLOT_LIMIT, parse_slots
from mpizero.comm.status.status_board import Slot, StatusBoard, encode
from mpizero.comm.status.tcp_queries import Script, TcpQueries, TcpQuery

#: Ranks of each node that answer: the second where the first is stopped or holds the interpreter lock.
ANSWERING = 2
#: Seconds for one answer, the whole of it, and for those of all nodes.
_ANSWER, _ALL_ANSWERS = 0.5, 1.0
#: Conversations of a listener at once, and of a rank that asks.
_CLIENTS = 64
#: Strangers that are talked to at once, and the seconds until the next.
_STRANGERS, _PAUSE = 8, 0.02
#: Seconds for which an answer is used again: when something is wrong, all ranks ask at once.
_SAME = 0.05
_NONCE, _PROOF, _LENGTH = 32, 32, 4
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR
_LOOPBACK = "127."


@dataclass(frozen=True)
class StatusServer:
    """Describe a server on another node: its world rank, its address, and the ranks whose status it sends."""

    rank: int
    address: tuple[str, int]
    ranks: frozenset[int]


class RemoteStatus:
    """Read the status of the ranks of other nodes, and serve that of this node's ranks to them.

    Collective over the ranks that ``allgather`` (picklable object -> list of every rank's) reaches.
    """

    def __init__(self, board: StatusBoard, host: str, allgather: Callable[[Any], list[Any]]) -> None:
        self._board = board
        self._servers: list[socket.socket] = []
        self._thread: threading.Thread | None = None
        self._closing = False
        self._remote_servers: dict[str, list[StatusServer]] = {}
        self._last: dict[int, Slot] = {}
        self._next, self._pause = 0.0, 0.5
        self._body, self._said = b"", float("-inf")
        hosts: list[tuple[int, str]] = allgather((board.rank, host))
        if len({name for _, name in hosts}) == 1:
            return
        if board.rank in board.ranks[:ANSWERING]:
            self._servers = list(_listening())
        places = [server.getsockname() for server in self._servers]
        told = allgather((places, addresses() if places else [], secrets.token_bytes(32)))
        self._secret: bytes = told[0][2]
        self._known = {address for _, known, _ in told for address in known}
        for (rank, name), (places, *_) in zip(hosts, told, strict=True):
            if name != host:
                ranks = frozenset(other for other, theirs in hosts if theirs == name)
                self._remote_servers.setdefault(name, []).extend(
                    StatusServer(rank, tuple(place), ranks) for place in places
                )
        if self._servers:
            self._thread = threading.Thread(target=self._serve, name="mpizero-elsewhere", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no more threads: this rank does not answer
                self._thread = None
                self.close()

    def read(self) -> dict[int, Slot]:
        """Ask one rank of each other node for the slots of all its ranks; times are this host's. Not collective."""
        found: dict[int, Slot] = {}
        with contextlib.suppress(OSError):  # no files are left
            self._ask_all(found)
        return found

    def _ask_all(self, found: dict[int, Slot]) -> None:
        limit = monotonic() + _ALL_ANSWERS
        untried = {name: list(servers) for name, servers in self._remote_servers.items()}
        asked: dict[str, TcpQuery] = {}
        answered: set[str] = set()
        with TcpQueries(_CLIENTS) as talks:
            while (now := monotonic()) < limit:
                asked = {name: talk for name, talk in asked.items() if not talk.ended}
                untried = {name: servers for name, servers in untried.items() if servers and name not in answered}
                for name in [name for name in untried if name not in asked][: _CLIENTS - len(asked)]:
                    server = untried[name].pop(0)
                    if (connection := _connecting(server.address)) is not None:
                        asked[name] = talks.start(connection, self._asking(server, name, found, answered), _ANSWER)
                if any(not talk.ended for talk in asked.values()):
                    talks.turn(limit - now)
                elif not any(untried.values()):
                    break

    def read_rarely(self) -> dict[int, Slot]:
        """Ask after ever longer pauses; between return what was known last. Not collective."""
        if self._remote_servers and monotonic() > self._next:
            self._last = self.read()
            self._next, self._pause = monotonic() + self._pause, min(1.5 * self._pause, 30.0)
        return self._last

    def close(self) -> None:
        """Answer no more. Not collective."""
        self._closing = True
        for server in self._servers:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # nobody can connect from here on; wakes the thread
        if self._thread is not None:
            self._thread.join(1.0)
        for server in self._servers:
            server.close()

    # ------------------------------------------------------------------ what is said

    def _asking(self, server: StatusServer, name: str, found: dict[int, Slot], answered: set[str]) -> Script:
        challenge = yield _NONCE
        nonce = secrets.token_bytes(_NONCE)
        yield nonce + self._proof(b"ask", server.rank, challenge + nonce)
        head = yield _PROOF + _LENGTH
        size = int.from_bytes(head[_PROOF:], "big")
        if size > SLOT_LIMIT * len(server.ranks):
            raise ValueError(f"an answer of {size} bytes")
        body = yield size
        if hmac.compare_digest(head[:_PROOF], self._proof(b"answer", server.rank, challenge + nonce + body)):
            found |= parse_slots(body, server.ranks, monotonic())
            answered.add(name)

    def _answering(self) -> Script:
        challenge = secrets.token_bytes(_NONCE)
        yield challenge
        said = yield _NONCE + _PROOF
        nonces = challenge + said[:_NONCE]
        if hmac.compare_digest(said[_NONCE:], self._proof(b"ask", self._board.rank, nonces)):
            body = self._answer()
            proof = self._proof(b"answer", self._board.rank, nonces + body)
            yield proof + len(body).to_bytes(_LENGTH, "big") + body

    def _proof(self, what: bytes, rank: int, text: bytes) -> bytes:
        """Return what only a rank of the job can know of ``text``, said by or to ``rank``."""
        return hmac.digest(self._secret, b"%s %d:" % (what, rank) + text, "sha256")

    def _answer(self) -> bytes:
        now = monotonic()
        if now - self._said > _SAME:
            slots = {rank: slot for rank, slot in self._board.read().items() if "beat" in slot}
            aged = {rank: slot | {"age": max(0.0, now - slot["beat"])} for rank, slot in slots.items()}
            self._body, self._said = encode(aged), now
        return self._body

    # ------------------------------------------------------------------ who listens

    def _serve(self) -> None:
        # What ends here is a help for diagnosis: an error in a thread would end the job.
        with contextlib.suppress(Exception), TcpQueries(_CLIENTS) as talks:
            for server in self._servers:
                talks.listen(server)
            while not self._closing:
                if sum(self._take(server, talks) for server in talks.turn(None)) >= _STRANGERS:
                    time.sleep(_PAUSE)

    def _take(self, server: socket.socket, talks: TcpQueries) -> int:
        """Take those who have connected, and few strangers; return how many strangers those were."""
        strangers = 0
        for _ in range(_CLIENTS):
            try:
                connection, (place, _) = server.accept()
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ECONNABORTED) and not self._closing:  # no files are left
                    time.sleep(_PAUSE)
                break
            strangers += place not in self._known
            if place in self._known or strangers <= _STRANGERS:
                talks.start(connection, self._answering(), _ANSWER)
            else:
                connection.close()
        return strangers


def _connecting(address: tuple[str, int]) -> socket.socket | None:
    """Return a socket that is about to be connected; None where that fails at once."""
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return None
    connection.setblocking(False)
    if connection.connect_ex(address) in (0, errno.EINPROGRESS):
        return connection
    connection.close()
    return None


def _listening() -> Iterator[socket.socket]:
    """Open a socket at each address of the job's network; none where that fails."""
    with contextlib.suppress(OSError):
        for address in job_addresses():
            with contextlib.suppress(OSError):
                yield socket.create_server((address, 0), backlog=4 * _CLIENTS)


def job_addresses() -> list[str]:
    """Return those addresses of this host that its name stands for, by which launchers and MPI find it.

    Not collective. All of :func:`addresses` where the name says nothing of them, or nobody tells in a second.
    """
    own, named = addresses(), []

    def resolve() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            named.extend(socket.gethostbyname_ex(socket.gethostname())[2])

    asking = threading.Thread(target=resolve, name="mpizero-resolve", daemon=True)
    with contextlib.suppress(RuntimeError):  # no more threads
        asking.start()
        asking.join(1.0)
    return [address for address in own if address in named] or own


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
