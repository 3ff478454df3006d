"""The boards of other nodes can be asked by TCP, by who knows the job's secret, also when nobody runs MPI."""

from __future__ import annotations

import time

from mpizero.comm.board import Board
from mpizero.comm.elsewhere import Elsewhere, addresses
from mpizero.testing import run_in_threads


def asked(comm, per_node, meddle=lambda elsewhere: None):
    """Let every rank write a slot and ask; ranks stand on nodes of ``per_node``, boards know their own rank alone."""
    node = comm.rank // per_node
    board = Board((comm.rank,), comm.rank, None)
    board.write({"beat": time.monotonic() - 2.0, "place": f"line of rank {comm.rank}"})
    elsewhere = Elsewhere(board, f"node{node}", comm.allgather_object)
    try:
        meddle(elsewhere)
        found = elsewhere.read()
        comm.barrier()
        return {rank: (slot["place"], round(time.monotonic() - slot["beat"])) for rank, slot in found.items()}
    finally:
        elsewhere.close()


def test_one_rank_of_each_other_node_answers():
    results = run_in_threads(3, lambda comm: asked(comm, 1))
    assert results[0] == {1: ("line of rank 1", 2), 2: ("line of rank 2", 2)}
    assert set(results[2]) == {0, 1}


def test_one_node_has_nobody_to_ask():
    assert run_in_threads(2, lambda comm: asked(comm, 2)) == [{}, {}]


def test_a_wrong_secret_gets_no_answer():
    def specification(comm):
        def meddle(elsewhere):
            comm.barrier()
            if comm.rank == 1:
                elsewhere._secret = "0" * 32

        return asked(comm, 1, meddle)

    assert run_in_threads(2, specification)[1] == {}


def test_a_node_that_is_gone_is_left_out():
    def specification(comm):
        def meddle(elsewhere):
            elsewhere.close()
            comm.barrier()

        return asked(comm, 1, meddle)

    assert run_in_threads(2, specification) == [{}, {}]


def test_a_host_has_an_address():
    assert addresses()
