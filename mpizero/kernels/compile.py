"""Define the decorator of CPU kernels: one process per node compiles a kernel with numba, the others load it from disk.

::

    from mpizero.kernels.compile import kernel
    from mpizero.kernels.formulas.optimizer import sgd as updated      # a plain Python scalar function

    @kernel("void(T[::1], const T[::1], const T[::1], i8, i8)")
    def sgd(w, g, hyper, start, stop):
        w, g = w[start:stop], g[start:stop]      # not range(start, stop): see below
        lr, decay = hyper[0], hyper[1]
        for i in range(w.size):
            w[i] = updated(w[i], g[i], lr, decay)

Rules for kernels, each found by measuring:

- Formulas and helpers are plain Python functions of the package ``mpizero.kernels``, called by name; they are inlined,
  but for long ones that are decorated with :func:`apart`.
- Formulas have no float literals, because these turn float32 into float64.
- Loops run from 0: with ``range(start, stop)`` numba must allow for negative indices, and nothing vectorizes.
- Kernels neither allocate memory nor raise exceptions, because the object file must run without numba's run time.
  Temporary memory is the last parameter; ``scratch=`` gives its size, and callers do not pass it.
- Array arguments are C-contiguous; those declared ``const`` may be read-only. Scalars are i8, u8, i4, u4, f8 or f4, and
  results are void, bool, i8 or f8.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mpizero._util.text import notice
from mpizero.kernels import cache, object_files, pool, processor
from mpizero.kernels.signature import Parameter, Signature

#: What the names of modules with kernels begin with.
PACKAGE = "mpizero.kernels."
#: What ``T`` stands for in a signature, by NumPy's character of an argument's dtype.
DTYPES = {"f": "f4", "d": "f8"}
#: The object that machine code returns when an argument does not fit its signature; the class exists in every process.
REFUSED: Any = np.ndarray
#: Least number of elements of a thread's part of divided arrays: fewer take no longer than a second thread to begin.
_WORTH_A_THREAD = 1 << 19
_COMPILER = threading.RLock()  # neither numba's pipeline nor llvmlite may be entered by two threads


class Intrinsic(ABC):
    """Represent an operation of the processor that Python lacks; a kernel calls an instance like a function."""

    @abstractmethod
    def compiled(self) -> Any:
        """Return the numba ``intrinsic`` that compiled kernels call instead of this object."""

    @abstractmethod
    def __call__(self, *args: Any) -> Any:
        """Do the operation in plain Python, for kernels that are not compiled."""


class Kernel:
    """Represent a compiled function of arrays, which is compiled or loaded at the first call with each dtype.

    Attributes
    ----------
    python : function
        The plain Python function from which the kernel is compiled. Under ``NUMBA_DISABLE_JIT=1`` it runs uncompiled.
    signature : Signature
        Types of all parameters, including the temporary memory, which callers do not pass.
    """

    def __init__(
        self, python: Callable[..., Any], signature: Signature, scratch: int, names: Iterable[str] = ()
    ) -> None:
        functools.update_wrapper(self, python)
        self.name = python.__qualname__
        self.python = python
        self.signature = signature
        self._scratch = scratch
        self._calls: dict[str, Callable[..., Any]] = {}
        self._code: list[Any] = []  # owners of the machine code behind `_calls`
        self._latest: Callable[..., Any] = _refuse
        parameters = list(inspect.signature(python).parameters.values())
        if names:
            parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        if len(parameters) != len(signature.parameters):
            raise TypeError(
                f"kernel {self.name}: {len(parameters)} parameters, but the signature has {len(signature.parameters)}"
            )
        self.__signature__ = inspect.Signature(parameters[: -1 if scratch else None])

    def __call__(self, *args: Any) -> Any:
        """Run the kernel and return its result; Python's interpreter lock is released while it runs.

        Raise TypeError if an argument does not fit the signature.
        """
        # Machine code checks its own arguments, so the dtype is looked at only when the latest code refuses them.
        try:
            result = self._latest(*args)
        except TypeError:
            self._check(args)
            raise
        return self._choose(args) if result is REFUSED else result

    def _choose(self, args: tuple[Any, ...]) -> Any:
        """Run the machine code for the arguments' dtype, after compiling or loading it; return the kernel's result.

        Raise TypeError if it refuses arguments that fit the signature.
        """
        char = self._check(args)
        self.load(char)
        self._latest = chosen = self._calls[char]  # another thread may choose its own before the next line
        if (result := chosen(*args)) is REFUSED:
            raise TypeError(f"kernel {self.__module__}.{self.name} refuses {', '.join(map(_describe, args))}")
        return result

    @property
    def loaded(self) -> tuple[str, ...]:
        """NumPy's characters ("f" or "d") of the dtypes for which the kernel has been compiled or loaded."""
        return tuple(self._calls)

    def load(self, char: str) -> None:
        """Compile the kernel for the dtype of NumPy's character "f" or "d", or load its code, if not done yet."""
        with _COMPILER:
            if char not in self._calls:
                dtype = DTYPES[char]
                self._calls[char] = self._interpreted(dtype) if cache.interpreted() else self._load(dtype)

    def _check(self, args: tuple[Any, ...]) -> str:
        """Return NumPy's character ("f" or "d") of the dtype that ``T`` stands for in a call with these arguments.

        Raise TypeError if an argument does not fit the signature.
        """
        names = list(self.__signature__.parameters)
        title = f"kernel {self.__module__}.{self.name}"
        if len(args) != len(names):
            raise TypeError(f"{title} takes {len(names)} arguments ({', '.join(names)}), got {len(args)}")
        position = self.signature.template
        char = "f" if position is None else getattr(getattr(args[position], "dtype", None), "char", "f")
        signature = self.signature.resolve(DTYPES.get(char, "f4"))
        for name, value, parameter in zip(names, args, signature.parameters, strict=False):
            if not parameter.accepts(value):
                raise TypeError(f"{title}: {name} must be {parameter}, got {_describe(value)}")
        return char

    def _interpreted(self, dtype: str) -> Callable[..., Any]:
        signature = self.signature.resolve(dtype)

        def call(*args: Any) -> Any:
            expected = signature.parameters[: -1 if self._scratch else None]
            if len(args) != len(expected) or not all(map(Parameter.accepts, expected, args)):
                return REFUSED
            scratch = [np.zeros(self._scratch, signature.parameters[-1].dtype)] if self._scratch else []
            return self.python(*args, *scratch)

        return call

    def _entry(self, dtype: str) -> str:
        """Return the name, unique in the process, of the entry function for a dtype ("f4" or "f8")."""
        place = self.__module__.removeprefix(PACKAGE)
        return f"{place}.{self.name}-{dtype}" + ("" if self._cached else f"-{id(self):x}")

    @property
    def _cached(self) -> bool:
        """True if the kernel may be cached: if it is part of ``mpizero.kernels``, whose sources are the cache's key."""
        return self.__module__.startswith(PACKAGE)

    def _load(self, dtype: str) -> Callable[..., Any]:
        entry = self._entry(dtype)
        if self._cached:
            path = cache.folder(processor.cpu_identity()) / f"{entry}.o"
            if not path.exists():
                _announce_compiling(path.parent)
            code = cache.load_or_build(path, lambda: self._build(dtype))
        else:
            code = self._build(dtype)
        self._code.append(object_files.Native(self.name, code, entry))
        call: Callable[..., Any] = self._code[-1].call
        return call

    def _build(self, dtype: str) -> bytes:
        """Compile the kernel for a dtype ("f4" or "f8") with numba, and return the contents of the object file."""
        from mpizero.kernels import native

        signature = self.signature.resolve(dtype)
        dispatcher = _jit(self.python)
        arguments = _folded(self.python, tuple(numba_type(p) for p in signature.parameters))
        dispatcher.compile(arguments)
        compiled = dispatcher.overloads[arguments]
        if str(compiled.signature.return_type) != (expected := _RESULTS[signature.result]):
            raise TypeError(f"kernel {self.name} returns {compiled.signature.return_type}, not {expected}")
        scratch = self._scratch * np.dtype(signature.parameters[-1].dtype).itemsize if self._scratch else 0
        function, code = compiled.fndesc.llvm_func_name, compiled.library.get_llvm_str()
        return native.emit(code, function, signature, scratch, self._entry(dtype))


