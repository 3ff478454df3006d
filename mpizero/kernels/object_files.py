"""Load object files of machine code into this process, and call their functions as Python builtins.

LLVM could load them, but its library is of 180 MB: with 64 ranks on two cores it took a twelfth of a training's start.
What LLVM writes for the x86-64 CPUs of a JIT has absolute addresses only, and placing those is all that loading needs.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import struct
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np

from mpizero.kernels import processor

C_CONTIGUOUS, ALIGNED, WRITEABLE = 0x1, 0x100, 0x400
_METH_FASTCALL = 0x80
_ELF64, _X86_64 = b"\x7fELF\x02\x01", 62
_CONTENTS, _SYMBOLS, _RELOCATIONS, _UNWINDING, _ABSOLUTE = 1, 2, 4, 0x70000001, 1
_WRITABLE, _IN_MEMORY = 0x1, 0x2
_Section = namedtuple("_Section", "name kind flags address offset size link target align entry_size")
_SECTION = np.dtype("<u4, <u4, <u8, <u8, <u8, <u8, <u4, <u4, <u8, <u8")
_Symbol = namedtuple("_Symbol", "name kind visibility section value size")  # section 0: it is in another file
_SYMBOL = np.dtype("<u4, u1, u1, <u2, <u8, <u8")
_Relocation = namedtuple("_Relocation", "offset kind symbol addend")
_RELOCATION = np.dtype("<u8, <u4, <u4, <i8")


class ArrayLayout:
    """Hold the offsets, in bytes, of fields in NumPy's array objects, its dtype objects and Python's object header.

    ``data``, ``ndim``, ``shape``, ``strides``, ``dtype`` and ``flags`` are fields of an array; ``kind``, ``byte_order``
    and ``type_number`` are fields of a dtype; ``type`` is the type of any object. NumPy has not changed its fields
    since version 1.0, because they are part of its C ABI.
    """

    def __init__(self) -> None:
        head = object.__basicsize__
        self.type = head - 8
        self.data, self.ndim, self.shape, self.strides = head, head + 8, head + 16, head + 24
        self.dtype, self.flags = head + 40, head + 48
        self.kind, self.byte_order, self.type_number = head + 8, head + 10, head + 12


class _MethodDef(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


class Native:
    """Load the machine code of a kernel and hold it as a Python builtin.

    Parameters
    ----------
    name : str
        Name of the builtin.
    code : bytes
        Contents of the object file.
    entry : str
        Name of the entry function in the object file, unique in the process.

    Attributes
    ----------
    call : builtin
        Runs the kernel and returns its result. If an argument does not fit the kernel's signature, it returns the
        class ``np.ndarray`` instead and does nothing.

    Raises
    ------
    RuntimeError
        If array objects of this Python and NumPy have an unknown layout in memory.
    OSError
        If the system lets no process write machine code.
    """

    def __init__(self, name: str, code: bytes, entry: str) -> None:
        _check_layout()
        address = _place(code, entry) or _place_by_llvm(code, entry)
        self._method = _MethodDef(name.encode(), address, _METH_FASTCALL, None)
        new = ctypes.pythonapi.PyCFunction_NewEx
        new.restype, new.argtypes = ctypes.py_object, (ctypes.POINTER(_MethodDef), ctypes.py_object, ctypes.c_void_p)
        self.call: Callable[..., Any] = new(ctypes.byref(self._method), np.ndarray, None)


@functools.cache
def _check_layout() -> None:
    probe = np.zeros((2, 3), np.float64)
    at = ArrayLayout()
    base = id(probe)
    if (
        ctypes.c_void_p.from_address(base + at.data).value != probe.ctypes.data
        or ctypes.c_int.from_address(base + at.ndim).value != 2
        or not ctypes.c_int.from_address(base + at.flags).value & C_CONTIGUOUS
        or ctypes.c_int.from_address(id(probe.dtype) + at.type_number).value != probe.dtype.num
    ):
        raise RuntimeError(f"NumPy {np.__version__} lays out arrays in a way that mpizero's kernels do not know")


@functools.cache
def address_of(name: str) -> int:
    """Return the address of a function of Python, or of the libraries that it brings; 0 if there is none."""
    function = getattr(ctypes.pythonapi, name, None)
    return (function and ctypes.cast(function, ctypes.c_void_p).value) or 0


class _ObjectFile:
    """Read an x86-64 object file, whose format is that of the System V ABI and its AMD64 supplement, chapter 4.

    Attributes
    ----------
    places : dict of int to int
        Where the sections that belong into memory lie in an image of the file, by number of the section.
    size : int
        Bytes of the image.
    relocations : list of tuple
        Place in the image, and record, of each address that is to be written.
    supported : bool
        Whether all that belongs into memory is contents that do not change, and all addresses are absolute.
    """

    def __init__(self, code: bytes) -> None:
        self._code = code
        (start,), (count,) = struct.unpack_from("<Q", code, 40), struct.unpack_from("<H", code, 60)
        self._sections = [_Section(*row) for row in np.frombuffer(code, _SECTION, count, start).tolist()]
        self.places: dict[int, int] = {}
        self.size, self.supported = 0, True
        for number, section in enumerate(self._sections):
            if section.flags & _IN_MEMORY and section.size and section.kind != _UNWINDING:
                self.supported &= section.kind == _CONTENTS and not section.flags & _WRITABLE
                self.places[number] = -(-self.size // section.align) * section.align
                self.size = self.places[number] + section.size
        table = next(section for section in self._sections if section.kind == _SYMBOLS)
        self._names = self._sections[table.link].offset
        self._symbols = [_Symbol(*row) for row in self._rows(_SYMBOL, table)]
        self.relocations = [
            (self.places[section.target] + row[0], _Relocation(*row))
            for section in self._sections
            if section.kind == _RELOCATIONS and section.target in self.places
            for row in self._rows(_RELOCATION, section)
        ]
        for _, record in self.relocations:
            self.supported &= record.kind == _ABSOLUTE and self._symbols[record.symbol].section in {0, *self.places}

    def _rows(self, kind: np.dtype[Any], section: _Section) -> Any:
        return np.frombuffer(self._code, kind, section.size // kind.itemsize, section.offset).tolist()

    def _address(self, symbol: _Symbol, base: int) -> int:
        if symbol.section:
            return base + self.places[symbol.section] + int(symbol.value)
        name = self._name(symbol)
        if not (found := address_of(name)):
            raise RuntimeError(f"machine code needs the function {name}, which this process has not")
        return found

    def _name(self, symbol: _Symbol) -> str:
        start = self._names + symbol.name
        return self._code[start : self._code.index(0, start)].decode()

    def write(self, memory: mmap.mmap, base: int) -> None:
        """Write the image into memory, which begins at the address ``base``."""
        for number, place in self.places.items():
            section = self._sections[number]
            memory[place : place + section.size] = self._code[section.offset : section.offset + section.size]
        for place, record in self.relocations:
            address = self._address(self._symbols[record.symbol], base) + record.addend
            struct.pack_into("<Q", memory, place, address)

    def address(self, function: str, base: int) -> int:
        """Return the address of a function of the file in an image at the address ``base``."""
        return next(self._address(s, base) for s in self._symbols if s.section and self._name(s) == function)


def _place(code: bytes, entry: str) -> int | None:
    """Place an object file in memory, where it stays, and return the address of its function ``entry``.

    Return None, and do nothing, if the file is not for x86-64 CPUs, or has more than :class:`_ObjectFile` knows.
    """
    if code[:6] != _ELF64 or struct.unpack_from("<H", code, 18)[0] != _X86_64:
        return None
    file = _ObjectFile(code)
    if not file.supported:
        return None
    memory = mmap.mmap(-1, file.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))  # never freed, because a kernel may still be running
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    file.write(memory, base)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    if protect(ctypes.c_void_p(base), ctypes.c_size_t(file.size), mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "written machine code may not run: allow execmem or set NUMBA_DISABLE_JIT=1")
    return file.address(entry, base)


def _place_by_llvm(code: bytes, entry: str) -> int:
    """Have LLVM load an object file, and return the address of its function ``entry``."""
    llvm, engine = processor.initialized_llvm(), _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address: int = engine.get_function_address(entry)
    return address


@functools.cache
def _engine() -> Any:
    """Return the LLVM engine that owns machine code; it is never freed, because a kernel may still be running."""
    llvm, machine = processor.initialized_llvm(), processor.make_target_machine()
    return llvm.create_mcjit_compiler(llvm.parse_assembly(f'target triple = "{machine.triple}"'), machine)
