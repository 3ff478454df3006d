"""Read the status boards of other nodes by TCP, while MPI may be stuck.

[Note: servers] The first two ranks of each node are servers. A daemon thread, which calls no MPI, listens and sends the
slots of the node's status board to clients that know the job's secret. A rank queries them only when something may be
wrong: when its own program has ended and programs of other ranks have not, or when a watchdog has to report the status
of all ranks. Nodes that cannot be reached are left out.

[Note: strangers] Every machine of the network can connect. The secret is new for each job; it is distributed by MPI and
never sent over TCP. The server sends a new random number. The client sends another one with an HMAC of both. The reply
begins with an HMAC of both numbers and of its content. So a recorded message can be read, but it cannot be altered or
sent again. A client that does not finish in time is disconnected. If too many clients are connected, the oldest one is
disconnected. Only a few connections at a time are accepted from addresses that do not belong to the job, so that they
do not slow down the training.
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

#: Number of servers on each node: the second one replies if the first is stopped or holds the interpreter lock.
SERVING = 2
#: Seconds for one whole query, and for the queries to all nodes.
_ANSWER, _ALL_ANSWERS = 0.5, 1.0
#: Most queries at once, of a server and of a client.
_CLIENTS = 64
#: Most connections accepted at once from addresses that are not the job's, and the seconds to wait before the next.
_STRANGERS, _PAUSE = 8, 0.02
#: Seconds for which an encoded reply is reused: when something is wrong, all ranks ask at the same time.
_SAME = 0.05
_NONCE, _PROOF, _LENGTH = 32, 32, 4
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR
_LOOPBACK = "127."


@dataclass(frozen=True)
class StatusServer:
    """Describe a status server on another node: its world rank, its address, and the ranks whose status it sends."""

    rank: int
    address: tuple[str, int]
    ranks: frozenset[int]


class RemoteStatus:
    """Read the status slots of ranks on other nodes, and send them the slots of this node's ranks on request.

    A status slot is a dictionary that a rank writes about itself.

    The constructor is collective over the ranks of ``allgather``, a function that takes a picklable object and returns
    the list of all ranks' objects. ``host`` is the name of this rank's host.
    """

    def __init__(self, status_board: StatusBoard, host: str, allgather: Callable[[Any], list[Any]]) -> None:
        self._status_board = status_board
        self._servers: list[socket.socket] = []
        self._thread: threading.Thread | None = None
        self._closing = False
        self._remote_servers: dict[str, list[StatusServer]] = {}
        self._last: dict[int, Slot] = {}
        self._next, self._pause = 0.0, 0.5
        self._body, self._encoded_at = b"", float("-inf")
        hosts: list[tuple[int, str]] = allgather((status_board.rank, host))
        if status_board.rank in status_board.ranks[:SERVING]:
            self._servers = list(_listening())
        places = [server.getsockname() for server in self._servers]
        gathered = allgather((places, addresses() if places else [], secrets.token_bytes(32)))
        self._secret: bytes = gathered[0][2]
        self._known = {address for _, known, _ in gathered for address in known}
        for (rank, name), (places, *_) in zip(hosts, gathered, strict=True):
            if name != host:
                ranks = frozenset(other for other, theirs in hosts if theirs == name)
                self._remote_servers.setdefault(name, []).extend(
                    StatusServer(rank, tuple(place), ranks) for place in places
                )
        if self._servers:
            self._thread = threading.Thread(target=self._serve, name="mpizero-status-server", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no more threads: this rank serves nothing
                self._thread = None
                self.close()

    def read(self) -> dict[int, Slot]:
        """Query one server of each other node; return the status slots of that node's ranks, by rank. Not collective.

        The time ``beat`` in the slots is converted to this host's clock.
        """
        found: dict[int, Slot] = {}
        with contextlib.suppress(OSError):  # no files are left
            self._query_all(found)
        return found

    def _query_all(self, found: dict[int, Slot]) -> None:
        limit = monotonic() + _ALL_ANSWERS
        untried = {name: list(servers) for name, servers in self._remote_servers.items()}
        running: dict[str, TcpQuery] = {}
        answered: set[str] = set()
        with TcpQueries(_CLIENTS) as queries:
            while (now := monotonic()) < limit:
                running = {name: query for name, query in running.items() if not query.ended}
                untried = {name: servers for name, servers in untried.items() if servers and name not in answered}
                for name in [name for name in untried if name not in running][: _CLIENTS - len(running)]:
                    server = untried[name].pop(0)
                    if (connection := _connecting(server.address)) is not None:
                        running[name] = queries.start(connection, self._query(server, name, found, answered), _ANSWER)
                if any(not query.ended for query in running.values()):
                    queries.poll(limit - now)
                elif not any(untried.values()):
                    break

    def read_rarely(self) -> dict[int, Slot]:
        """Return the status slots of the last query; query again only after a pause, which grows with each query.

        Not collective.
        """
        if self._remote_servers and monotonic() > self._next:
            self._last = self.read()
            self._next, self._pause = monotonic() + self._pause, min(1.5 * self._pause, 30.0)
        return self._last

    def close(self) -> None:
        """Stop this rank's status server, if it has one. Not collective."""
        self._closing = True
        for server in self._servers:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # no client can connect from here on; wakes the thread
        if self._thread is not None:
            self._thread.join(1.0)
        for server in self._servers:
            server.close()

    # ------------------------------------------------------------------ the exchange

    def _query(self, server: StatusServer, name: str, found: dict[int, Slot], answered: set[str]) -> Script:
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

    def _serve_query(self) -> Script:
        challenge = secrets.token_bytes(_NONCE)
        yield challenge
        request = yield _NONCE + _PROOF
        nonces = challenge + request[:_NONCE]
        if hmac.compare_digest(request[_NONCE:], self._proof(b"ask", self._status_board.rank, nonces)):
            body = self._reply()
            proof = self._proof(b"answer", self._status_board.rank, nonces + body)
            yield proof + len(body).to_bytes(_LENGTH, "big") + body

    def _proof(self, what: bytes, rank: int, text: bytes) -> bytes:
        """Return the HMAC, by the job's secret, of ``what`` ("ask" or "answer"), the server's ``rank`` and ``text``."""
        return hmac.digest(self._secret, b"%s %d:" % (what, rank) + text, "sha256")

    def _reply(self) -> bytes:
        now = monotonic()
        if now - self._encoded_at > _SAME:
            slots = {rank: slot for rank, slot in self._status_board.read().items() if "beat" in slot}
            aged = {rank: slot | {"age": max(0.0, now - slot["beat"])} for rank, slot in slots.items()}
            self._body, self._encoded_at = encode(aged), now
        return self._body

    # ------------------------------------------------------------------ the server

    def _serve(self) -> None:
        # An error in a thread would end the job, and this one only helps to find faults.
        with contextlib.suppress(Exception), TcpQueries(_CLIENTS) as queries:
            for server in self._servers:
                queries.listen(server)
            while not self._closing:
                if sum(self._take(server, queries) for server in queries.poll(None)) >= _STRANGERS:
                    time.sleep(_PAUSE)

    def _take(self, server: socket.socket, queries: TcpQueries) -> int:
        """Accept the waiting connections, but only a few from addresses that do not belong to the job.

        Returns the number of waiting connections from such foreign addresses.
        """
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
                queries.start(connection, self._serve_query(), _ANSWER)
            else:
                connection.close()
        return strangers


def _connecting(address: tuple[str, int]) -> socket.socket | None:
    """Return a non-blocking socket that is being connected to ``address``; None if that fails at once."""
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
    """Yield a listening socket for each of :func:`job_addresses`; skip addresses where it cannot be opened."""
    with contextlib.suppress(OSError):
        for address in job_addresses():
            with contextlib.suppress(OSError):
                yield socket.create_server((address, 0), backlog=4 * _CLIENTS)


def job_addresses() -> list[str]:
    """Return the IPv4 addresses of this host to which its name resolves: launchers and MPI use them. Not collective.

    If the name resolves to no address of this host, or not within a second, all of :func:`addresses` are returned.
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
    """Return the IPv4 addresses of this host; loopback addresses only if there are no others. Not collective."""
    found = list(_addresses([name for _, name in socket.if_nameindex()]))
    return [address for address in found if not address.startswith(_LOOPBACK)] or found


def _addresses(names: Sequence[str]) -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
                yield socket.inet_ntoa(answer[20:24])
