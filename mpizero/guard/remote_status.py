"""Read and write the status of all ranks with which this process shares a communicator, while MPI may be stuck.

On a node, ranks share a status table. Between nodes, :class:`RemoteStatus` sends the records of a table by TCP. A
:class:`StatusGroup` holds the status table and the TCP connections of the ranks of one communicator, and
:class:`StatusGroups` all status groups of the process. Records that arrive by TCP are checked entry by entry
(:func:`parse_records`). :class:`TcpQueries` runs many short queries concurrently in one thread; each query has one
deadline for its whole duration.

[Note: status groups] When ranks make an mpizero communicator from one of the user's, they also open a status group: a
status table on each node, and status servers between nodes. A status group is closed with the last communicator of the
same ranks. Opening and closing a group are collective, so all ranks of a group know at any moment whether it exists.
Communicators that are split off from an mpizero communicator open no group. A process can belong to several status
groups, and to none if it has no communicator.

[Note: servers] The first two ranks of each node are servers. A daemon thread, which calls no MPI, listens and sends the
records of the node's status table to clients that know the job's secret. A rank queries servers of other nodes only
when something may be wrong: when its own program has ended and programs of other ranks have not, when a watchdog has to
report the status of all ranks, or when no bytes of messages have moved for some seconds (:class:`.LinkWatch`, which
also asks once at the start). Nodes that cannot be reached are left out.

[Note: strangers] Every machine of the network can connect to a status server. Each job has a new secret, which is
distributed by MPI and never sent over TCP. On each connection the server sends a new random number. The client sends
another random number with an HMAC of both. The server's reply begins with an HMAC of both numbers and of its content.
So an eavesdropper can read a message, but cannot alter it or send it again. A client that does not finish in time is
disconnected. If too many clients are connected, the oldest one is disconnected. Only a few connections at a time are
accepted from addresses that do not belong to the job, so that such connections do not slow down the training.

[Note: bytes of messages] The kernel counts the bytes that the other end of a TCP connection has acknowledged and those
that have arrived, so a connection tells whether its link works even while a rank is inside MPI. Counted are only the
connections of this process with other hosts of the job: traffic of other programs, file servers included, keeps no
stuck job alive. Queries of status are not counted, because ranks send them when a job is stuck: they would keep it
alive. Of messages that take no TCP connection of the process (InfiniBand, UDP) nothing is known.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mpizero._util.checks import strict_json
from mpizero.guard.call_trace import Transfer
from mpizero.guard.status import StartupTable, StatusRecord, StatusTable, encode, is_working, open_status_table

T = TypeVar("T")
#: Seconds for which a rank that ends waits for ranks that have not started yet: one of them may need it.
_STARTING = 3.0
#: Name of the messages with other hosts among the transfers of a status record, and the fewest seconds between two
#: counts of their bytes, which take 20 microseconds for each connection of the process.
MESSAGES, _COUNT = "messages by TCP", 1.0


@dataclass(frozen=True, eq=False)
class StatusGroup:
    """Hold the status table and the TCP connections by which the ranks of a group read each other's status.

    Attributes
    ----------
    members : tuple of int
        World ranks of the group, in ascending order.
    control : MPI.Intracomm
        A communicator of these ranks, used only by the supervision of the process.
    status_table : StatusTable
        The status table of this rank's node.
    remote_status : RemoteStatus or None
        Reads the status tables of other nodes; None if there are no other nodes, or if it could not be opened.
    """

    members: tuple[int, ...]
    control: Any
    status_table: StatusTable
    remote_status: RemoteStatus | None

    def close(self) -> None:
        """Stop this rank's status server (its replies by TCP), and close the status table. Not collective."""
        if self.remote_status is not None:
            self.remote_status.close()
        self.status_table.close()


