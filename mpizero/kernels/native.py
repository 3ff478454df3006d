"""Compile a kernel's LLVM code to an object file that needs no numba at run time.

Importing numba takes 0.4 s, and unpickling a cached kernel some 10 ms more. With eight ranks on two cores that is
longer than the first training step. So numba is imported only to compile a kernel. The machine code of the kernel is
stored as an object file, together with that of an *entry function*, which Python calls, and which reads the memory of
NumPy's arrays itself and releases Python's interpreter lock. A call takes less time than through numba's dispatcher.
:mod:`mpizero.kernels.object_files` loads the file.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from mpizero.kernels import processor
from mpizero.kernels.object_files import ALIGNED, C_CONTIGUOUS, WRITEABLE, ArrayLayout, address_of
from mpizero.kernels.signature import Parameter, Signature

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
        Name of the kernel's function in it.
    signature : Signature
        Types of all parameters, without "T".
    scratch : int
        Size of the kernel's temporary memory in bytes; 0 if it needs none.
    entry : str
        Name of the entry function, which Python calls and which calls the kernel.

    Raises
    ------
    RuntimeError
        If the kernel can raise an exception, or needs a function that is missing at run time (to allocate memory).
    """
    llvm, machine = processor.initialized_llvm(), processor.make_target_machine()
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
    missing = [
        used.name
        for used in module.functions
        if used.is_declaration
        and not used.name.startswith("llvm.")
        and (used.name.startswith("NRT_") or not address_of(used.name))  # NRT: numba's, here only now
    ]
    if missing:
        raise RuntimeError(f"kernels neither allocate (use scratch=) nor raise; this one needs {', '.join(missing)}")
    code: bytes = machine.emit_object(module)
    return code


def _may_raise(function: Any) -> bool:
    """Tell whether a function may raise an exception of its own, which numba tells by a status other than 0.

    A status that it returns may also be that of a function which it called, or one of several such.
    """
    text = str(function)
    left, seen = set(re.findall(r"^ +ret i32 (\S+)", text, re.MULTILINE)), {"0"}
    while left - seen:
        value = (left - seen).pop()
        seen.add(value)
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
        here, check, join = self._name(), self._name(), self._name()
        self._lines.append(f"  br label {here}\n{here[1:]}:")
        self._lines.append(f"  br i1 {exact}, label {join}, label {check}\n{check[1:]}:")
        derived = self._assign(f"call i32 @PyType_IsSubtype(ptr {kind}, ptr %self)")
        self._lines.append(f"  br label {join}\n{join[1:]}:")
        is_array = self._assign(f"phi i32 [ 1, {here} ], [ {derived}, {check} ]")
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

        They are: owner and parent (null), number of items, bytes of an item, data, shape, strides in bytes.
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
