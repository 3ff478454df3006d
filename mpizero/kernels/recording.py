"""Record the computations of a thread as a list of calls, which can be repeated without the code that made them.

While a :class:`Recording` is active in a thread, every call of a kernel (:class:`mpizero.kernels.jit.Kernel`) in this
thread is appended to it: the machine code, and the arguments. The code between kernels records nothing, so what it
computes by NumPy must go through :func:`call`. A recording owns references to all arguments: their memory, that of
temporary arrays too, stays as it is, and is used again whenever the calls are repeated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from threading import get_ident
from typing import Any

import numpy as np

from mpizero.errors import ConfigError
from mpizero.types import EVALUATE, Array, Run

_VARIABLE = "MPIZERO_REPLAY"
#: Recordings that a :class:`RecordedCall` keeps, such as those of batches of several sizes.
_MOST_VARIANTS = 8
#: A call is recorded when it has been made this often with the same operands.
WARM_UP = 2
#: The active recording of each thread that has one, by the thread's identifier.
ACTIVE: dict[int, Recording] = {}


class Recording:
    """Collect the kernels that this thread calls, and its calls of :func:`call`, in a ``with`` block, to repeat them.

    Parameters
    ----------
    workspaces : dict
        The arrays that :func:`temporary` returns parts of, by the dtype's character; several recordings may share them.
    run : Run
        What the recorded pass gets besides its input: step, seed, samples.

    Attributes
    ----------
    calls : list of (callable, tuple)
        The calls in their order: what was called, and its arguments.
    """

    def __init__(self, workspaces: dict[str, Array] | None = None, run: Run = EVALUATE) -> None:
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.workspaces = {} if workspaces is None else workspaces
        self._run = run
        #: Of each call that gets a Run: its index, the position of the Run, this Run, and that of the whole pass.
        self._runs: list[tuple[int, int, Run, Run]] = []

    def __enter__(self) -> Recording:
        ACTIVE[get_ident()] = self
        return self

    def __exit__(self, *error: object) -> None:
        del ACTIVE[get_ident()]
        for index, (_, arguments) in enumerate(self.calls):
            runs = [(position, run) for position, run in enumerate(arguments) if isinstance(run, Run)]
            self._runs += [(index, position, run, self._run) for position, run in runs]

    @classmethod
    def joined(cls, recordings: Sequence[Recording]) -> Recording:
        """Return a recording that repeats the calls of several recordings, one after the other."""
        joined = cls()
        for one in recordings:
            first = len(joined.calls)
            joined._runs += [(first + index, position, derived, run) for index, position, derived, run in one._runs]
            joined.calls += one.calls
        return joined

    def repeat(self, run: Run = EVALUATE) -> None:
        """Repeat all calls with the same arguments, the contents of whose arrays may have changed.

        Only arguments of type :class:`~mpizero.types.Run`, such as dropout's, are replaced: by those that the same
        calls get in a pass with ``run``.
        """
        for index, position, derived, recorded in self._runs:
            function, arguments = self.calls[index]
            rebased = rebased_run(derived, recorded, run)
            self.calls[index] = function, (*arguments[:position], rebased, *arguments[position + 1 :])
        for function, arguments in self.calls:
            function(*arguments)

    def memory(self, *others: Array) -> dict[int, int]:
        """Return the sizes in bytes of the arrays that own the memory which the calls use, by the ``id`` of each array.

        Arrays that own the memory of ``others`` are left out.
        """
        excluded = {id(_owner(array)) for array in others}
        values = (value for _, arguments in self.calls for value in arguments if type(value) is np.ndarray)
        owners = {id(owner): owner.nbytes for owner in map(_owner, values)}
        return {owner: size for owner, size in owners.items() if owner not in excluded}


def rebased_run(derived: Run, old: Run, new: Run) -> Run:
    """Return the Run that a layer derives from the Run ``new``, given ``derived``, which it derived from ``old``.

    A Run holds the step, the seed and the samples of a pass.
    """
    first = new.first_sample + derived.first_sample - old.first_sample
    return replace(derived, seed=new.seed, step=new.step, epoch=new.epoch, first_sample=first)


def _owner(array: Array) -> Array:
    """Return the array whose memory ``array`` is a view of."""
    while type(array.base) is np.ndarray:
        array = array.base
    return array


def recording_is_on() -> bool:
    """Tell whether calls are recorded: they are unless the environment variable MPIZERO_REPLAY is 0.

    Raises
    ------
    ConfigError
        If the variable is neither 0 nor 1.
    """
    if (value := os.environ.get(_VARIABLE, "1")) not in ("0", "1"):
        raise ConfigError(f"{_VARIABLE}={value}: expected 1, as it is without, or 0 to repeat nothing from recordings")
    return value == "1"


class RecordedCall:
    """Call a function repeatedly, or repeat a recording of it instead: see [Note: proof of a recording].

    [Note: proof of a recording] A recording that misses something that the function computes would give wrong numbers.
    So a recording is tried before it is used: the function and the recording both compute from numbers that the
    recording has not seen, and all that they write must have the same bits. Otherwise the recording is not used. None
    of these numbers is 0: at a learning rate of 0, say, a missing part of the recording might change no result.

    Attributes
    ----------
    refused : bool
        Whether a recording has failed its proof.
    repeated : bool
        Whether the last call was repeated from a recording.
    """

    def __init__(self) -> None:
        self._variants: list[_Variant] = []
        self.refused, self.repeated = False, False

    def run(
        self,
        function: Callable[[Sequence[Array]], object],
        operands: tuple[Any, ...],
        scalars: Sequence[Array],
        written: Callable[[], Sequence[Array]],
    ) -> None:
        """Call ``function(scalars)``, or repeat its recording.

        Parameters
        ----------
        function : callable
            Function whose kernels read ``scalars``, and besides them only arrays that ``operands`` determine.
        operands : tuple
            Arrays, numbers and bytes on which ``function`` depends, as many in each call. Each different tuple has a
            recording of its own, so there should be few different tuples.
        scalars : sequence of Array
            Small arrays whose contents differ from call to call.
        written : callable
            Returns the arrays that the function updates; the trial of a new recording ([Note: proof of a recording])
            copies them.
        """
        variant = next((one for one in self._variants if all(map(_same, operands, one.operands))), None)
        if variant is None:
            variant = _Variant(operands)
            self._variants = [variant, *self._variants[: _MOST_VARIANTS - 1]]
        self.repeated = variant.recording is not None
        if variant.recording is not None:
            _write(variant.scalars, scalars)
            variant.recording.repeat()
            return
        variant.calls += 1
        if self.refused or variant.calls <= WARM_UP:
            function(scalars)
        else:
            self._record(variant, function, scalars, written())

    def _record(
        self,
        variant: _Variant,
        function: Callable[[Sequence[Array]], object],
        scalars: Sequence[Array],
        results: Sequence[Array],
    ) -> None:
        own = [array.copy() for array in scalars]
        with Recording() as recording:
            function(own)
        after = [array.copy() for array in results]
        others = [np.where(array, array * array.dtype.type(0.75), array.dtype.type(0.0625)) for array in scalars]
        function(others)
        expected = _digests(results)
        _write(results, after)
        _write(own, others)
        recording.repeat()
        self.refused = _digests(results) != expected
        _write(results, after)
        if not self.refused:
            variant.scalars, variant.recording = own, recording


@dataclass
class _Variant:
    """Hold the operands of calls, and how many calls had them; and the recording of these calls, if there is one.

    ``scalars`` are the small arrays, with contents that differ from call to call, which the recording reads.
    """

    operands: tuple[Any, ...]
    calls: int = 0
    scalars: Sequence[Array] = ()
    recording: Recording | None = None


def _same(one: Any, other: Any) -> bool:
    """Tell whether two arrays, numbers or bytes are the same operand.

    Arrays are the same operand if they have the same memory, shape, strides and dtype.
    """
    if one is other or type(one) is not type(other):
        return one is other
    if type(one) is not np.ndarray:
        return bool(one == other)
    return bool(one.__array_interface__ == other.__array_interface__)


def _digests(arrays: Sequence[Array]) -> list[bytes]:
    """Return hashes of the contents of contiguous arrays, which take less memory than copies."""
    return [blake2b(array.data).digest() for array in arrays]


def _write(arrays: Sequence[Array], contents: Sequence[Array]) -> None:
    for array, content in zip(arrays, contents, strict=True):
        array[...] = content


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(*arguments)``; an active recording of this thread gets this call, and none made inside it."""
    if not ACTIVE or (recording := ACTIVE.pop(get_ident(), None)) is None:
        return function(*arguments)
    try:
        result = function(*arguments)
    finally:
        ACTIVE[get_ident()] = recording
    recording.calls.append((function, arguments))
    return result


def assign(out: Array, value: Any) -> None:
    """Write an array or a number ``value`` to ``out``; an active recording gets this call if ``out`` is on the host."""
    if type(out) is np.ndarray:
        call(np.copyto, out, value, "unsafe")
    else:
        out[...] = value


def temporary(size: int, dtype: np.dtype[Any]) -> Array:
    """Return an array of undefined contents that only the next kernel uses.

    While a recording is active, all such arrays of one dtype share the same memory, which stays in the cache.
    """
    if not ACTIVE or (recording := ACTIVE.get(get_ident())) is None:
        return np.empty(size, dtype)
    if dtype.char not in recording.workspaces or recording.workspaces[dtype.char].size < size:
        recording.workspaces[dtype.char] = np.empty(size, dtype)
    return recording.workspaces[dtype.char][:size]
