"""Dataclasses that share their methods are dataclasses like any other."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest

from mpizero.records import dataclass


def both(**options):
    """Return the same class made here and by Python."""

    def make(decorate):
        class Point:
            x: int
            y: Any = None
            hidden: int = dataclasses.field(default=0, repr=False)
            ignored: int = dataclasses.field(default=0, compare=False)

        return decorate(**options)(Point)

    return make(dataclass), make(dataclasses.dataclass)


@dataclass(frozen=True)
class Stored:
    name: str
    value: float = 0.5


@dataclass(frozen=True)
class Further(Stored):
    more: tuple[int, ...] = ()


@pytest.mark.parametrize(
    "options", [{"frozen": True}, {"frozen": True, "kw_only": True}, {}, {"frozen": True, "eq": False}]
)
def test_equality_hash_and_text_are_those_of_python(options):
    ours, theirs = both(**options)
    rows = [{"x": 1}, {"x": 1}, {"x": 2}, {"x": 1, "y": "z", "hidden": 3}, {"x": 1, "ignored": 7}]
    mine, others = ([kind(**row) for row in rows] for kind in (ours, theirs))
    assert [[a == b for b in mine] for a in mine] == [[a == b for b in others] for a in others]
    assert [repr(a) for a in mine] == [repr(a) for a in others]
    assert mine[0] != rows[0]
    if options.get("frozen") and options.get("eq", True):
        assert [hash(a) for a in mine] == [hash(a) for a in others]
    elif options:
        assert len({*mine}) == len(rows)
    else:
        assert ours.__hash__ is theirs.__hash__ is None


def test_users_derive_dataclasses_copy_pickle_and_replace_them():
    @dataclasses.dataclass(frozen=True)
    class Users(Stored):
        extra: int = 1

    assert Users("a") == Users("a", extra=1) != Users("a", extra=2)
    assert Users("a") != Stored("a") != Further("a")
    assert "Users(name='a', value=0.5, extra=1)" in repr(Users("a"))
    for value in (Stored("b", 2.0), Further("b", 2.0, (1,))):
        assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value
        assert hash(copy.copy(value)) == hash(value)
        assert dataclasses.replace(value, name="c").name == "c"
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.name = "d"


@pytest.mark.parametrize("options", [{"frozen": True}, {"frozen": True, "kw_only": True}])
def test_parameters_checks_and_frozen_fields_are_those_of_python(options):
    def outcomes(decorate):
        @decorate(**options)
        class Point:
            """Hold a point."""

            x: int
            y: float = 2.0
            label: str = "p"

            def __post_init__(self):
                if self.x < 0:
                    raise ValueError("x < 0")

        class Plain(Point):
            pass

        def attempt(action, *words, **named):
            try:
                return repr(action(*words, **named)).replace(Point.__qualname__, "Point")
            except Exception as error:
                return f"{type(error).__name__}: {error}".replace(Point.__qualname__, "Point")

        yield str(inspect.signature(Point)), Point.__match_args__, Point.y, dataclasses.fields(Point)[0].type
        made, derived = Point(x=1), Plain(x=1)
        yield [attempt(Point, *words) for words in ((), (1,), (1, 3.0), (1, 3.0, "q"), (1, 2, 3, 4))]
        yield [attempt(Point, **named) for named in ({"y": 1}, {"x": 1, "label": "q"}, {"x": -1}, {"x": 1, "z": 1})]
        yield [attempt(setattr, value, name, 5) for value in (made, derived) for name in ("x", "new")]
        yield [attempt(delattr, value, name) for value in (made, derived) for name in ("x", "new", "absent")]
        yield sorted(vars(made).items()), sorted(vars(derived).items())
        yield attempt(lambda: decorate(frozen=False)(type("Thawed", (Point,), {})))

    assert [*outcomes(dataclass)] == [*outcomes(dataclasses.dataclass)]


def test_a_field_without_default_cannot_follow_one_with_a_default():
    class Wrong:
        x: int = 1
        y: int

    with pytest.raises((TypeError, SyntaxError), match=r"non-default|without a default"):
        dataclass(frozen=True)(Wrong)


def test_methods_of_a_class_are_kept():
    @dataclass(frozen=True)
    class Named:
        name: str
        seconds: float

        def __eq__(self, other):
            return self.name == other.name

        def __repr__(self):
            return self.name

    assert Named("a", 1.0) == Named("a", 2.0)
    assert hash(Named("a", 1.0)) != hash(Named("a", 2.0))  # made of all fields, as Python does
    assert repr(Named("a", 1.0)) == "a"


def test_a_value_that_holds_itself_has_a_text_and_one_without_fields_equals_its_kind():
    @dataclass(frozen=True)
    class Empty:
        pass

    held = Stored([])
    held.name.append(held)
    assert repr(held) == "Stored(name=[...], value=0.5)"

    @dataclass(frozen=True)
    class One:
        x: float

    nothing = float("nan")
    assert One(nothing) == One(nothing) != One(float("nan"))
    assert hash(One(3)) == hash((3,))
    assert Empty() == Empty()
    assert hash(Empty()) == hash(Empty())
