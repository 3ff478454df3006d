"""Describe the parameters and buffers of a module's blocks, as mpizero stores them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from mpizero._util.names import as_patterns, selected
from mpizero.adapters.torch import bound
from mpizero.adapters.torch.bound import BlockTensors
from mpizero.errors import ConfigError
from mpizero.layout.flat import joined
from mpizero.types import INTEGER_DTYPES, IntegerSpec, ParameterSpec


class Describer:
    """Describe the blocks of a module, one after the other: a parameter belongs to the first block that holds it.

    Parameters
    ----------
    module : torch.nn.Module
        The whole module.
    dtype : numpy dtype
        The dtype of its parameters.
    frozen, unused, averaged : collection of str
        Names and patterns of the user; see :class:`~mpizero.adapters.torch.TorchModel`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        dtype: np.dtype[Any],
        *,
        frozen: Collection[str],
        unused: Collection[str],
        averaged: Collection[str],
    ) -> None:
        parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        buffers = [name for name, _ in module.named_buffers(remove_duplicate=False)]
        held = dict(module.named_parameters(remove_duplicate=False))  # a tied one has several names
        self._frozen = {id(held[name]) for name in chosen_names(parameters, "frozen", frozen)}
        self._unused = {id(held[name]) for name in chosen_names(parameters, "unused", unused)}
        self._averaged = chosen_names(buffers, "averaged", averaged, "buffer")
        self._dtype, self._order = dtype, tuple(module.state_dict())
        self._running = bound.running_statistics(module)
        self._homes: dict[int, str] = {}
        self._stored: list[bound.Held] = []

    def describe(self, block: str, module: torch.nn.Module) -> BlockTensors:
        """Return what the module of a block holds. Not collective."""
        parameters = bound.held_parameters(module)
        stored, specs = list(parameters.values()), []
        for identity, one in parameters.items():
            whole = joined(block, one.name)
            home = self._homes.setdefault(identity, whole)
            tied, trainable = None if home == whole else home, one.trainable and identity not in self._frozen
            specs.append(ParameterSpec(one.name, one.shape, decay=len(one.shape) > 1, trainable=trainable, tied=tied))
        integers, numbers, kept = [], [], []
        for identity, one in bound.held_buffers(module).items():
            whole, dtype = joined(block, one.name), str(one.now.dtype).removeprefix("torch.")
            averaged, saved = identity in self._running or whole in self._averaged, whole in self._order
            if refusal := self._refusal(averaged, saved, dtype, self._homes.setdefault(identity, block), block):
                raise ConfigError(f"TorchModel: buffer {whole!r} {refusal}")
            if saved and dtype in INTEGER_DTYPES:
                integers.append(one)
                numbers.append(IntegerSpec(one.name, one.shape, dtype))
            elif averaged or (saved and dtype == self._dtype):
                stored.append(one)
                specs.append(ParameterSpec(one.name, one.shape, decay=False, trainable=averaged, averaged=averaged))
                self._stored.append(one)
            else:
                kept.append(one)
        place = {name: number for number, name in enumerate(self._order)}
        order = sorted(range(len(stored)), key=lambda n: place.get(joined(block, stored[n].name), len(place)))
        stored, specs = [stored[n] for n in order], [specs[n] for n in order]
        names = frozenset(one.name for one in parameters.values())
        unused = frozenset(one.name for identity, one in parameters.items() if identity in self._unused)
        return BlockTensors(tuple(stored), tuple(specs), tuple(integers), tuple(numbers), tuple(kept), names, unused)

    def _refusal(self, averaged: bool, saved: bool, dtype: str, home: str, block: str) -> str | None:
        """Return why a buffer cannot be stored as the module would have it, None if it can."""
        if averaged and home != block:
            return (
                f"is in block {home!r}, too: each block would have a statistic of its own; put both uses into one "
                "block, or give each its own norm"
            )
        if averaged and not saved:
            return (
                "of averaged= was registered with persistent=False, but statistics are stored and exported with the "
                "parameters: leave persistent=False out"
            )
        if saved and dtype != self._dtype and dtype not in INTEGER_DTYPES:
            return (
                f"is {dtype} and would be missing from checkpoints, whose other arrays are all {self._dtype}, as the "
                "parameters are: convert it, or register it with persistent=False if the code makes it again"
            )
        return None

    def forget_values(self) -> None:
        """Free the memory of the buffers that mpizero stores. Not collective."""
        for one in self._stored:
            empty = torch.empty_like(one.now, device="meta")
            for place, key in one.places:
                place[key] = empty


def chosen_names(names: list[str], where: str, patterns: Collection[str], what: str = "parameter") -> frozenset[str]:
    """Return those of some names that the patterns of an argument choose; an error for a pattern that fits none."""
    where = f"TorchModel: {where}"
    return frozenset(selected(names, where, as_patterns(where, patterns), what))
