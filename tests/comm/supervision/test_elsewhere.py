"""The boards of other nodes can be asked by TCP, by who knows the job's secret, also when nobody runs MPI."""

from __future__ import annotations

import bisect
import contextlib
import hmac
import json
import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from mpizero.guard import guard
from mpizero.guard import remote_status as module
from mpizero.guard.call_trace import CallTrace, CommunicatorRegistry
from mpizero.guard.heartbeat import Heartbeat, Supervisor
from mpizero.guard.remote_status import (
    MESSAGES,
    RECORD_LIMIT,
    RemoteStatus,
    StatusGroups,
    StatusServer,
    addresses,
    parse_records,
)
from mpizero.guard.status import StatusTable
from mpizero.testing import run_in_threads

#: Seconds until a hang ends.
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Give answers time on a busy machine."""
    monkeypatch.setattr(module, "_ANSWER", PATIENCE)
    monkeypatch.setattr(module, "_ALL_ANSWERS", PATIENCE)


def slot_of(rank, seconds=0.0, **entries):
    """Return what rank ``rank`` has written ``seconds`` ago, as far as others count on it."""
    known = {"beat": time.monotonic() - seconds, "place": f"line of rank {rank}", "state": "working", "still": 0.0}
    return known | {"calls": [], "joint_tasks": [], "marks": {}} | entries


def asked(comm, per_node, meddle=lambda remote_status: None, members=range(9)):
    """Let every rank write a slot and ask; ranks stand on nodes of ``per_node``, boards know their own rank alone."""
    rank, begun = members[comm.rank], comm.broadcast_object(time.monotonic())
    board = StatusTable((rank,), rank, None)
    board.write(slot_of(rank, 2.0))
    remote_status = RemoteStatus(board, f"node{comm.rank // per_node}", comm.allgather_object)
    try:
        meddle(remote_status)
        found = remote_status.read()
        assert all(begun <= slot["beat"] + 2.0 <= time.monotonic() for slot in found.values())
        comm.barrier()
        return places(found)
    finally:
        remote_status.close()


@pytest.fixture
def pair(monkeypatch):
    """Two nodes of a rank each, with open doors."""
    monkeypatch.setattr(module, "addresses", lambda: ["127.0.0.1"])

    def make(comm):
        board = StatusTable((comm.rank,), comm.rank, None)
        board.write(slot_of(comm.rank))
        return RemoteStatus(board, f"node{comm.rank}", comm.allgather_object)

    found = run_in_threads(2, make)
    yield tuple(found)
    for one in found:
        one.close()


@contextlib.contextmanager
def listener(talk):
    """Listen, and let ``talk`` speak to each who connects."""

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(PATIENCE)
                    talk(connection)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield server.getsockname()
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE)


def door_of(asker):
    ((server,),) = asker._remote_servers.values()
    return server


def turn_to(asker, address):
    """Let ``asker`` ask at another address for what it asks for."""
    ((name, (server, *_)),) = asker._remote_servers.items()
    asker._remote_servers = {name: [StatusServer(server.rank, address, server.ranks)]}


def received(connection, count=1 << 30):
    """Receive until the other end closes, or ``count`` bytes."""
    data = b""
    while len(data) < count and (piece := connection.recv(min(1 << 16, count - len(data)))):
        data += piece
    return data


def wait_until(condition):
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def places(found):
    return {rank: slot["place"] for rank, slot in found.items()}


@pytest.mark.parametrize("members", [(0, 1, 2), (2, 3), (5, 1, 4)])
def test_one_rank_of_each_other_node_answers_by_its_number_in_the_world(members):
    found = run_in_threads(len(members), lambda comm: asked(comm, 1, members=members))
    assert found == [{other: f"line of rank {other}" for other in members if other != rank} for rank in members]


def test_one_node_has_nobody_to_ask():
    assert run_in_threads(2, lambda comm: asked(comm, 2)) == [{}, {}]


def test_a_wrong_secret_gets_no_answer_and_a_node_that_is_gone_is_left_out():
    def specification(comm, act):
        def meddle(remote_status):
            comm.barrier()
            if comm.rank == 1:
                act(remote_status)
            comm.barrier()

        return asked(comm, 1, meddle)

    def forget(remote_status):
        remote_status._secret = bytes(32)

    assert run_in_threads(2, lambda comm: specification(comm, forget))[1] == {}
    assert run_in_threads(2, lambda comm: specification(comm, RemoteStatus.close))[0] == {}


def overheard(pair, alter=lambda said: said, amid=lambda: None):
    """Let the first of the pair ask through somebody in between; return its answer, and what both ends have said.

    ``amid`` is called when the server has begun.
    """
    asker, _ = pair
    address, heard = door_of(asker).address, [b"", b""]

    def between(connection):
        with socket.create_connection(address, PATIENCE) as other:
            heard[0] = other.recv(1 << 16)
            amid()
            connection.sendall(heard[0])
            heard[1] = connection.recv(1 << 16)
            other.sendall(heard[1])
            answer = received(other)
            heard[0] += answer
            connection.sendall(alter(answer))

    with listener(between) as place:
        turn_to(asker, place)
        found = asker.read()
    turn_to(asker, address)
    return found, heard


def test_the_secret_is_never_sent_and_what_was_overheard_is_of_no_use(pair):
    asker, _ = pair
    found, (answer, question) = overheard(pair)
    assert places(found) == {1: "line of rank 1"}
    for secret in (asker._secret, asker._secret.hex().encode()):
        assert secret not in answer + question

    with socket.create_connection(door_of(asker).address, PATIENCE) as again:  # the question once more
        challenge = again.recv(1 << 16)
        again.sendall(question)
        assert challenge != answer[: len(challenge)]
        assert received(again) == b""

    def repeat(connection):
        connection.sendall(answer)
        received(connection)

    with listener(repeat) as place:  # the answer once more
        turn_to(asker, place)
        assert asker.read() == {}


def test_an_answer_that_was_altered_counts_for_nothing(pair):
    assert overheard(pair, lambda said: said.replace(b"line", b"lime"))[0] == {}


def test_an_answer_of_one_rank_is_none_of_another(pair):
    """Somebody in between sends those who ask for one node to another."""
    asker, _ = pair
    ((name, (server,)),) = asker._remote_servers.items()
    asker._remote_servers = {name: [StatusServer(server.rank + 1, server.address, server.ranks)]}
    assert asker.read() == {}


def test_a_stranger_is_told_nothing(pair):
    with socket.create_connection(door_of(pair[0]).address, PATIENCE) as stranger:
        stranger.sendall(bytes(1 << 16))
        with contextlib.suppress(ConnectionResetError):
            assert len(received(stranger)) <= 32
    assert places(pair[0].read()) == {1: "line of rank 1"}


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.9"])  # one of the job's addresses, and a stranger's
def test_those_who_connect_and_dawdle_keep_nobody_from_an_answer(pair, source):
    address = door_of(pair[0]).address
    with contextlib.ExitStack() as opened:

        def dawdle(count):
            for _ in range(count):
                connection = opened.enter_context(socket.create_connection(address, PATIENCE, (source, 0)))
                with contextlib.suppress(OSError):
                    connection.sendall(b"G")
                    connection.recv(1)

        dawdle(2 * module._CLIENTS)  # more than are served at once
        assert places(overheard(pair, amid=lambda: dawdle(3))[0]) == {1: "line of rank 1"}


def test_many_ask_at_once_and_all_are_answered(pair):
    found = []
    threads = [threading.Thread(target=lambda: found.append(pair[0].read())) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [places(one) for one in found] == [{1: "line of rank 1"}] * 32


def proof(secret, what, rank, text):
    return hmac.digest(secret, b"%s %d:" % (what, rank) + text, "sha256")


def answering(pair, say):
    """Return what the first of the pair learns from one who knows the secret; ``say`` gets a function that proves."""
    asker, _ = pair

    def talk(connection):
        challenge = bytes(range(32))
        connection.sendall(challenge)
        nonce = received(connection, 64)[:32]
        say(connection, lambda body: proof(asker._secret, b"answer", 1, challenge + nonce + body))
        received(connection)

    with listener(talk) as place:
        turn_to(asker, place)
        return asker.read()


def whole(body):
    return lambda connection, prove: connection.sendall(prove(body) + len(body).to_bytes(4, "big") + body)


@pytest.mark.slow
def test_every_slot_that_fits_on_a_board_fits_into_an_answer(pair):
    def fits(count):
        """Whether the board takes so many marks, or leaves some of them out."""
        board.write(slot_of(1, marks={f"{number:016x}": (1 << 20, 1 << 46) for number in range(count)}))
        return len(board.read_one(1)["marks"]) == count

    board = pair[1]._status_table
    most = bisect.bisect_left(range(1, 1 << 12), True, key=lambda count: not fits(count))
    assert fits(most)
    assert most > 500
    assert pair[0].read()[1]["marks"] == board.read_one(1)["marks"]


def test_a_huge_answer_is_not_taken(pair):
    room = RECORD_LIMIT + 1
    taken = []

    def say(connection, prove):
        connection.sendall(prove(b"") + room.to_bytes(4, "big"))
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(bytes(1 << 16))
                taken.append(1 << 16)

    assert answering(pair, say) == {}
    assert sum(taken) < 1 << 26  # what the system had room for


def test_an_answer_in_small_bits_ends_with_the_time_for_all_of_it(pair, monkeypatch):
    """The other end hangs up long before the last of the bits, which come within the time for one."""
    monkeypatch.setattr(module, "_ANSWER", 0.2)
    monkeypatch.setattr(module, "_ALL_ANSWERS", 10 * PATIENCE)
    hung_up = []

    def say(connection, prove):
        connection.sendall(prove(b"") + RECORD_LIMIT.to_bytes(4, "big"))
        try:
            for _ in range(500):
                connection.sendall(b" ")
                time.sleep(0.03)
        except OSError as error:
            hung_up.append(error)

    assert answering(pair, say) == {}
    assert hung_up


ENTRIES = {
    "calls": [["key", "name", 1, "barrier", "", 0.5]],
    "joint_tasks": [["key", 1, "a step", 0.5]],
    "transfers": [["writing", 1, 0.5]],
    "marks": {"key": [1, 1]},
    "making": {"key": [[0, 1]]},
}
#: A slot with every entry, as rank 1 sends it.
WHOLE = {name: entry for name, entry in slot_of(1, age=1.0, pid=1, **ENTRIES).items() if name != "beat"}
#: What text, a whole number, and seconds are not.
WRONG = {str: (1, None, ["key"]), int: ("1", 1.5, None, True), float: ("long", None, True)}


def spoiled(value):
    """Yield ``value`` with each of its parts replaced by others, and with a cell too few or too many."""
    if isinstance(value, dict):
        yield from ({**value, name: wrong} for name, part in value.items() for wrong in (*spoiled(part), None))
    elif isinstance(value, list) and isinstance(value[0], list):  # any number of rows
        yield from ([row] for row in (3, *spoiled(value[0])))
    elif isinstance(value, list):
        yield from (value[:-1], [*value, 1])
        yield from ([*value[:i], wrong, *value[i + 1 :]] for i, cell in enumerate(value) for wrong in spoiled(cell))
    else:
        yield from WRONG[type(value)]


def body_of(record):
    return json.dumps({"1": record}).encode()


NO_SLOTS = [
    *(b"", b"no JSON", b"\xff\xfe", b"[]", b'{"1": []}', b'{"1": {}}'),
    body_of(WHOLE).replace(b'"1"', b'"0"'),  # a rank of another node
    body_of(WHOLE).replace(b'"1"', b'"x"'),
    *(body_of(WHOLE | {"age": "AGE"}).replace(b'"AGE"', age) for age in (b"NaN", b"1e999", b"1" + b"0" * 400)),
    body_of(WHOLE | {"deep": "DEEP"}).replace(b'"DEEP"', b"[" * 10_000 + b"]" * 10_000),
    *(
        body_of({name: WHOLE[name] for name in WHOLE if name != missing})
        for missing in ("age", "place", "state", "still", "calls", "joint_tasks", "marks")
    ),
    *(body_of(record) for record in spoiled(WHOLE)),
]


def test_what_is_no_slot_is_left_out(pair):
    for body in NO_SLOTS:
        with pytest.raises(ValueError):
            parse_records(body, {1}, 10.0)
    for body in (b"", NO_SLOTS[10], NO_SLOTS[-1]):
        assert answering(pair, whole(body)) == {}


def test_whoever_knows_the_secret_can_answer_and_what_ranks_do_comes_as_it_was_said(pair):
    told = WHOLE | {"later": "versions say more"}
    found = answering(pair, whole(body_of(told)))
    assert {name: found[1][name] for name in told} == told


def test_a_slot_as_ranks_write_it_is_taken():
    def specification(comm):
        register, trace = CommunicatorRegistry(), comm.trace
        register.add(trace, range(comm.size), comm.rank)
        heartbeat = Heartbeat(StatusGroups(), register, Supervisor(), guard.current()._state)
        with trace.joint_task("a step"), trace.transfer("writing"):
            trace.entered = time.monotonic()
            slot = heartbeat.record(time.monotonic())
            trace.entered = 0.0
        assert all(slot[name] for name in ("calls", "joint_tasks", "transfers", "marks"))
        return slot

    (slot,) = run_in_threads(1, specification)
    told = json.loads(json.dumps(slot))
    found = parse_records(json.dumps({"1": slot | {"age": 1.0}}).encode(), {1}, 10.0)
    assert found == {1: told | {"age": 1.0, "beat": 9.0}}


def test_it_listens_where_the_hosts_name_leads_and_nowhere_else(monkeypatch):
    monkeypatch.setattr(module, "addresses", lambda: ["127.0.0.2", "127.0.0.3"])
    monkeypatch.setattr(socket, "gethostbyname_ex", lambda name: (name, [], ["192.0.2.1", "127.0.0.3"]))
    opened, create = [], socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda at, **more: (opened.append(at[0]), create(at, **more))[1])
    assert [list(found) for found in run_in_threads(2, lambda comm: asked(comm, 1))] == [[1], [0]]
    assert opened == ["127.0.0.3"] * 2


def test_where_the_name_leads_nowhere_it_listens_at_all_addresses(monkeypatch):
    def unknown(name):
        raise socket.gaierror("unknown")

    monkeypatch.setattr(module, "addresses", lambda: ["127.0.0.2", "127.0.0.3"])
    monkeypatch.setattr(socket, "gethostbyname_ex", unknown)
    assert module.job_addresses() == ["127.0.0.2", "127.0.0.3"]
    monkeypatch.undo()
    assert addresses()


@pytest.mark.parametrize("missing", [(socket, "create_server"), (module, "job_addresses")])
def test_without_a_door_the_run_goes_on(monkeypatch, missing):
    def refuse(*arguments, **options):
        raise OSError("no network, and no port is free")

    monkeypatch.setattr(*missing, refuse)
    assert run_in_threads(2, lambda comm: asked(comm, 1)) == [{}, {}]


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux counts the bytes of a connection")
def test_bytes_of_messages_are_those_of_connections_with_other_hosts_without_those_of_questions(pair):
    asker, _ = pair
    accepted, heard = threading.Event(), threading.Event()

    def talk(connection):
        accepted.set()
        while connection.recv(1 << 16):
            heard.set()

    def counts():
        return asker.message_bytes()

    with listener(talk) as place, socket.create_connection(place, PATIENCE) as connection:
        assert accepted.wait(PATIENCE)
        assert counts() == {}, "the other end is this host"
        asker._others = {"127.0.0.1"}  # as if it were another one
        assert counts().keys() == {(connection.getsockname(), place), (place, connection.getsockname())}
        before, opened = counts(), os.listdir("/proc/self/fd")
        with socket.create_connection(door_of(asker).address, PATIENCE) as question:
            assert question.recv(1), "it has begun"
            assert counts() == before
        connection.sendall(b"message")
        assert heard.wait(PATIENCE)
        wait_until(lambda: [counts()[ends] - before[ends] for ends in before] == [7, 7])  # it is acknowledged
        for _ in range(50):
            counts()
        # The server's thread closes and opens some of its own; a count that left one open would leave fifty.
        assert len(os.listdir("/proc/self/fd")) < len(opened) + 50


def test_bytes_are_counted_once_a_second_and_told_as_a_transfer_while_a_rank_waits():
    statuses, register, trace = StatusGroups(), CommunicatorRegistry(), CallTrace("world")
    register.add(trace, (0, 1))
    read = iter([{"a": 5}, {"a": 9, "b": 100}, {"b": 101}])
    remote = SimpleNamespace(message_bytes=lambda: next(read))
    statuses.groups = [SimpleNamespace(remote_status=remote, status_table=StatusTable((0,), 0, None))]
    heartbeat, now = Heartbeat(statuses, register, Supervisor(), dict), time.monotonic()

    def told(seconds):
        return [transfer[:2] for transfer in heartbeat.record(now + seconds)["transfers"]]

    assert told(0.0) == [], "it does not wait"
    trace.entered = now
    assert told(1.0) == [[MESSAGES, 5]]
    assert told(1.5) == [[MESSAGES, 5]]
    assert told(2.5) == [[MESSAGES, 109]], "with a new connection"
    assert told(4.0) == [[MESSAGES, 110]], "a closed one takes nothing away"
