"""Compiled prediction: a whole model in one kernel call, without BLAS and without layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mpizero.types import Array, Params


def compile_gpt(model: Any, params: Mapping[str, Params]) -> Callable[[Array], Array]:
    raise NotImplementedError


def compile_mlp(model: Any, params: Mapping[str, Params]) -> Callable[[Array], Array]:
    raise NotImplementedError
