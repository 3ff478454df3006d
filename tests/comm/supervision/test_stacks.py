"""Where threads stand is told while they run on, and never from frames that may be gone."""

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from mpizero.guard.status import Line, all_stacks, current_frame, describe_stack, innermost_line


def waits(entered: threading.Event, gate: threading.Event) -> None:
    entered.set()
    gate.wait(60)


def test_the_lines_of_a_waiting_thread_are_those_of_its_functions():
    entered, gate = threading.Event(), threading.Event()
    thread = threading.Thread(target=waits, args=(entered, gate))
    thread.start()
    try:
        assert entered.wait(60)
        found = all_stacks()
    finally:
        gate.set()
        thread.join()
    assert thread.ident is not None
    stack = found[thread.ident]
    own = waits.__code__.co_firstlineno
    assert Line(__file__, own + 2, "waits") in stack
    assert describe_stack(stack).endswith(f"test_stacks.py:{own + 2} in waits > threading.py:{stack[0].number} in wait")
    assert threading.get_ident() in found


def test_stacks_need_neither_memory_files_nor_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that was built against an old glibc has no ``os.memfd_create``."""
    monkeypatch.delattr("os.memfd_create", raising=False)
    own = test_stacks_need_neither_memory_files_nor_a_folder.__name__
    assert own in {line.function for line in all_stacks()[threading.get_ident()]}

    def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    monkeypatch.setattr("tempfile.gettempdir", refuse)
    assert all_stacks() == {}
    assert describe_stack(innermost_line(sys._getframe())).endswith(f"in {own}")


def test_the_users_line_comes_first_and_lines_of_communicators_never():
    comm = f"{sys.modules['mpizero.comm'].__file__}".replace("__init__", "mpi")
    model = comm.replace("comm/mpi.py", "sharding/engine.py")
    stack = [Line(comm, 7, "allreduce"), Line(model, 8, "step"), Line("/home/me/train.py", 9, "main")]
    assert describe_stack(stack) == "train.py:9 in main > engine.py:8 in step"
    assert describe_stack([stack[0], stack[2]]) == "train.py:9 in main"
    assert describe_stack([]) == ""


def test_threads_that_run_on_are_looked_at_without_harm():
    def nested(depth: int) -> Iterator[int]:
        if depth:
            yield from nested(depth - 1)
        yield depth

    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            assert sum(nested(20)) == 210

    interval = sys.getswitchinterval()
    threads = [threading.Thread(target=run) for _ in range(2)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        seen = [all_stacks() for _ in range(100)]
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    lines = [line for found in seen for thread in threads for line in found.get(thread.ident or 0, ())]
    assert any(line.function == "nested" for line in lines)
    assert all(line.number > 0 for line in lines)


LOOKERS = """
import gc, mmap, threading
from mpizero.guard.status import current_frame

class Held:
    pass

def work():
    for _ in range(1000):
        held = Held()
        held.itself, held.map = held, mmap.mmap(-1, 4096)  # only a collection frees it, and lets others run meanwhile
        del held
        assert current_frame(main) is not None

gc.set_threshold(1)
main = threading.get_ident()
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert gc.isenabled()
"""


@pytest.mark.slow
def test_threads_that_look_while_garbage_is_collected_do_not_wait_for_each_other():
    subprocess.run([sys.executable, "-c", LOOKERS], check=True, timeout=60)


def test_collections_stay_off_where_they_were_off():
    gc.disable()
    try:
        assert current_frame(threading.get_ident()).f_code.co_name == "current_frame"
        assert not gc.isenabled()
    finally:
        gc.enable()
