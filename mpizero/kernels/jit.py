"""Define the decorator of CPU kernels: one process per node compiles a kernel with numba, the others load it from disk.

::

    from mpizero.kernels.jit import kernel
    from mpizero.kernels.formulas import sgd as updated      # a plain Python scalar function

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
- Array arguments are C-contiguous if their last axis is declared as ``::1``, and may have any strides if it is declared
  as ``:``; those declared ``const`` may be read-only. Scalars are i8, u8, i4, u4, f8 or f4, and results are void, bool,
  i8 or f8.

[Note: no contraction] No compiler makes one fused multiply-add of a multiplication and an addition, or adds in another
order than the source says: Numba marks no operation as ``contract`` or ``reassoc`` (that would be ``fastmath``), and
LLVM's target machine fuses only what is marked, on every CPU. Kernels call no function of libm but the square root,
which IEEE 754 defines to the bit, and none of Intel's SVML or of another library: :func:`emit` refuses a kernel that
does. The only fused multiply-adds are those that :mod:`.matmul_tile` asks for explicitly.

Importing numba takes 0.4 s, and unpickling a cached kernel some 10 ms more. With eight ranks on two cores that is
longer than the first training step. So numba is imported only to compile a kernel. :func:`emit` stores its machine code
as an object file, together with that of an *entry function*, which Python calls, and which reads the memory of NumPy's
arrays itself and releases Python's interpreter lock. A call takes less time than through numba's dispatcher.
:mod:`mpizero.kernels.machine_code` loads the file.

A kernel may run in several threads of a rank (:func:`run_range`, :func:`run_divided`); the result does not depend on
their number. Loops over arrays that are not in a cache prefetch the memory one page ahead (:func:`fetch_ahead`): the
processor itself detects that a loop reads memory in order, but only within a page of 4 KB; at each new page it waits
for the page's address and for the first cache lines. Prefetching changes no results. For an input of 1024 x 1024
elements that was last used a tenth of a second before, it lowers the time of GELU's backward pass from 1.9 to 0.8 ns
per element.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mpizero._util.text import notice
from mpizero.kernels import machine_code, recording
from mpizero.kernels.machine_code import ALIGNED, C_CONTIGUOUS, WRITEABLE, ArrayLayout, address_of

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

#: What the names of modules with kernels begin with.
PACKAGE = "mpizero.kernels."
#: What ``T`` stands for in a signature, by NumPy's character of an argument's dtype.
DTYPES = {"f": "f4", "d": "f8"}
#: The object that machine code returns when an argument does not fit its signature; the class exists in every process.
REFUSED: Any = np.ndarray
#: Least number of elements of a thread's part of divided arrays: fewer take no longer than a second thread to begin.
_WORTH_A_THREAD = 1 << 19
_ACTIVE_RECORDINGS = recording.ACTIVE
_COMPILER = threading.RLock()  # neither numba's pipeline nor llvmlite may be entered by two threads


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
        Names of all parameters. The names are needed only for a function that takes some of its parameters as
        ``*args``.
    divided : iterable of str
        Names of arrays of equal length on the first axis, the largest first. The kernel's results at an index of this
        axis depend only on the elements at this index and on arguments that are not divided. So several threads can
        compute parts of large arrays.
    """
    parsed = Signature.parse(signature)
    if divided:
        return lambda python: DividedKernel(divided, python, parsed, scratch, names)
    return lambda python: Kernel(python, parsed, scratch, names)


