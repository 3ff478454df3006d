"""Define assertions that fail on all ranks together, so that no rank is left waiting for one that failed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.comm.startup import communicator_of, one_process
from mpizero.errors import ArgumentError
from mpizero.testing.differences import first_difference
from mpizero.types import BlockModel, Layer


def parallel_assert(comm: Communicator, condition: object, message: str = "") -> None:
    """Assert that ``condition`` is true on every rank; otherwise raise the same error on all ranks.

    Collective over ``comm``.

    Raises
    ------
    AssertionError
        On every rank, if ``condition`` is false on any rank. The message names these ranks and contains their
        ``message``.

    Examples
    --------
    >>> import mpizero as mz
    >>> from mpizero.testing import parallel_assert, run_in_threads
    >>> def check(comm):
    ...     parallel_assert(comm, comm.rank < 2, "there is no data")
    >>> run_in_threads(2, check)
    [None, None]
    >>> run_in_threads(3, check)
    Traceback (most recent call last):
        ...
    AssertionError: rank 2: there is no data
    """
    answers = comm.allgather_object((bool(condition), message), tag="parallel_assert")
    if wrong := [f"rank {rank}: {text or 'false'}" for rank, (right, text) in enumerate(answers) if not right]:
        raise AssertionError("; ".join(wrong))


def assert_same_as_serial(
    checked: Any,
    comm: Any = None,
    x: Any = None,
    y: Any = None,
    *,
    tiles: int = 4,
    axis: str = "tensor",
    steps: int = 2,
    **settings: Any,
) -> None:
    """Assert that a function, a model or a layer gives on several ranks the bits that it gives on one.

    Collective over ``comm``. *A function*: ``function(comm)`` returns, on every rank, what it returns for a
    communicator of one rank: numbers, strings, arrays, or nested mappings, lists and tuples of them. Arrays are
    compared by dtype, shape and bytes, so that NaN equals itself and 0.0 differs from -0.0.

    *A model of blocks or a layer that can be split*, ``assert_same_as_serial(layer, x=x)``: first all tiles run in this
    process; they are compared with the whole layer, within rounding, and with one another, by bits, where each has the
    whole. Then groups of ``tiles`` ranks, half as many, and so on, train like one process that computes all tiles:
    after each step loss, gradients and parameters have the same bits.

    Parameters
    ----------
    checked : callable, BlockModel or Layer
        If ``x`` is of floats, a layer is trained behind a ``LayerNorm``; its loss is ``MeanSquaredError``.
    comm : Communicator or mpi4py communicator, optional
        The ranks of the group. None, for models and layers only: threads of this process, in groups of all sizes.
    x, y : array
        Inputs and targets, the same in every step on all ranks. ``y=None`` is zeros, for a layer with ``output_shape``.
    tiles : int
        Number of tiles, a power of two of at least 2.
    axis : {"tensor", "context"}
        What the group splits: layers (``split``), or sequences (``context``).
    steps : int
        Number of steps of training, with AdamW.
    **settings
        Settings of :class:`~mpizero.ShardingConfig`, such as ``micro_batch`` and ``clip``.

    Raises
    ------
    AssertionError
        On every rank, if something differs on any. The message names these ranks and the first difference on each, or
        the layer's block, tile, parameter and line, or ranks, step and array.
    ConfigError
        If the model cannot be split so, or ``tiles`` or ``axis`` is wrong or does not fit ``comm``.
    RemoteError
        On the other ranks if the function or the layer raises any other error on some; names these and the first error.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.testing import assert_same_as_serial, run_in_threads
    >>> model, x, y = mz.nn.MLP(6, [8], 2), np.eye(6, dtype=np.float32), np.arange(6) % 2
    >>> run_in_threads(2, lambda comm: assert_same_as_serial(model, comm, x, y, tiles=2))
    [None, None]
    """
    _assert_same(checked, comm, (x, y), {"tiles": tiles, "axis": axis, "steps": steps, "settings": settings})


def _assert_same(checked: Any, comm: Any, batch: tuple[Any, Any], options: dict[str, Any]) -> None:
    if isinstance(checked, BlockModel | Layer) and not isinstance(checked, type):
        from mpizero.testing.split_layers import split_training

        training = split_training(checked, *batch, **options)
        with nullcontext() if comm is None else communicator_of(comm) as ranks:
            training.check(ranks)
        return
    _compare_results(checked, comm)


def _compare_results(function: Any, comm: Any) -> None:
    told = f"assert_same_as_serial: {function!r:.80} is"
    if isinstance(function, type):
        raise ArgumentError(f"{told} a class: call it to make a layer or a model")
    if not callable(function):
        raise ArgumentError(f"{told} neither a function, a model of blocks nor a layer")
    if comm is None:
        raise ArgumentError(f"{told} a function of ranks, and comm is missing")
    with communicator_of(comm) as ranks:
        difference = ""
        with all_ranks(ranks, "assert_same_as_serial"):
            try:
                difference = first_difference(function(ranks), function(one_process()))
            except AssertionError as error:
                difference = str(error) or "false"
        parallel_assert(ranks, not difference, difference)
