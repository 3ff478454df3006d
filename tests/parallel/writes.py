"""Right and wrong ways in which functions and layers write a gradient."""

from __future__ import annotations

from typing import Any


def overwrite(grads: Any, name: str, value: Any) -> None:
    grads[name][...] = value


def write_in_two_parts(grads: Any, name: str, value: Any) -> None:
    grads[name][...] = value / 2
    grads[name] += value / 2


def write_nan(grads: Any, name: str, value: Any) -> None:
    grads[name][...] = value * float("nan")


def rebind(grads: Any, name: str, value: Any) -> None:
    grads[name] = value


def bind_by_update(grads: Any, name: str, value: Any) -> None:
    grads.update({name: value})


def bind_a_wrong_name(grads: Any, name: str, value: Any) -> None:
    grads[name.upper()] = value


def of_another_shape(grads: Any, name: str, value: Any) -> None:
    grads[name][...] = value[:5]


def forget(grads: Any, name: str, value: Any) -> None:
    pass


def add(grads: Any, name: str, value: Any) -> None:
    grads[name] += value


def write_some(grads: Any, name: str, value: Any) -> None:
    grads[name][:2] = value[:2]