class DividedKernel(Kernel):
    """Represent a kernel without a result whose large arrays are divided between threads: see :func:`kernel`.

    Attributes
    ----------
    divided : tuple of int
        Positions of the parameters that are divided.
    """

    def __init__(self, divided: Iterable[str], *args: Any) -> None:
        super().__init__(*args)
        order = list(self.__signature__.parameters)
        self.divided = tuple(order.index(name) for name in divided)

    def __call__(self, *args: Any) -> None:
        """Run the kernel, in as many of the rank's threads as are worth it; raise as :class:`Kernel` does."""
        if (parts := self._parts(args)) > 1:
            pool.run_divided(super().__call__, args, self.divided, parts)
        else:
            super().__call__(*args)

    def _parts(self, args: tuple[Any, ...]) -> int:
        """Return into how many parts to divide arrays, one a thread; 1 if they are small, or not of equal length.

        Raise TypeError, which tells of whole arrays, if there were several parts of ones that do not fit the signature.
        """
        first = args[self.divided[0]] if len(args) > self.divided[0] else None
        if (parts := pool.threads_for(getattr(first, "size", 0), _WORTH_A_THREAD)) == 1:
            return 1
        self._check(args)
        lengths = {len(args[i]) for i in self.divided}
        return min(parts, len(args[self.divided[0]])) if len(lengths) == 1 else 1


_RESULTS = {"void": "none", "bool": "bool", "i8": "int64", "f8": "float64"}