def apart(helper: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a long helper function that kernels call in several places: it is compiled once, not inlined in each."""
    vars(helper)["apart"] = True
    return helper


_RESULTS = {"void": "none", "bool": "bool", "i8": "int64", "f8": "float64"}


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
        if result is REFUSED:
            result = self._choose(args)
        if _ACTIVE_RECORDINGS and (active := _ACTIVE_RECORDINGS.get(threading.get_ident())) is not None:
            active.calls.append((self._calls[self._check(args)], args))
        return result

    def _choose(self, args: tuple[Any, ...]) -> Any:
        """Run the machine code for the arguments' dtype, after compiling or loading it; return the kernel's result.

        Raise TypeError if the machine code refuses arguments that fit the signature.
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
                self._calls[char] = self._interpreted(dtype) if machine_code.interpreted() else self._load(dtype)

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
        """Return the name, unique in the process, of the function that Python calls for a dtype ("f4" or "f8")."""
        module = self.__module__.removeprefix(PACKAGE)
        return f"{module}.{self.name}-{dtype}" + ("" if self._cached else f"-{id(self):x}")

    @property
    def _cached(self) -> bool:
        """True if the kernel may be cached: it is in ``mpizero.kernels``, whose sources are part of the cache's key."""
        return self.__module__.startswith(PACKAGE)

    def _load(self, dtype: str) -> Callable[..., Any]:
        entry = self._entry(dtype)
        if self._cached:
            path = machine_code.folder(machine_code.cpu_identity()) / f"{entry}.o"
            if not path.exists():
                _announce_compiling(path.parent)
            code = machine_code.load_or_build(path, lambda: self._build(dtype))
        else:
            code = self._build(dtype)
        self._code.append(machine_code.Native(self.name, code, entry))
        call: Callable[..., Any] = self._code[-1].call
        return call

    def _build(self, dtype: str) -> bytes:
        """Compile the kernel for a dtype ("f4" or "f8") with numba, and return the contents of the object file."""
        signature = self.signature.resolve(dtype)
        dispatcher = _jit(self.python)
        arguments = _folded(self.python, tuple(numba_type(p) for p in signature.parameters))
        dispatcher.compile(arguments)
        compiled = dispatcher.overloads[arguments]
        if str(compiled.signature.return_type) != (expected := _RESULTS[signature.result]):
            raise TypeError(f"kernel {self.name} returns {compiled.signature.return_type}, not {expected}")
        scratch = self._scratch * np.dtype(signature.parameters[-1].dtype).itemsize if self._scratch else 0
        function, code = compiled.fndesc.llvm_func_name, compiled.library.get_llvm_str()
        return emit(code, function, signature, scratch, self._entry(dtype))


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
        """Run the kernel, for large arrays in several threads; raise the exceptions of :class:`Kernel`."""
        if (parts := self._parts(args)) > 1:
            run_divided(super().__call__, args, self.divided, parts)
        else:
            super().__call__(*args)

    def _parts(self, args: tuple[Any, ...]) -> int:
        """Return into how many parts, one per thread, to divide arrays; 1 if they are small, or not of equal length.

        Arrays that are large enough to be divided are checked first, so that TypeError describes a whole array.
        """
        first = args[self.divided[0]] if len(args) > self.divided[0] else None
        if (parts := threads_for(getattr(first, "size", 0), _WORTH_A_THREAD)) == 1:
            return 1
        self._check(args)
        lengths = {len(args[i]) for i in self.divided}
        return min(parts, len(args[self.divided[0]])) if len(lengths) == 1 else 1


class Intrinsic(ABC):
    """Represent a CPU operation that Python does not have; a kernel calls an instance like a function.

    A subclass sets ``arguments``, the number of arguments of a call.
    """

    arguments: ClassVar[int]

    def compiled(self) -> Any:
        """Return the numba ``intrinsic`` that compiled kernels call instead of this object."""
        from numba import types as numba_types
        from numba.extending import intrinsic

        def generate(context: Any, *arguments: Any) -> Any:
            self.generate(context, *arguments)
            return context.get_dummy_value()

        def declare(typing: Any, *kinds: Any) -> Any:
            array, integer = numba_types.Array, numba_types.intp
            return numba_types.void(*(kind if isinstance(kind, array) else integer for kind in kinds)), generate

        names = ("typing", *(f"argument{number}" for number in range(self.arguments)))
        vars(declare)["__signature__"] = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names]
        )
        return intrinsic(declare)

    @abstractmethod
    def generate(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        """Write the operation as LLVM code; the parameters are those of numba's ``codegen`` functions.

        Scalar arguments are integers of 64 bits.
        """

    @abstractmethod
    def __call__(self, *args: Any) -> Any:
        """Do the operation in plain Python, for kernels that are not compiled."""


@functools.cache
def _announce_compiling(folder: Path) -> None:
    """Print once, in the first process of a node, how many kernels are not compiled yet."""
    if not machine_code.speaks():
        return
    import pkgutil

    cpu = importlib.import_module(f"{PACKAGE}cpu")
    for module_info in pkgutil.iter_modules(cpu.__path__, f"{PACKAGE}cpu."):
        importlib.import_module(module_info.name)
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
    """Return numba's dispatcher of the function ``python``; a call of its method ``compile`` compiles the function.

    The functions and kernels of ``mpizero.kernels`` that ``python`` calls are compiled with it, and inlined unless
    :func:`apart` has decorated them. ``options`` are passed to numba.
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
    """Return a copy of a function that calls ``wrap(f)`` in place of each function f of ``mpizero.kernels``.

    In place of a kernel, the copy calls ``wrap`` of the kernel's Python function; in place of an :class:`Intrinsic`,
    the result of its method ``compiled``.
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


_PARAMETER = re.compile(r"\s*(const\s+)?(T|[iuf][1248])(\[\s*(?::\s*,\s*)*:(?::1)?\s*\])?\s*")
_SIGNATURE = re.compile(r"\s*(void|bool|i8|f8)\s*\((.*)\)\s*", re.DOTALL)
_SCALARS = ("i8", "u8", "i4", "u4", "f8", "f4")


@dataclass(frozen=True)
class Parameter:
    """Describe one parameter of a kernel: a scalar or an array.

    Attributes
    ----------
    dtype : str
        Type of the scalar or of the elements, such as "f4" or "i8", or "T" for float32 or float64.
    ndim : int
        Number of axes; 0 for a scalar.
    readonly : bool
        Whether the kernel only reads the array.
    strided : bool
        Whether the array may have any strides; otherwise it must be C-contiguous.
    """

    dtype: str
    ndim: int
    readonly: bool
    strided: bool = False

    def resolve(self, template: str) -> Parameter:
        """Return this parameter with dtype ``template`` if its dtype is "T", otherwise unchanged."""
        return replace(self, dtype=template) if self.dtype == "T" else self

    def accepts(self, value: Any) -> bool:
        """Tell whether ``value`` can be passed for this parameter, whose dtype must not be "T"."""
        if self.ndim == 0:
            is_integer = isinstance(value, (int, np.integer))
            return is_integer or (self.dtype[0] == "f" and isinstance(value, (float, np.floating)))
        if not isinstance(value, np.ndarray) or value.dtype != np.dtype(self.dtype) or value.ndim != self.ndim:
            return False
        flags = value.flags
        ordered = self.strided or flags.c_contiguous
        return ordered and flags.aligned and (self.readonly or flags.writeable)

    def __str__(self) -> str:
        if self.ndim == 0:
            return f"a scalar of type {self.dtype}"
        words = ([] if self.strided else ["C-contiguous"]) + ([] if self.readonly else ["writable"])
        return f"a {' '.join(words)} {np.dtype(self.dtype).name} array of {self.ndim} dimension(s)"


@dataclass(frozen=True)
class Signature:
    """Hold the type of a kernel's result ("void", "bool", "i8" or "f8") and its parameters."""

    result: str
    parameters: tuple[Parameter, ...]

    @classmethod
    def parse(cls, text: str) -> Signature:
        """Parse the text of a signature; raise ValueError if it is malformed.

        ``T`` in the text stands for float32 or float64; ``const`` marks arrays that the kernel only reads. ``T[:,:]``
        may have any strides, ``T[:,::1]`` is C-contiguous.
        """
        if (outer := _SIGNATURE.fullmatch(text)) is None:
            raise ValueError(f"kernel signature {text!r}: expected 'void(const T[::1], T[:,::1], i8, ...)'")
        parameters = []
        for part in re.split(r",(?![^\[]*\])", outer[2]) if outer[2].strip() else []:
            if (match := _PARAMETER.fullmatch(part)) is None:
                raise ValueError(f"kernel signature {text!r}: cannot read parameter {part.strip()!r}")
            const, dtype, brackets = match.groups()
            ndim = brackets.count(",") + 1 if brackets else 0
            if ndim == 0 and dtype not in _SCALARS:
                raise ValueError(f"kernel signature {text!r}: scalars are one of {', '.join(_SCALARS)}, not {dtype!r}")
            parameters.append(Parameter(dtype, ndim, const is not None, ndim > 0 and "::1" not in brackets))
        return cls(outer[1], tuple(parameters))

    @property
    def template(self) -> int | None:
        """Index of the first parameter of type "T"; None if there is none."""
        return next((i for i, p in enumerate(self.parameters) if p.dtype == "T"), None)

    def resolve(self, dtype: str) -> Signature:
        """Return this signature with ``dtype`` in place of "T"."""
        return Signature(self.result, tuple(p.resolve(dtype) for p in self.parameters))


BLOCK = 1 << 17


@functools.cache
def _blas_threads() -> Callable[[], int]:
    """Return a function that returns how many threads NumPy's BLAS may use now; 1 if threadpoolctl knows no BLAS.

    For OpenBLAS with POSIX threads, as in NumPy's wheels, the result is OpenBLAS's own function: threadpoolctl searches
    the library for this function at every call, which takes as long as a small kernel.
    """
    from threadpoolctl import ThreadpoolController

    blas: Any = next(iter(ThreadpoolController().select(user_api="blas").lib_controllers), None)
    if blas is None:
        return lambda: 1
    checked = getattr(blas, "check_symbols", ()) if getattr(blas, "threading_layer", "") == "pthreads" else ()
    symbols = [symbol for symbol in checked if "get_num_threads" in symbol and hasattr(blas.dynlib, symbol)]
    return getattr(blas.dynlib, symbols[0]) if symbols else lambda: blas.num_threads or 1


def threads_for(work: int, least: int) -> int:
    """Return how many threads to use for an amount ``work``, such that each thread gets at least the amount ``least``.

    The number is at most that of NumPy's BLAS, which ``ShardingConfig(threads=...)`` sets.
    """
    worth = work // least
    return 1 if worth < 2 else max(1, min(worth, _blas_threads()()))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(threads, thread_name_prefix="mpizero-kernel")


def run_range(kernel: Callable[..., None], args: tuple[Any, ...], start: int, stop: int, threads: int = 1) -> None:
    """Call ``kernel(*args, start, stop)``; with several threads, call it in parallel for blocks of the range.

    A block has ``BLOCK`` elements; the last one can have fewer. The calling thread is one of the ``threads`` threads.

    Raises
    ------
    Exception
        An exception that the kernel raised in one of the threads, after all threads have ended.
    """
    if threads <= 1 or stop - start <= BLOCK:
        kernel(*args, start, stop)
        return
    blocks = range(start, stop, BLOCK)
    run_tasks([functools.partial(kernel, *args, block, min(block + BLOCK, stop)) for block in blocks], threads)


def parts_of(length: int, parts: int, multiple: int = 1) -> list[slice]:
    """Cut ``range(length)`` into ``parts`` ranges of about equal length, which begin at multiples of ``multiple``."""
    cuts = [length * part // parts // multiple * multiple for part in range(parts)] + [length]
    return [slice(start, stop) for start, stop in pairwise(cuts)]


def run_divided(kernel: Callable[..., Any], args: Sequence[Any], divided: Sequence[int], parts: int) -> None:
    """Call ``kernel`` in ``parts`` threads, each with a part of the first axis of ``args[i]`` for ``i`` in ``divided``.

    Raises
    ------
    Exception
        As :func:`run_tasks` raises it.
    """
    tasks = [
        functools.partial(kernel, *(value[part] if i in divided else value for i, value in enumerate(args)))
        for part in parts_of(len(args[divided[0]]), parts)
    ]
    run_tasks(tasks, parts)


def run_tasks(tasks: Iterable[Callable[[], Any]], threads: int) -> None:
    """Call all functions ``tasks`` in ``threads`` threads, of which the calling thread is one.

    Raises
    ------
    Exception
        An exception that a task raised, after all threads have ended.
    """
    recording.call(_run_tasks, tuple(tasks), threads)


def _run_tasks(tasks: tuple[Callable[[], Any], ...], threads: int) -> None:
    left = iter(tasks)

    def work() -> None:
        while (task := next(left, None)) is not None:  # next() on a tuple's iterator is atomic under the lock
            task()

    helpers = [_pool(threads - 1).submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        # A helper that has not begun has nothing left to do, and may wait for this very thread.
        errors = [error for helper in helpers if not helper.cancel() and (error := helper.exception()) is not None]
    if errors:
        raise errors[0]


#: Bytes of a cache line, and how many bytes ahead of the loop memory is prefetched.
LINE, AHEAD = 64, 4096


class _Fetch(Intrinsic):
    """Prefetch the cache line that holds element ``index`` of a contiguous array."""

    arguments = 2

    def __call__(self, array: Any, index: int) -> None:
        """Do nothing, because Python cannot prefetch."""

    def generate(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        """Write LLVM's prefetch instruction, for reading, into all caches."""
        array, index = args
        data = context.make_array(signature.args[0])(context, builder, array).data
        fetch_line(builder, builder.gep(data, [index]))


def fetch_line(builder: Any, pointer: Any, *, written: bool = False) -> None:
    """Write the LLVM instruction that prefetches the cache line of ``pointer`` into all caches, to read or write it."""
    from llvmlite import ir

    byte, integer = ir.IntType(8), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), integer, integer, integer])
    fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte.as_pointer()], kind)
    hints = (ir.Constant(integer, value) for value in (int(written), 3, 1))
    builder.call(fetch, [builder.bitcast(pointer, byte.as_pointer()), *hints])


