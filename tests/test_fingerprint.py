"""Fingerprints: equal for equal values in any process and in any order, and different wherever a value is."""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import itertools
import logging
import os
import subprocess
import sys
import threading
import types
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest
from tqdm import tqdm

import mpizero as mz
from mpizero._util.fingerprint import DEEPEST, LARGEST_ARRAY, Fingerprint, Parts, shown, words


def digest(value: Any) -> bytes:
    return Fingerprint().digest(value)


class Colour(Enum):
    RED = 1
    BLUE = 2


class Pair(NamedTuple):
    a: int
    b: float


@dataclass(frozen=True)
class Layer:
    rate: float = 0.1
    shape: tuple[int, ...] = (2, 3)
    inner: Any = None


class Momentum:
    """An optimizer as users write them."""

    slots = ("m",)
    rate = 0.1

    def __init__(self, beta: float = 0.9) -> None:
        self.beta = beta
        self._seen = object()
        self.rank = os.getpid()

    def update(self, params: Any, grads: Any, state: Any) -> None:
        params -= self.rate * grads * (1 - self.beta)


class FasterMomentum(Momentum):
    rate = 0.2


class Slotted:
    __slots__ = ("_b", "a")

    def __init__(self, a: int) -> None:
        self.a, self._b = a, object()


class Cached:
    def __init__(self, size: int) -> None:
        self.size = size

    @functools.cached_property
    def table(self) -> list[int]:
        return [self.size]


class Torchlike:
    """What is asked of torch.nn.Module."""

    def __init__(self, rate: float, **parts: Any) -> None:
        self._rate, self._parts = rate, parts

    def extra_repr(self) -> str:
        return f"p={self._rate}"

    def named_children(self) -> Any:
        return self._parts.items()


def make(scale: float, extra: Any = None) -> Any:
    def loss(x: float, power: int = 2, *, offset: float = 0.0) -> Any:
        return scale * x**power + offset, extra

    return loss


STEP = 0.1


def reads_a_global(x: float) -> float:
    return STEP * x


def calls_another(x: float) -> float:
    return reads_a_global(x) + 1


#: Values of which no two are alike.
VALUES: list[Any] = [
    *(None, True, 1, 1.0, -0.0, 0.0, float("nan"), "1", b"1", np.float32(1), PurePosixPath("/a"), range(3)),
    *([1, 2], (1, 2), [[1], 2], {1, 2}, {"a": 1}, {"a": 1.0}, {1: 1}, Pair(1, 2.0), Pair(1, 3.0)),
    *(Colour.RED, Colour.BLUE, np.dtype(np.float32), np.dtype(">f4"), np.float32, np.exp, len),
    *(np.zeros(3), np.array([0.0, -0.0, 0.0]), np.zeros((3, 1)), np.zeros(3, np.float32), np.array(0.0)),
    *(np.zeros((0, 3)), np.array([1, None, "x"], object), np.array(["2026-01-01"], "M8[D]")),
    np.zeros(2, [("a", "i4"), ("b", "f8")]),
    *(Layer(), Layer(rate=0.2), Layer(inner=Layer()), Layer(inner=[Layer(shape=(2, 4))])),
    *(Momentum(), FasterMomentum(), Momentum(0.8), Momentum, FasterMomentum, Slotted(1), Slotted(2)),
    argparse.Namespace(rate=0.1),
    *([("a", Layer()), ("b", Layer(rate=0.2))], [("b", Layer(rate=0.2)), ("a", Layer())]),
    *(OrderedDict(a=Layer(), b=1), OrderedDict(b=1, a=Layer())),
    *(Torchlike(0.1), Torchlike(0.1, inner=Torchlike(0.5)), Torchlike(0.1, inner=Torchlike(0.6))),
]
#: Makers of values, those above and such as have no copies.
MAKERS: list[Any] = [
    *(functools.partial(copy.deepcopy, value) for value in VALUES),
    lambda: Momentum().update,
    lambda: functools.partial(int, base=2),
    lambda: functools.partial(int, base=3),
    lambda: make(1.0),
    lambda: make(2.0),
    lambda: make(1.0, extra=np.zeros(2)),
    lambda: make(1.0, extra=make(3.0)),
    lambda: lambda step: 0.1,
    lambda: lambda step: 0.2,
    lambda: lambda step: 0.1 / (step + 1),
    lambda: lambda step: step in {"a", "b", "c"},
    lambda: lambda step, rate=0.1: rate,
    lambda: lambda step, rate=0.2: rate,
    lambda: calls_another,
    lambda: np,
]