def kernel(
    signature: str, scratch: int = 0, names: Iterable[str] = (), divided: Iterable[str] = ()
) -> Callable[[Callable[..., Any]], Kernel]:
    """Make a decorator that turns a plain Python function into a kernel; nothing is compiled yet.

    Parameters
    ----------
    signature : str
        Types of the result and of the parameters, for example ``"void(const T[:,::1], T[::1], i8)"``. ``T`` stands for
        float32 or float64, depending on the arguments of a call. ``const`` marks arrays that are only read.
    scratch : int
        Number of elements of the last parameter, a 1-D array of temporary memory (on the stack, contents undefined)
        that callers do not pass. 0 means that the kernel has no such parameter.
    names : iterable of str
        Names of all parameters. They are needed only for a function that takes some of its parameters as ``*args``.
    divided : iterable of str
        Names of arrays of equal length on the first axis, the largest first. The kernel computes what belongs to an
        index of this axis from that index's elements and the other arguments alone. So a rank's threads compute parts
        of large arrays.
    """
    parsed = Signature.parse(signature)
    if divided:
        return lambda python: DividedKernel(divided, python, parsed, scratch, names)
    return lambda python: Kernel(python, parsed, scratch, names)


def apart(helper: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a long helper function that kernels call in several places: it is compiled once, not inlined in each."""
    vars(helper)["apart"] = True
    return helper


@functools.cache
def _announce_compiling(folder: Path) -> None:
    """Print a notice that kernels are being compiled, and how many at most: once, in the first process of a node."""
    if not cache.speaks():
        return
    import pkgutil

    cpu = importlib.import_module(f"{PACKAGE}cpu")
    for found in pkgutil.iter_modules(cpu.__path__, f"{PACKAGE}cpu."):
        importlib.import_module(found.name)
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(PACKAGE)]
    kernels = {value for module in modules for value in vars(module).values() if isinstance(value, Kernel)}
    missing = sum(not any((folder / f"{one._entry(dtype)}.o").exists() for dtype in DTYPES.values()) for one in kernels)
    notice(
        f"kernels: {missing} of {len(kernels)} are not compiled yet for this CPU; those that a program uses are, once "
        f"on a machine, for some seconds each (kept in {folder})"
    )


def _refuse(*args: Any) -> Any:
    return REFUSED


def numba_type(parameter: Parameter) -> Any:
    """Return numba's type for a parameter, whose dtype must not be "T"."""
    from numba import from_dtype
    from numba import types as numba_types

    scalar = from_dtype(np.dtype(parameter.dtype))
    if parameter.ndim == 0:
        return scalar
    return numba_types.Array(scalar, parameter.ndim, "A" if parameter.strided else "C", readonly=parameter.readonly)


def _folded(python: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``arguments``, the numba types of a call's arguments, with the types of ``*args`` in one tuple type."""
    from numba import types as numba_types

    code: types.CodeType = python.__code__
    if not code.co_flags & inspect.CO_VARARGS:
        return arguments
    return *arguments[: code.co_argcount], numba_types.StarArgTuple(arguments[code.co_argcount :])


def _jit(python: Callable[..., Any], **options: Any) -> Any:
    """Return numba's dispatcher of a function, which compiles it when it is called or asked to.

    The functions and kernels of ``mpizero.kernels`` that it calls are inlined. ``options`` are passed to numba.
    """
    import numba

    linked = with_compiled_helpers(python, _inlined)
    # Only the machine code is used: numba's two wrappers for Python and C would double the time.
    options |= {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(**options)(linked)


@functools.cache
def _inlined(helper: Callable[..., Any]) -> Any:
    return _jit(helper, forceinline=not vars(helper).get("apart", False))


def with_compiled_helpers(python: Callable[..., Any], wrap: Callable[[Callable[..., Any]], Any]) -> Any:
    """Return a copy of a function that calls ``wrap(f)`` instead of f, for functions and kernels of this package.

    The package is ``mpizero.kernels``. An :class:`Intrinsic` is replaced by what its ``compiled`` returns.
    """

    def linked(helper: Any) -> Any:
        if isinstance(helper, Kernel):
            return wrap(helper.python)
        if isinstance(helper, types.FunctionType) and helper.__module__.startswith(PACKAGE):
            return wrap(helper)
        return helper.compiled() if isinstance(helper, Intrinsic) else helper

    source: Any = python
    scope = dict(source.__globals__)
    scope.update({name: linked(scope[name]) for name in source.__code__.co_names if name in scope})
    closure = tuple(types.CellType(linked(cell.cell_contents)) for cell in source.__closure__ or ())
    copy = types.FunctionType(source.__code__, scope, source.__name__, source.__defaults__, closure or None)
    return functools.update_wrapper(copy, python, updated=())


def _describe(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return f"{value!r} ({type(value).__name__})"
    flags = value.flags
    notes = [n for n, ok in (("not C-contiguous", flags.c_contiguous), ("read-only", flags.writeable)) if not ok]
    return f"{value.dtype} of shape {value.shape}" + "".join(f", {note}" for note in notes)