_fetch = _Fetch()


def fetch_ahead(x: Any, start: Any, stop: Any) -> None:
    """Prefetch the elements that lie ``AHEAD`` bytes after the elements ``start:stop`` of a flat contiguous array."""
    away, line = AHEAD // x.itemsize, LINE // x.itemsize
    for k in range((min(stop + away, x.size) - start - away + line - 1) // line):
        _fetch(x, start + away + k * line)


def fetch_below(x: Any, row: Any, first: Any, stop: Any) -> None:
    """Prefetch ``x[below, first:stop]``, where ``below`` is the first row at least ``AHEAD`` bytes after ``row``."""
    rows, columns = x.shape
    away, line = AHEAD // x.itemsize, LINE // x.itemsize
    below = row + (away + columns - 1) // columns
    if below < rows:
        for k in range((stop - first + line - 1) // line):
            _fetch(x[below], first + k * line)


_LLVM_TYPES = {"i8": "i64", "u8": "i64", "i4": "i32", "u4": "i32", "f8": "double", "f4": "float", "bool": "i8"}
_DECLARATIONS = """
declare i64 @PyLong_AsLongLong(ptr)
declare i64 @PyLong_AsUnsignedLongLongMask(ptr)
declare double @PyFloat_AsDouble(ptr)
declare ptr @PyErr_Occurred()
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyFloat_FromDouble(double)
declare ptr @PyBool_FromLong(i64)
declare ptr @Py_BuildValue(ptr, ...)
declare i32 @PyType_IsSubtype(ptr, ptr)
declare void @Py_IncRef(ptr)
define void @NRT_MemInfo_call_dtor(ptr %owner) {
  ret void
}
@none = private constant [1 x i8] zeroinitializer
"""


def emit(function_ir: str, function: str, signature: Signature, scratch: int, entry: str) -> bytes:
    """Compile a kernel and its entry function to an object file, and return the file's contents.

    Parameters
    ----------
    function_ir : str
        LLVM assembly of the kernel, made by numba.
    function : str
        Name of the kernel's function in ``function_ir``.
    signature : Signature
        Types of all parameters, without "T".
    scratch : int
        Size of the kernel's temporary memory in bytes; 0 if it needs none.
    entry : str
        Name of the entry function, which Python calls and which calls the kernel.

    Raises
    ------
    RuntimeError
        If the kernel can raise an exception, needs a function that is missing at run time (to allocate memory), or has
        arithmetic that depends on the CPU or on another library.
    """
    llvm, machine = machine_code.initialized_llvm(), machine_code.make_target_machine()
    module = llvm.parse_assembly(function_ir)
    if any(map(_may_raise, module.functions)):
        raise RuntimeError("kernels neither allocate (use scratch=) nor raise; this one may raise")
    written = _Entry(signature, scratch).text(function, entry)
    module.link_in(llvm.parse_assembly(f'target triple = "{machine.triple}"\n{written}'))
    for defined in (*module.functions, *module.global_variables):
        if not defined.is_declaration and defined.name != entry:
            defined.linkage = "internal"
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=0))
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, builder)
    used = [function.name for function in module.functions if function.is_declaration]
    names = [name for name in used if not name.startswith("llvm.")]
    # NRT: numba's, here only now
    if missing := [name for name in names if name.startswith("NRT_") or not address_of(name)]:
        raise RuntimeError(f"kernels neither allocate (use scratch=) nor raise; this one needs {', '.join(missing)}")
    foreign = [name for name in names if name not in _DEFINED and not name.startswith("Py")]
    foreign += [name for name in used if _LIBM.match(name)] + _REORDERED.findall(str(module))
    if foreign:  # see [Note: no contraction]
        raise RuntimeError(f"the bits of kernels are the same on every CPU; this one has {', '.join(foreign)}")
    code: bytes = machine.emit_object(module)
    return code