def test_equal_values_are_equal_and_no_others():
    first, again = ([digest(make()) for make in MAKERS] for _ in range(2))
    assert first == again
    alike = [(i, k) for i, k in itertools.combinations(range(len(first)), 2) if first[i] == first[k]]
    assert not alike


def test_the_order_of_sets_and_dictionaries_does_not_count():
    entries = [("a", 1), ("b", Layer()), ((1, 2), "x"), (Colour.RED, {"p", "q"})]
    assert len({digest(dict(order)) for order in itertools.permutations(entries)}) == 1
    members = ["a", 1, (2, 3), Colour.RED, Layer()]
    assert len({digest(set(order)) for order in itertools.permutations(members)}) == 1


class Solver:
    """Offers its fingerprint."""

    def __init__(self, mesh: int) -> None:
        self.mesh, self.scratch = mesh, os.urandom(8)

    def fingerprint(self) -> Any:
        return {"mesh": self.mesh}


class Molecule:
    """Has a method of that name which wants arguments: another."""

    def __init__(self, atoms: int) -> None:
        self.atoms = atoms

    def fingerprint(self, radius: int) -> int:
        return radius


class Settings:
    """Answers to any name, or refuses oddly."""

    def __init__(self, **known: Any) -> None:
        self.__dict__["known"] = known

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["known"][name]