class StatusGroups:
    """Hold the status groups of this process, and read and write the status tables of all these groups.

    A status group is ranks that have made a communicator together and read each other's status: on a node from a status
    table in shared memory, between nodes by TCP. A status record is a dictionary that a rank writes about itself;
    ``_FORMS`` lists its keys.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        #: The groups, smallest first, which is the order in which :meth:`become_reporter` asks their status tables.
        self.groups: list[StatusGroup] = []
        #: Status of all ranks of this node, with a common communicator or without; None if it is not open.
        self.startup_table: StartupTable | None = None
        self._messages = Transfer(MESSAGES)
        self._message_bytes: dict[tuple[Any, Any], int] = {}
        self._counted = float("-inf")

    # ------------------------------------------------------------------ groups

    def has_group(self, members: Sequence[int]) -> bool:
        """Tell whether there is a status group of exactly these world ranks; all of these ranks get the same result.

        A status group is ranks that read each other's status.

        Not collective.
        """
        return tuple(sorted(members)) in (group.members for group in self.groups)

    def add_group(
        self,
        comm: Any,
        members: Sequence[int],
        host: str,
        warn_once: Callable[[BaseException], None],
        barrier: Callable[[Any], None],
    ) -> None:
        """Open a status group for the ranks of ``comm``, an mpi4py communicator. Collective over ``comm``.

        The ranks of a status group read each other's status, on a node by shared memory, between nodes by TCP.
        ``members`` are the world ranks of ``comm``, and ``host`` is the name of this rank's host. A rank on which the
        status table or the status server cannot be opened calls ``warn_once`` with the error and goes on without it;
        the other ranks do not wait for this rank. ``barrier`` is :meth:`.Waiting.barrier`.
        """
        ranks = tuple(sorted(members))
        barrier(comm)
        control = comm.Split(0, self.rank)

        def ask(value: Any) -> list[Any]:
            barrier(control)
            return list(control.allgather(value))

        hosts = dict(zip(ranks, ask(host), strict=True))
        status_table = make_on_all(ask, lambda gather: open_status_table(self.rank, hosts, gather), warn_once)
        status_table = status_table or StatusTable((self.rank,), self.rank, None)

        def opened(gather: Callable[[Any], list[Any]]) -> RemoteStatus:
            return RemoteStatus(status_table, host, gather)

        remote_status = make_on_all(ask, opened, warn_once) if len(set(hosts.values())) > 1 else None
        self.groups = sorted([*self.groups, StatusGroup(ranks, control, status_table, remote_status)], key=_size)

    def remove_group(self, members: Sequence[int], *, free: bool) -> None:
        """Close the status group of the world ranks ``members``, which read each other's status, if there is one.

        With ``free`` the group's MPI communicator is freed too; the call is then collective over ``members``, and MPI
        must not have been finalized.
        """
        ranks = tuple(sorted(members))
        for group in [group for group in self.groups if group.members == ranks]:
            self.groups = [other for other in self.groups if other is not group]
            group.close()
            if free:
                group.control.Free()

    @property
    def ranks(self) -> tuple[int, ...]:
        """World ranks on this node whose status records can be read from a status table (in shared memory)."""
        return tuple(sorted({rank for group in self.groups for rank in group.status_table.ranks}))

    @property
    def hosts(self) -> dict[int, str]:
        """Names of the other hosts by world rank, for the ranks that share a communicator with this one."""
        return {rank: host for remote in self.remote for host, ranks in remote.hosts.items() for rank in ranks}

    @property
    def remote(self) -> list[RemoteStatus]:
        """The connections to other nodes, of the status group with the fewest ranks first.

        A status group is ranks that have made a communicator together and read each other's status.
        """
        return [group.remote_status for group in self.groups if group.remote_status is not None]

    def count_messages(self, now: float) -> Transfer:
        """Return the count of bytes of this rank's messages with other hosts; renew it if it is older than a second.

        Not collective. ``now`` is the present ``time.monotonic()``.
        """
        if now - self._counted >= _COUNT:
            before, self._counted = self._message_bytes, now
            self._message_bytes = {
                ends: count for remote in self.remote for ends, count in remote.message_bytes().items()
            }
            if moved := sum(count - before.get(ends, 0) for ends, count in self._message_bytes.items()):
                self._messages.advance(moved)
        return self._messages

    @property
    def leads(self) -> bool:
        """True if the lowest rank of every status group of this process is on this node.

        A status group is ranks that have made a communicator together and read each other's status.
        """
        return all(group.members[0] in group.status_table.ranks for group in self.groups)

    # ------------------------------------------------------------------ status tables

    def write(self, record: StatusRecord) -> None:
        """Write the status of this rank to the startup table and to all status tables. Not collective.

        Other ranks of the node can read these tables. One thread at a time may call this method.
        """
        if self.startup_table is not None:
            self.startup_table.write(record)
        for group in self.groups:
            group.status_table.write(record)

    def read(self) -> dict[int, StatusRecord]:
        """Return the last status record of each rank of this node that has written one, by rank. Not collective."""
        return {rank: record for group in self.groups for rank, record in group.status_table.read().items()}

    def read_startup_table(self) -> dict[int, StatusRecord]:
        """Return the last status records of other ranks on the startup table, by rank. Not collective.

        The startup table is a file for ranks of the node that have made no communicator of all ranks yet.
        """
        return {} if self.startup_table is None else self.startup_table.read()

    def others_work(self, waited: float) -> bool:
        """Tell whether another rank on the startup table of this node works, or may still be starting. Not collective.

        The startup table is a file for ranks of the node that have made no communicator of all ranks yet.

        ``waited`` is the number of seconds since this rank has reached the end of its program. Ranks that have written
        nothing yet may be starting during the first ``_STARTING`` seconds.
        """
        if self.startup_table is None:
            return False
        starting = waited < _STARTING and not self.startup_table.all_started()
        return starting or any(map(is_working, self.startup_table.read().values()))

    def read_one(self, rank: int) -> StatusRecord | None:
        """Return the last status record of a rank in :attr:`ranks`; None if it has written none. Not collective."""
        return next((g.status_table.read_one(rank) for g in self.groups if rank in g.status_table.ranks), None)

    def read_all(self, *, rarely: bool = False) -> dict[int, StatusRecord]:
        """Return the status records of all ranks that can be read, also of ranks on other nodes, by rank.

        Not collective. With ``rarely`` other nodes are queried only after a pause, which grows with every query; during
        the pause the last known records of these nodes are returned.
        """
        records: dict[int, StatusRecord] = {}
        for group in self.groups:
            if group.remote_status is not None and set(group.members).difference(group.status_table.ranks):
                records |= group.remote_status.read_rarely() if rarely else group.remote_status.read()
        return records | self.read()

    def request_records(self, key: str) -> None:
        """Ask the ranks of this node to write their last calls on a communicator to the status table. Not collective.

        ``key`` identifies the communicator, see :class:`.CommunicatorEntry`.
        """
        for group in self.groups:
            group.status_table.request_records(key)

    def requested_keys(self) -> list[str]:
        """Return, sorted, the keys of the communicators whose records ranks of this node have requested last.

        Not collective. They are, for each status group (ranks that read each other's status), the key last passed to
        :meth:`request_records`.
        """
        return sorted({key for group in self.groups if (key := group.status_table.requested_key())})

    def become_reporter(self) -> bool:
        """Return True on the first rank of the node that calls this, else False. Not collective.

        The rank that gets True reports why the job ends.
        """
        if not self.groups and self.startup_table is not None:
            return self.startup_table.become_reporter()
        return all(group.status_table.become_reporter() for group in self.groups)

    def close(self) -> None:
        """Close all status groups, and the startup table: no status is read or written any more. Not collective."""
        for group in self.groups:
            group.close()
        self.close_startup_table()

    def close_startup_table(self, *, all_joined: bool = False) -> None:
        """Close the startup table; with ``all_joined`` also remove its file. Not collective.

        The table shows the status of the node's ranks until they have a communicator. ``all_joined`` is true if no rank
        needs the table any more: a communicator of all ranks exists, or the job ends.
        """
        startup_table, self.startup_table = self.startup_table, None
        if startup_table is not None:
            startup_table.close(remove=all_joined)


def _size(group: StatusGroup) -> tuple[int, tuple[int, ...]]:
    return len(group.members), group.members


def make_on_all(
    allgather: Callable[[Any], list[Any]],
    make: Callable[[Callable[[Any], list[Any]]], T],
    warn_once: Callable[[BaseException], None],
) -> T | None:
    """Return the result of ``make`` on each rank; where ``make`` raises, call ``warn_once(error)`` and return None.

    Collective over the ranks of ``allgather``, which takes a picklable object and returns the list of all ranks'
    objects. ``make`` is passed a function like ``allgather``, which it may call. A rank whose ``make`` has returned or
    raised takes part in the remaining calls of other ranks, with None, so no rank waits for it.
    """
    result: T | None = None
    alone = False

    def ask(value: Any) -> list[Any]:
        nonlocal alone
        gathered = allgather((True, value))
        alone |= not all(busy for busy, _ in gathered)
        return [value for _, value in gathered]

    try:
        result = make(ask)
    except Exception as error:
        if not alone:  # else the cause is on another rank, which warns
            warn_once(error)
    while any(busy for busy, _ in allgather((False, None))):
        pass
    return result


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
_OWN_FILES = "/proc/self/fd"
#: Where Linux's ``struct tcp_info`` has the bytes that were acknowledged and received.
_BYTES = slice(120, 136)


@dataclass(frozen=True)
class StatusServer:
    """Describe a status server on another node: its world rank, its address, and the ranks whose status it sends."""

    rank: int
    address: tuple[str, int]
    ranks: frozenset[int]


class RemoteStatus:
    """Read the status records of ranks on other nodes, and send them the records of this node's ranks on request.

    A status record is a dictionary that a rank writes about itself.

    The constructor is collective over the ranks of ``allgather``, a function that takes a picklable object and returns
    the list of all ranks' objects. ``host`` is the name of this rank's host.
    """

    def __init__(self, status_table: StatusTable, host: str, allgather: Callable[[Any], list[Any]]) -> None:
        self._status_table = status_table
        self._servers: list[socket.socket] = []
        self._thread: threading.Thread | None = None
        self._closing = False
        #: When each other host has last answered a query: a time of ``time.monotonic()``.
        self.answered: dict[str, float] = {}
        self._remote_servers: dict[str, list[StatusServer]] = {}
        self._last: dict[int, StatusRecord] = {}
        self._next, self._pause = 0.0, 0.5
        self._body, self._encoded_at = b"", float("-inf")
        hosts: list[tuple[int, str]] = allgather((status_table.rank, host))
        if status_table.rank in status_table.ranks[:SERVING]:
            self._servers = list(_listening())
        socket_names = [server.getsockname() for server in self._servers]
        gathered = allgather((socket_names, addresses() if socket_names else [], secrets.token_bytes(32)))
        self._secret: bytes = gathered[0][2]
        self._known = {address for _, known, _ in gathered for address in known}
        self._others = self._known.difference(addresses())
        self._status_ends = {end for ends, *_ in gathered for end in map(tuple, ends)}
        #: World ranks on each other host, by the host's name; :attr:`leads` tells whether this rank is below them all.
        self.hosts = {name: [rank for rank, theirs in hosts if theirs == name] for _, name in hosts if name != host}
        self.leads = status_table.rank == min(hosts)[0]
        for (rank, name), (socket_names, *_) in zip(hosts, gathered, strict=True):
            if name != host:
                ranks = frozenset(other for other, theirs in hosts if theirs == name)
                self._remote_servers.setdefault(name, []).extend(
                    StatusServer(rank, tuple(socket_name), ranks) for socket_name in socket_names
                )
        if self._servers:
            self._thread = threading.Thread(target=self._serve, name="mpizero-status-server", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no more threads: this rank serves nothing
                self._thread = None
                self.close()

    def read(self) -> dict[int, StatusRecord]:
        """Query one server of each other node, and return the status records of the ranks of these nodes, by rank.

        Not collective. If the server of a node does not reply, the node's other server is queried.

        The time ``beat`` in the records, at which each was written, is converted to this host's clock.
        """
        records: dict[int, StatusRecord] = {}
        with contextlib.suppress(OSError):  # no files are left
            self._query_all(records)
        return records

    def _query_all(self, records: dict[int, StatusRecord]) -> None:
        limit = time.monotonic() + _ALL_ANSWERS
        untried = {name: list(servers) for name, servers in self._remote_servers.items()}
        running: dict[str, TcpQuery] = {}
        answered: set[str] = set()
        with TcpQueries(_CLIENTS) as queries:
            while (now := time.monotonic()) < limit:
                running = {name: query for name, query in running.items() if not query.ended}
                untried = {name: servers for name, servers in untried.items() if servers and name not in answered}
                for name in [name for name in untried if name not in running][: _CLIENTS - len(running)]:
                    server = untried[name].pop(0)
                    if (connection := _connecting(server.address)) is not None:
                        running[name] = queries.start(connection, self._query(server, name, records, answered), _ANSWER)
                if any(not query.ended for query in running.values()):
                    queries.poll(limit - now)
                elif not any(untried.values()):
                    break

    def read_rarely(self) -> dict[int, StatusRecord]:
        """Return the status records of the last query; query again only after a pause, which grows with each query.

        Not collective.
        """
        if self._remote_servers and time.monotonic() > self._next:
            self._last = self.read()
            self._next, self._pause = time.monotonic() + self._pause, min(1.5 * self._pause, 30.0)
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

    def message_bytes(self) -> dict[tuple[Any, Any], int]:
        """Return, by its two ends, the bytes so far on each TCP connection of this process to another host of the job.

        Not collective. See [Note: bytes of messages].
        """
        found: dict[tuple[Any, Any], int] = {}
        names: list[str] = []
        with contextlib.suppress(OSError):
            if socket.getdefaulttimeout() is None:  # else Python would make MPI's sockets non-blocking
                names = os.listdir(_OWN_FILES)
        for name in names:
            with contextlib.suppress(OSError, AttributeError):  # no connection
                # Not a duplicate, which would keep a connection alive, and in MPI's epoll sets, that MPI closes.
                connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=int(name))
                try:
                    found |= self._bytes_of(connection)
                finally:
                    connection.detach()
        return found

    def _bytes_of(self, connection: socket.socket) -> dict[tuple[Any, Any], int]:
        peer = connection.getpeername()
        if not isinstance(peer, tuple) or peer[0].removeprefix("::ffff:") not in self._others:
            return {}
        ends = connection.getsockname()[:2], peer[:2]
        if not self._status_ends.isdisjoint(ends):
            return {}
        information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES.stop)
        return {ends: sum(struct.unpack("QQ", information[_BYTES]))}

    # ------------------------------------------------------------------ the exchange

    def _query(self, server: StatusServer, name: str, records: dict[int, StatusRecord], answered: set[str]) -> Script:
        challenge = yield _NONCE
        nonce = secrets.token_bytes(_NONCE)
        yield nonce + self._proof(b"ask", server.rank, challenge + nonce)
        head = yield _PROOF + _LENGTH
        size = int.from_bytes(head[_PROOF:], "big")
        if size > RECORD_LIMIT * len(server.ranks):
            raise ValueError(f"an answer of {size} bytes")
        body = yield size
        if hmac.compare_digest(head[:_PROOF], self._proof(b"answer", server.rank, challenge + nonce + body)):
            records |= parse_records(body, server.ranks, time.monotonic())
            answered.add(name)
            self.answered[name] = time.monotonic()

    def _serve_query(self) -> Script:
        challenge = secrets.token_bytes(_NONCE)
        yield challenge
        request = yield _NONCE + _PROOF
        nonces = challenge + request[:_NONCE]
        if hmac.compare_digest(request[_NONCE:], self._proof(b"ask", self._status_table.rank, nonces)):
            body = self._reply()
            proof = self._proof(b"answer", self._status_table.rank, nonces + body)
            yield proof + len(body).to_bytes(_LENGTH, "big") + body

    def _proof(self, what: bytes, rank: int, text: bytes) -> bytes:
        """Return the HMAC, by the job's secret, of ``what`` ("ask" or "answer"), the server's ``rank`` and ``text``."""
        return hmac.digest(self._secret, b"%s %d:" % (what, rank) + text, "sha256")

    def _reply(self) -> bytes:
        now = time.monotonic()
        if now - self._encoded_at > _SAME:
            records = {rank: record for rank, record in self._status_table.read().items() if "beat" in record}
            aged = {rank: record | {"age": max(0.0, now - record["beat"])} for rank, record in records.items()}
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
        """Accept the pending connections, but only a few from addresses that do not belong to the job.

        Returns the number of pending connections from addresses that do not belong to the job.
        """
        strangers = 0
        for _ in range(_CLIENTS):
            try:
                connection, (address, _) = server.accept()
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ECONNABORTED) and not self._closing:  # no files are left
                    time.sleep(_PAUSE)
                break
            strangers += address not in self._known
            if address in self._known or strangers <= _STRANGERS:
                queries.start(connection, self._serve_query(), _ANSWER)
            else:
                connection.close()
        return strangers


def _connecting(address: tuple[str, int]) -> socket.socket | None:
    """Return a non-blocking socket that is being connected to ``address``; None if that fails immediately."""
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
    """Yield a listening socket for each of :func:`job_addresses`; skip addresses where no socket can be opened."""
    with contextlib.suppress(OSError):
        for address in job_addresses():
            with contextlib.suppress(OSError):
                yield socket.create_server((address, 0), backlog=4 * _CLIENTS)


def job_addresses() -> list[str]:
    """Return the IPv4 addresses of this host to which its name resolves, as MPI uses them. Not collective.

    If the name resolves to no address of this host, or not within a second, all of :func:`addresses` are returned.
    """
    known, named = addresses(), []

    def resolve() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            named.extend(socket.gethostbyname_ex(socket.gethostname())[2])

    asking = threading.Thread(target=resolve, name="mpizero-resolve", daemon=True)
    with contextlib.suppress(RuntimeError):  # no more threads
        asking.start()
        asking.join(1.0)
    return [address for address in known if address in named] or known


def addresses() -> list[str]:
    """Return the IPv4 addresses of this host; loopback addresses only if there are no others. Not collective."""
    known = list(_addresses([name for _, name in socket.if_nameindex()]))
    return [address for address in known if not address.startswith(_LOOPBACK)] or known


def _addresses(names: Sequence[str]) -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
                yield socket.inet_ntoa(answer[20:24])


#: Most bytes of one rank's record in a message: a record of a status table, with its age and rank.
RECORD_LIMIT = 33_000
_SECONDS = int | float
#: Forms of the entries of a record, see :func:`_has_form`; an entry may be missing.
_FORMS: Mapping[str, Any] = {
    "age": _SECONDS,
    "still": _SECONDS,
    "pid": int,
    "place": str,
    "state": str,
    "library": str,
    "calls": [(str, str, int, str, str, _SECONDS)],
    "joint_tasks": [(str, int, str, _SECONDS)],
    "transfers": [(str, int, _SECONDS)],
    "marks": {"": (int, int)},
    "making": {"": [(int, int)]},
    "records": dict,
}
#: Entries that no record may lack.
_ALWAYS = frozenset({"age", "place", "state", "still", "calls", "joint_tasks", "marks"})


def parse_records(data: bytes, ranks: Collection[int], now: float) -> dict[int, StatusRecord]:
    """Decode and check status records that a status server has sent; return them by rank.

    Records are sent with their age in seconds. The entry ``beat`` of each record, the time at which it was written, is
    set to ``now`` minus its age, where ``now`` is the present ``time.monotonic()`` of this host.

    Raises
    ------
    ValueError
        If ``data`` are not valid records, or contain a record of a rank that is not in ``ranks``.
    """
    records = strict_json(data)
    if not isinstance(records, dict) or not {str(rank) for rank in ranks}.issuperset(records):
        raise ValueError("not records of these ranks")
    for record in records.values():
        _check(record)
    return {int(rank): record | {"beat": now - record["age"]} for rank, record in records.items()}


def _check(record: Any) -> None:
    if not isinstance(record, dict) or not _ALWAYS.issubset(record):
        raise ValueError("not a record")
    for name in _FORMS.keys() & record.keys():
        if not _has_form(record[name], _FORMS[name]):
            raise ValueError(f"{name} is of another form")


def _has_form(value: Any, form: Any) -> bool:
    """Tell whether a value from JSON has the form ``form``.

    A form is a type; a list of one form, for a list of any length; a tuple of forms, for a list of as many values; or a
    dictionary of one form, for a dictionary with any keys.
    """
    if isinstance(form, list):
        return isinstance(value, list) and all(_has_form(item, form[0]) for item in value)
    if isinstance(form, tuple):
        return isinstance(value, list) and len(value) == len(form) and all(map(_has_form, value, form))
    if isinstance(form, dict):
        return isinstance(value, dict) and all(_has_form(item, form[""]) for item in value.values())
    return isinstance(value, form) and not isinstance(value, bool)


#: Generator that plays one side of a query. It yields bytes, to send them, or an integer, to receive that many bytes;
#: received bytes are passed to it by ``send()``. It returns or raises when the query is over.
Script = Generator[bytes | int, bytes, None]

_PIECE = 1 << 16


class TcpQuery:
    """Hold a connection, and run a script that sends and receives on it, until ``ended`` is true.

    The script is a generator, see :data:`Script`. A query must end within ``seconds``.
    """

    def __init__(self, connection: socket.socket, script: Script, seconds: float) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.deadline = time.monotonic() + seconds
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


class TcpQueries(contextlib.AbstractContextManager["TcpQueries"]):
    """Run at most ``limit`` queries concurrently in one thread; a new query beyond the limit ends the oldest one."""

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
        now = time.monotonic()
        limits = [query.deadline - now for query in self._live] + ([] if seconds is None else [seconds])
        servers = []
        for key, _ in self._selector.select(max(0.0, min(limits)) if limits else None):
            if key.data is None:
                assert isinstance(key.fileobj, socket.socket)
                servers.append(key.fileobj)
            elif not key.data.ended:
                self._advance(key.data)
        now = time.monotonic()
        for query in [query for query in self._live if query.deadline <= now]:
            self._end(query)
        return servers

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