#: Functions of C that kernels may call: their results are defined to the bit (IEEE 754 has the square root).
_DEFINED = {"memset", "memcpy", "memmove", "sqrt", "sqrtf"}
#: Functions of LLVM that become calls of libm, or one or two roundings as the CPU likes.
_LIBM = re.compile(r"llvm\.(exp|log|pow|sin|cos|tan|fmuladd)")
#: Words in LLVM assembly that let LLVM reorder or fuse operations.
_REORDERED = re.compile(r" = f(?:add|sub|mul|div) (?:fast|contract|reassoc)\b")


def _may_raise(function: Any) -> bool:
    """Tell whether a function may raise an exception itself: whether it returns a status of its own other than 0.

    A status that the function only passes on, from one or several functions that it calls, does not count.
    """
    text = str(function)
    left, visited = set(re.findall(r"^ +ret i32 (\S+)", text, re.MULTILINE)), {"0"}
    while left - visited:
        value = (left - visited).pop()
        visited.add(value)
        origin = re.search(rf"^ +{re.escape(value)} = (call i32 @|phi i32 (.*))", text, re.MULTILINE)
        if origin is None:
            return True
        left |= set(re.findall(r"\[ ?([^, ]+),", origin[2] or ""))
    return False


class _Entry:
    """Write the LLVM assembly of the entry function of a kernel, which Python calls.

    ``scratch`` is the size of the kernel's temporary memory in bytes.
    """

    def __init__(self, signature: Signature, scratch: int) -> None:
        self._signature = signature
        self._scratch = scratch
        self._lines: list[str] = []
        self._count = 0
        self._at = ArrayLayout()

    def text(self, function: str, entry: str) -> str:
        """Return the LLVM assembly of a module with the entry function, called ``entry``.

        The entry function checks every argument, releases Python's interpreter lock, calls ``function``, takes the lock
        again, and converts the result to a Python object.
        """
        visible = self._signature.parameters[: -1 if self._scratch else None]
        add = self._lines.append
        add(f'define ptr @"{entry}"(ptr %self, ptr %args, i64 %count) {{')
        add(f"  %fits = icmp eq i64 %count, {len(visible)}")
        add("  %result = alloca i64, align 16\n  %exception = alloca ptr, align 16")
        if self._scratch:
            add(f"  %scratch = alloca [{self._scratch} x i8], align 64")
        add("  br i1 %fits, label %good, label %refuse\ngood:")
        arguments = ["ptr %result", "ptr %exception"]
        for position, parameter in enumerate(visible):
            pointer = self._load("ptr", "%args", 8 * position)
            arguments += self._array(pointer, parameter) if parameter.ndim else self._scalar(pointer, parameter)
        if self._scratch:
            arguments += self._scratch_array()
        types = ", ".join(a.split()[0] for a in arguments)
        add("  %thread = call ptr @PyEval_SaveThread()")
        add(f"  %status = call i32 @{function}({', '.join(arguments)})")
        add("  call void @PyEval_RestoreThread(ptr %thread)")
        self._box()
        add("refuse:\n  call void @Py_IncRef(ptr %self)\n  ret ptr %self\nraised:\n  ret ptr null\n}")
        return f"{_DECLARATIONS}\ndeclare i32 @{function}({types})\n" + "\n".join(self._lines)

    def _name(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    def _load(self, kind: str, pointer: str, offset: int) -> str:
        address, value = self._name(), self._name()
        self._lines.append(f"  {address} = getelementptr i8, ptr {pointer}, i64 {offset}")
        self._lines.append(f"  {value} = load {kind}, ptr {address}")
        return value

    def _require(self, condition: str, otherwise: str = "refuse") -> None:
        label = self._name()
        self._lines.append(f"  br i1 {condition}, label {label}, label %{otherwise}\n{label[1:]}:")

    def _assign(self, expression: str) -> str:
        value = self._name()
        self._lines.append(f"  {value} = {expression}")
        return value

    def _array(self, pointer: str, parameter: Parameter) -> list[str]:
        at, dtype = self._at, np.dtype(parameter.dtype)
        kind = self._load("ptr", pointer, at.type)
        exact = self._assign(f"icmp eq ptr {kind}, %self")
        first, check, join = self._name(), self._name(), self._name()
        self._lines.append(f"  br label {first}\n{first[1:]}:")
        self._lines.append(f"  br i1 {exact}, label {join}, label {check}\n{check[1:]}:")
        derived = self._assign(f"call i32 @PyType_IsSubtype(ptr {kind}, ptr %self)")
        self._lines.append(f"  br label {join}\n{join[1:]}:")
        is_array = self._assign(f"phi i32 [ 1, {first} ], [ {derived}, {check} ]")
        self._require(self._assign(f"icmp ne i32 {is_array}, 0"))
        ndim = self._load("i32", pointer, at.ndim)
        self._require(self._assign(f"icmp eq i32 {ndim}, {parameter.ndim}"))
        contiguous = 0 if parameter.strided else C_CONTIGUOUS
        needed = contiguous | ALIGNED | (0 if parameter.readonly else WRITEABLE)
        flags = self._assign(f"and i32 {self._load('i32', pointer, at.flags)}, {needed}")
        self._require(self._assign(f"icmp eq i32 {flags}, {needed}"))
        descriptor = self._load("ptr", pointer, at.dtype)
        self._require(self._assign(f"icmp eq i32 {self._load('i32', descriptor, at.type_number)}, {dtype.num}"))
        order = self._load("i8", descriptor, at.byte_order)
        self._require(self._assign(f"icmp eq i8 {order}, {ord(dtype.byteorder)}"))
        data, sizes = self._load("ptr", pointer, at.data), self._load("ptr", pointer, at.shape)
        shape = [self._load("i64", sizes, 8 * axis) for axis in range(parameter.ndim)]
        strides: list[str] = []
        step = str(dtype.itemsize)
        for size in reversed(shape):
            strides.insert(0, step)
            step = self._assign(f"mul i64 {step}, {size}")
        if parameter.strided:
            steps = self._load("ptr", pointer, at.strides)
            strides = [self._load("i64", steps, 8 * axis) for axis in range(parameter.ndim)]
        items = self._assign(f"sdiv exact i64 {step}, {dtype.itemsize}")
        return self._unpacked(data, items, dtype.itemsize, shape, strides)

    @staticmethod
    def _unpacked(data: str, items: str, itemsize: int, shape: list[str], strides: list[str]) -> list[str]:
        """Return the LLVM arguments by which numba passes an array.

        The arguments are: owner and parent (null), number of items, bytes of an item, data, shape, strides in bytes.
        """
        head = ["ptr null", "ptr null", f"i64 {items}", f"i64 {itemsize}", f"ptr {data}"]
        return head + [f"i64 {number}" for number in (*shape, *strides)]

    def _scratch_array(self) -> list[str]:
        itemsize = np.dtype(self._signature.parameters[-1].dtype).itemsize
        items = str(self._scratch // itemsize)
        return self._unpacked("%scratch", items, itemsize, [items], [str(itemsize)])

    def _scalar(self, pointer: str, parameter: Parameter) -> list[str]:
        kind = _LLVM_TYPES[parameter.dtype]
        if parameter.dtype[0] == "f":
            value = self._assign(f"call double @PyFloat_AsDouble(ptr {pointer})")
            failed = self._assign(f"fcmp oeq double {value}, -1.0")
        else:
            convert = "PyLong_AsLongLong" if parameter.dtype[0] == "i" else "PyLong_AsUnsignedLongLongMask"
            value = self._assign(f"call i64 @{convert}(ptr {pointer})")
            failed = self._assign(f"icmp eq i64 {value}, -1")
        check, join = self._name(), self._name()
        self._lines.append(f"  br i1 {failed}, label {check}, label {join}\n{check[1:]}:")
        error = self._assign("call ptr @PyErr_Occurred()")
        raised = self._assign(f"icmp ne ptr {error}, null")
        self._lines.append(f"  br i1 {raised}, label %raised, label {join}\n{join[1:]}:")
        if parameter.dtype in ("i4", "u4"):
            value = self._assign(f"trunc i64 {value} to i32")
        elif parameter.dtype == "f4":
            value = self._assign(f"fptrunc double {value} to float")
        return [f"{kind} {value}"]

    def _box(self) -> None:
        result = self._signature.result
        if result == "void":
            self._lines.append("  %boxed = call ptr (ptr, ...) @Py_BuildValue(ptr @none)")
        else:
            value = self._load(_LLVM_TYPES[result], "%result", 0)
            if result == "bool":
                value = self._assign(f"zext i8 {value} to i64")
            call = {"bool": "PyBool_FromLong(i64", "i8": "PyLong_FromLongLong(i64", "f8": "PyFloat_FromDouble(double"}
            self._lines.append(f"  %boxed = call ptr @{call[result]} {value})")
        self._lines.append("  ret ptr %boxed")