def used(cached: Cached) -> Cached:
    assert cached.table
    return cached


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        *((scalar, scalar.item(), None) for scalar in (np.float64(0.1), np.int64(3), np.bool(True), np.str_("a"))),
        # one rank made the object, another got it by pickle: nobody can tell, and nobody needs to
        ([Layer()] * 2, [Layer(), Layer()], [Layer(), Layer(0.2)]),
        (used(Cached(3)), Cached(3), Cached(4)),
        (Solver(1), Solver(1), Solver(2)),
        (Molecule(1), Molecule(1), Molecule(2)),
        (Settings(rate=1), Settings(rate=1), Settings(rate=2)),
        *(
            (compiled(make(1.0)), compiled(make(1.0)), compiled(make(2.0)))
            for compiled in (functools.lru_cache, numba.njit, np.vectorize)
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_alike_has_one_fingerprint_and_what_is_not_another(one, same, other):
    assert digest(one) == digest(same) != digest(other)
    assert digest([one]) == digest([same])


def test_objects_that_hold_one_another_come_to_an_end():
    def around(rate: float) -> Any:
        parent, child = argparse.Namespace(rate=rate), argparse.Namespace()
        parent.child, child.parent, child.children = child, parent, [child]
        return parent

    assert digest(around(0.1)) == digest(around(0.1)) != digest(around(0.2))
    deep: Any = 1
    for _ in range(DEEPEST * 3):
        deep = [deep, None, [deep]]
    fingerprint = Fingerprint()
    fingerprint.digest(deep)
    assert "nested too deeply" in fingerprint.left_out.values()


def test_a_function_that_makes_a_named_tuple_is_compared_whole():
    fingerprint = Fingerprint()
    fingerprint.digest(lambda: Pair(1, 2.0))
    assert not fingerprint.left_out


def test_names_that_may_differ_are_left_out():
    """Ranks, devices and private names: of attributes, of what a function has in its scope, and of arguments."""

    def settings(value: Any) -> Any:
        return argparse.Namespace(
            rate=0.1, rank=value, local_rank=value, device=value, my_device=value, _cache=value, __dunder=value
        )

    def loss(value: Any) -> Any:
        rank = local_rank = _log = RANK = MY_RANK = LOCAL_RANK = myrank = value  # noqa: N806
        return lambda x: (rank, local_rank, _log, RANK, MY_RANK, LOCAL_RANK, myrank, x)

    def told(rank: int, rate: float = 0.1) -> Any:
        return functools.partial(lambda x, rank, rate: x, rank=rank, rate=rate)

    for differing in (settings, loss, told):
        assert digest(differing(1)) == digest(differing(2))
    assert digest(told(1)) != digest(told(1, 0.2))
    assert digest({"rank": 1}) != digest({"rank": 2})  # a key is no name of a variable


def test_a_progress_bar_is_left_out_and_named():
    class Model:
        def __init__(self, **more: Any) -> None:
            self.bar = tqdm(total=3, file=io.StringIO(), **more)

    fingerprint = Fingerprint()
    assert fingerprint.digest(Model()) == digest(Model(disable=True))
    assert list(fingerprint.left_out.values()) == ["tqdm"]


def test_what_a_function_changes_does_not_count():
    def counting(start: int) -> Any:
        calls, history, seen, last, counts = start, [start], {start}, {"x": start}, {"x": start}

        def loss(x: float) -> float:
            nonlocal calls
            calls += 1
            history.append(x)
            last["x"] = x
            counts["x"] += 1
            for value in history:
                seen.add(value)
            return x

        return loss

    assert digest(counting(0)) == digest(counting(5))


def test_what_a_model_keeps_while_it_works_does_not_count():
    """Layers and optimizers as many write them, placed a second time after some steps."""

    class Own:
        def __init__(self, rate: float) -> None:
            self.rate, self.calls, self.input, self.history, self.largest = rate, 0, None, [], {}
            self.scratch, self.step, self.other, self.sums = None, 1.0, 1.0, [0.0]

        def set_rate(self, rate: float) -> None:
            self.rate = rate

        def forward(self, params: Any, x: Any) -> Any:
            self.input = x
            self.calls += 1
            self.history.append(x)
            self.sums[0] += x
            self._note(x)
            return x

        def _note(self, x: Any) -> None:
            self.largest["x"] = x

        def update(self, params: Any, grads: Any, state: Any) -> None:
            self.scratch = grads
            self.step *= 0.5
            self.other = self.other / 2

    used = Own(0.1)
    used.forward({}, 3.0)
    used.update(1.0, 2.0, {})
    for falling in ("step", "other"):
        assert digest(used) != digest(Own(0.1)), "a rate that falls is a setting"
        setattr(used, falling, 1.0)
    assert digest(used) == digest(Own(0.1))
    used.set_rate(0.2)
    assert digest(used) == digest(Own(0.2)) != digest(Own(0.1))


def test_globals_that_a_function_reads_count(monkeypatch):
    before = digest(calls_another)
    monkeypatch.setattr(sys.modules[__name__], "STEP", 0.2)
    assert digest(calls_another) != before
    monkeypatch.undo()
    assert digest(calls_another) == before


def test_the_place_of_a_function_in_its_file_does_not_count():
    def compiled(source: str, file: str) -> Any:
        scope: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(source, file, "exec"), scope)
        return scope["f"]

    source = "def f(x):\n    return [x + 1 for _ in range(3)]\n"
    expected = digest(compiled(source, "/home/a/train.py"))
    assert digest(compiled("\n\n# later\n" + source, "/scratch/b/train.py")) == expected
    assert digest(compiled(source.replace("3", "4"), "/home/a/train.py")) != expected


def test_the_module_of_the_library_s_own_classes_and_functions_does_not_count(monkeypatch):
    """What a run has saved is compared after a module of mpizero has been moved or renamed; a user's modules count."""
    source = "class Outer:\n    class Inner(tuple): pass\n    def f(self): pass"

    def moved(name: str) -> list[bytes]:
        module = types.ModuleType(name)
        file = module.__file__ = str(Path(mz.__file__).parents[1] / f"{name.replace('.', '/')}.py")
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(source, file, "exec"), vars(module))
        one = module.Outer()
        one.rate = 0.1
        return [digest(value) for value in (module.Outer, one, one.Inner([1, {}]), module.Outer.f, one.f)]

    assert moved("mpizero.optim.here") == moved("mpizero.there")
    others = [moved(name) for name in ("mpizero.here", "own.here", "own.there", "mpizero_own.here")]
    assert all(len(set(same)) == len(others) for same in zip(*others, strict=True))
    assert digest(mz.AdamW(lr=0.1)) != digest(mz.Adam(lr=0.1))


def test_what_has_no_content_is_left_out_and_named(tmp_path):
    class Model:
        def __init__(self) -> None:
            self.log = (tmp_path / "log").open("w")
            self.lock, self.rng, self.logger = threading.Lock(), np.random.default_rng(), logging.getLogger()
            self.steps, self.table = (i for i in range(3)), np.zeros(LARGEST_ARRAY + 1, np.uint8)
            self.buffer = io.BytesIO(b"x")

    fingerprint = Fingerprint()
    first = Model()
    found = fingerprint.digest_named({"the model": first})
    first.log.close()
    assert fingerprint.left_out == {
        "log of the model": "TextIOWrapper",
        "lock of the model": "lock",
        "rng of the model": "Generator",
        "logger of the model": "RootLogger",
        "steps of the model": "generator",
        "table of the model": "an array of 64 MiB",
        "buffer of the model": "BytesIO",
    }
    other = Model()
    other.log.close()
    other.rng.normal(size=3)
    assert Fingerprint().digest_named({"the model": other}) == found


def test_communicators_and_what_watches_them_are_left_out_without_a_word():
    from mpizero.guard.watchdog import Watchdog
    from mpizero.testing import run_in_threads

    def found(comm: Any) -> Any:
        fingerprint = Fingerprint()
        own = (comm, comm.trace, Watchdog(comm, 60.0))
        assert [fingerprint.parts(one) for one in own] == [Parts("left out", left_out="")] * len(own)
        return fingerprint.digest(argparse.Namespace(own=own, rate=0.1)), fingerprint.left_out

    first, second = run_in_threads(2, found)
    assert first == second
    assert first[1] == {}


PROGRAM = """
from tests import test_fingerprint as t
sets = [{f"n{i}" for i in range(50)}, {t.Colour.RED, "a", (1, 2)}, {name: 1 for name in {f"n{i}" for i in range(50)}}]
print(t.digest([make() for make in t.MAKERS] + sets).hex())
"""


@pytest.mark.slow
def test_every_process_finds_the_same():
    """This one and one with another hash seed in another folder."""
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": "31415"}
    command = [sys.executable, "-c", PROGRAM]
    other = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=120, check=True)
    with contextlib.redirect_stdout(io.StringIO()) as own:
        exec(PROGRAM, {})
    assert own.getvalue() == other.stdout
    assert len(other.stdout) == 65


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ((), "block 'encoder.2'"),
        ((".dropout",), "dropout of block 'encoder.2'"),
        ((".layers", "['1']", ".rate"), "layers['1'].rate of block 'encoder.2'"),
        (("['w']",), "w of block 'encoder.2'"),
        ((".log", "", ".mode"), "log.mode of block 'encoder.2'"),
    ],
)
def test_places_are_told_in_words(steps, text):
    assert words("block 'encoder.2'", steps) == text


def test_values_are_shown_without_addresses():
    values = [make() for make in MAKERS] + [object(), threading.Lock(), make(1.0), [object()], {1: object()}]
    texts = [shown(value) for value in values]
    assert not [text for text in texts if "0x" in text]
    assert shown(make(1.0)).startswith("make.<locals>.loss at test_fingerprint.py:")
    assert shown([1, "a"]) == "[1, 'a']"
    assert shown({"b", "a"}) == "{'a', 'b'}"
    assert shown(np.float64(0.1)) == "0.1"
    assert len(shown("x" * 1000)) < 200

    def itself() -> Any:
        inside: list[Any] = []
        inside.append(inside)
        return inside

    assert shown(itself()) == "[list]"


def test_a_tensor_counts_as_its_array_and_one_that_numpy_does_not_know_is_left_out():
    class Tensor:
        dtype = "float32"

        def __init__(self, values: Any) -> None:
            self.values = values

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            if self.values is None:
                raise TypeError("bfloat16")
            return np.array(self.values)

    Tensor.__module__ = "torch"
    assert digest(Tensor([1.0])) == digest(Tensor([1.0])) != digest(Tensor([2.0]))
    fingerprint = Fingerprint()
    fingerprint.digest_named({"the model": {"scale": Tensor(None)}})
    assert list(fingerprint.left_out) == ["scale of the model"]
