"""Keep the machine code of kernels in a folder, and load it into this process as Python builtins.

Kernels are compiled for an instruction set (:func:`instruction_set`), not for a type of CPU. LLVM loads object files
(:class:`Native`). A compiled kernel contains the code that takes and returns Python objects, so numba is imported only
where a kernel has to be compiled.

The folder has one object file per kernel and dtype, compiled by one process per node (:func:`load_or_build`). The
folder's name is a hash of every source file in the package ``mpizero.kernels``, of the versions of Python and of the
compiler, and of the instruction set. So after a change of a formula or of numba a new, empty folder is used, and
outdated code cannot be loaded. A file in the folder is run as machine code, so nobody but this user and root may be
able to write to it. Numba's own cache, which stores pickles, is never used.

[Note: who may write] Files and folders of root are trusted like the user's own, because root can replace any file. The
folder of machine code and the files in it must belong to this user or root, and nobody else may be able to write to
them. For the parent folders the rules are weaker. Somebody who can write to one of them could replace the folder of
machine code, but only by a folder that belongs to them, which is then not accepted. So the parent folders may be
project folders that a group can write, or ``/tmp`` with its sticky bit. No parent folder may be writable by all users
without a sticky bit, and no symbolic link of another user may be on the path, because it may lead anywhere.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import importlib.util
import mmap
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.launch import launched_local_rank
from mpizero._util.text import notice
from mpizero.errors import ConfigError

#: Instruction sets with fused multiply-adds of vectors, the best first: NumPy's names of the feature that a CPU with
#: this set has, and LLVM's name of a CPU that has this set and nothing better.
_SETS = {
    "avx512": (("AVX512F",), "skylake-avx512"),
    "avx2": (("FMA3",), "haswell"),
    "neon": (("ASIMD", "NEON"), "generic"),
}
_CPU = "MPIZERO_CPU"


@functools.cache
def instruction_set() -> str:
    """Return the instruction set for which kernels are compiled: "avx512", "avx2" or "neon", "" if the CPU has none.

    It is the best one of this CPU, unless the environment variable ``MPIZERO_CPU`` names another one that the CPU has.
    The bits of results do not depend on it. NumPy has found the CPU's features by asking the CPU itself: to a program
    in an emulator, /proc/cpuinfo shows the features of the real machine instead of those of the emulated CPU.

    Raises
    ------
    ConfigError
        If ``MPIZERO_CPU`` names an instruction set that is unknown, or that this CPU does not have.
    """
    found = getattr(sys.modules.get("numpy._core._multiarray_umath"), "__cpu_features__", {})
    present = [one for one, (names, _) in _SETS.items() if any(found.get(name) for name in names)]
    if (wanted := os.environ.get(_CPU, "")) and wanted not in present:
        raise ConfigError(f"{_CPU}={wanted}: this CPU has {' and '.join(present) or 'no fused multiply-adds'}")
    return wanted or next(iter(present), "")


def cpu_identity() -> str:
    """Return a text that identifies the CPUs on which the same machine code runs."""
    return f"{os.uname().machine} {instruction_set()}"


@functools.cache
def initialized_llvm() -> Any:
    """Return llvmlite's binding, ready to compile for this CPU."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


def make_target_machine() -> Any:
    """Make a new LLVM target machine for the instruction set; each execution engine owns, and frees, one of its own."""
    chosen = initialized_llvm().Target.from_default_triple()
    _, cpu = _SETS.get(instruction_set(), ((), "generic"))
    return chosen.create_target_machine(cpu=cpu, features="", opt=3, reloc="default", codemodel="jitdefault")


C_CONTIGUOUS, ALIGNED, WRITEABLE = 0x1, 0x100, 0x400
_METH_FASTCALL = 0x80


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
        Runs the kernel and returns its result. If an argument does not fit the kernel's signature, the builtin does
        nothing and returns the class ``np.ndarray``.

    Raises
    ------
    RuntimeError
        If array objects of this Python and NumPy have an unknown layout in memory.
    OSError
        If the system does not let a process run machine code that it has written to memory.
    """

    def __init__(self, name: str, code: bytes, entry: str) -> None:
        _check_layout()
        _check_memory()
        address = _load_object(code, entry)
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
def _check_memory() -> None:
    """Raise OSError if memory that was written cannot be made executable: LLVM would then abort the process."""
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(buffer := ctypes.c_char.from_buffer(page))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    if protect(ctypes.c_void_p(start), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "written machine code may not run: allow execmem or set NUMBA_DISABLE_JIT=1")
    del buffer
    page.close()


@functools.cache
def address_of(name: str) -> int:
    """Return the address of a C function of the Python interpreter or of its libraries, by name; 0 if there is none."""
    function = getattr(ctypes.pythonapi, name, None)
    return (function and ctypes.cast(function, ctypes.c_void_p).value) or 0


def _load_object(code: bytes, entry: str) -> int:
    """Have LLVM load an object file, and return the address of its function ``entry``."""
    llvm, engine = initialized_llvm(), _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    if not (address := engine.get_function_address(entry)):
        raise RuntimeError(f"machine code has no function {entry}")
    return int(address)


@functools.cache
def _engine() -> Any:
    """Return the LLVM engine that owns all loaded machine code; it is never freed, as a kernel may still be running."""
    llvm, machine = initialized_llvm(), make_target_machine()
    return llvm.create_mcjit_compiler(llvm.parse_assembly(f'target triple = "{machine.triple}"'), machine)


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LINKS = 40
_ANOTHER = "set MPIZERO_CACHE_DIR to a folder that only you can write"


class UnsafeFolderError(PermissionError):
    """Raised for a folder to which other users can write.

    Attributes
    ----------
    remedy : str
        What the user can do about it. (The message of the exception says what is wrong.)
    """

    def __init__(self, path: str, wrong: str, remedy: str) -> None:
        super().__init__(f"{path} {wrong}")
        self.remedy = remedy


def foreign(status: os.stat_result) -> str:
    """Return the reason why other users could have written a file or folder; "" if only this user or root could.

    ``status`` is the status of the file or folder.
    """
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to user {status.st_uid}"
    if status.st_mode & _OTHERS_WRITE:
        who = "all users" if status.st_mode & stat.S_IWOTH else f"group {status.st_gid}"
        return f"can be written by {who} (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def make_folder(root: Path, name: str) -> Path:
    """Return the path of the folder ``name`` in ``root``, after making all folders of the path that are missing.

    Only this user can read and write the folders made.

    Raises
    ------
    UnsafeFolderError
        If other users can write to ``root`` or to the folder, or replace one of them.
    OSError
        If a folder cannot be made.
    """
    for folder in (*reversed(root.parents), root, root / name):
        if not folder.is_dir():
            with suppress(FileExistsError):
                folder.mkdir(0o700)
        if folder in (root, root / name):
            require_private(folder)
    return root / name


def require_private(folder: Path) -> None:
    """Raise :class:`UnsafeFolderError` if other users than this one and root can write to a folder or replace it."""
    *above, (path, status) = _steps_to(folder)
    for step, parent in above:
        _require_safe_step(step, parent)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if wrong := foreign(status):
        remedy = _ANOTHER
        if status.st_uid == os.geteuid():  # what lies in it may be theirs: closing it is not enough
            import shlex

            remedy = f"rm -r {shlex.quote(path)} (it is compiled again)"
        raise UnsafeFolderError(path, wrong, remedy)


def private_folder(base: Path, name: str) -> Path:
    """Return the path of a folder in ``base`` (a folder for all users, such as /tmp) that only this user can write.

    The folder is made if it is missing. All processes of this user on a node get the same folder. If another user has a
    folder called ``name``, this user's folder is called ``name-`` and random letters. If this user has several such
    folders, the first one in alphabetical order is returned, so that processes that run at the same time agree.

    Raises
    ------
    OSError
        If such a folder cannot be made.
    """
    for step, parent in _steps_to(base):
        _require_safe_step(step, parent)
    if _first_private(base, name) is None:
        with suppress(FileExistsError):
            os.mkdir(base / name, 0o700)
    if _first_private(base, name) is None:
        from tempfile import mkdtemp

        mkdtemp(prefix=f"{name}-", dir=base)
    if (chosen := _first_private(base, name)) is None:
        raise PermissionError(errno.EACCES, "a folder made here can be written by others", str(base))
    return chosen


def _first_private(base: Path, name: str) -> Path | None:
    for taken in sorted(os.listdir(base)):
        if taken == name or taken.startswith(f"{name}-"):
            with suppress(FileNotFoundError):
                status = os.lstat(base / taken)
                if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not foreign(status):
                    return base / taken
    return None


def _require_safe_step(path: str, status: os.stat_result) -> None:
    """Raise :class:`UnsafeFolderError` if a folder or link on the path to a folder is unsafe.

    ``status`` is the status of the folder or link. [Note: who may write] says what is safe.
    """
    if stat.S_ISLNK(status.st_mode):
        if status.st_uid not in (0, os.geteuid()):
            raise UnsafeFolderError(path, f"is a link of user {status.st_uid}", _ANOTHER)
    elif status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise UnsafeFolderError(path, "can be written by all users and has no sticky bit", _ANOTHER)


def _steps_to(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (path, status) of every folder and symbolic link on the path to a folder, from / to the folder itself."""
    current, links = "/", 0
    rest = list(reversed(Path(os.path.abspath(path)).parts[1:]))
    yield current, os.lstat(current)
    while rest:
        name = rest.pop()
        step = os.path.dirname(current) if name == ".." else os.path.join(current, name)
        status = os.lstat(step)
        yield step, status
        if not stat.S_ISLNK(status.st_mode):
            current = step
            continue
        links += 1
        if links > _LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = os.readlink(step)
        current = "/" if target.startswith("/") else current
        rest += [part for part in reversed(target.split("/")) if part not in ("", ".")]


_DIGEST = 32
_OTHER_SETTINGS = ("NUMBA_CACHE_DIR", "NUMBA_ENABLE_CUDASIM", "NUMBA_NUM_THREADS")  # they change no machine code


class CacheFolder(NamedTuple):
    """Describe the folder of compiled kernels.

    Attributes
    ----------
    path : pathlib.Path
        The folder that is used.
    refused : str
        If other users can write to the folder that should be used, a text that says why it is not; otherwise "".
    remedy : str
        If ``refused`` is not empty, what the user can do to have that folder used; otherwise "".
    """

    path: Path
    refused: str = ""
    remedy: str = ""


def _wanted() -> Path | None:
    """Return the folder in which to put the cache: ``MPIZERO_CACHE_DIR``, or ``mpizero`` in the user's cache folder.

    The user's cache folder is ``XDG_CACHE_HOME`` or ``~/.cache``. Return None if the user has no home folder.
    """
    if configured := os.environ.get("MPIZERO_CACHE_DIR"):
        if (path := os.path.expanduser(configured)).startswith("~"):
            raise ConfigError(f"MPIZERO_CACHE_DIR={configured}: there is no such home folder; give the whole path")
        return Path(os.path.abspath(path))
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(caches):  # which its specification wants ignored
        caches = os.path.expanduser("~/.cache")
    return Path(caches) / "mpizero" if os.path.isabs(caches) else None  # without a home, "~" stays as it is


def _private_root() -> Path:
    """Return a folder in /tmp (or another temporary folder for all users) that only this user can write.

    Raise PermissionError if no such folder can be made.
    """
    import tempfile

    tried = []
    for base in dict.fromkeys((tempfile.gettempdir(), "/var/tmp", "/dev/shm")):
        try:
            return private_folder(Path(base), f"mpizero-{os.geteuid()}")
        except OSError as error:
            tried.append(str(error))
    raise PermissionError(
        f"no place for compiled kernels that only you can write: {'; '.join(tried)}; "
        "set MPIZERO_CACHE_DIR to a folder of your own"
    )


def _choose_folder(name: str) -> CacheFolder:
    """Make the cache folder ``name`` in the folder of :func:`_wanted`, or else in that of :func:`_private_root`.

    The second one is used if other users can write to the first one or to the cache folder in it, or if the cache
    folder cannot be made or written there. If ``MPIZERO_CACHE_DIR`` is set and the cache folder cannot be made there,
    raise OSError.
    """
    root, refused = _wanted(), None
    try:
        if root is not None:
            path = make_folder(root, name)
            if os.environ.get("MPIZERO_CACHE_DIR") or os.access(path, os.W_OK | os.X_OK):
                return CacheFolder(path)
    except UnsafeFolderError as error:
        refused = error
    except OSError:  # a home that is full or read-only; a folder that was asked for by name has to be there
        if os.environ.get("MPIZERO_CACHE_DIR"):
            raise
    path = make_folder(_private_root(), name)
    if refused is None:
        return CacheFolder(path)
    return CacheFolder(path, f"{refused}: no machine code is loaded from there, it is kept in {path}", refused.remedy)


def _version_file(package: str) -> bytes:
    """Return the contents of a package's ``_version.py``, without importing the package (numba takes 0.4 s)."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{package} is needed to compile kernels: pip install numba", name=package)
    return Path(spec.origin).with_name("_version.py").read_bytes()


@functools.cache
def find_folder(cpu: str) -> CacheFolder:
    """Find or make the cache folder for this version of the kernels and for a processor.

    ``cpu`` is a text that identifies the processor: the result of :func:`cpu_identity`, or a text about a GPU. If other
    users can write to the folder that should be used, another one is used, and one process of each node prints a
    notice.

    Raises
    ------
    OSError
        If no folder can be made; the message names those that were tried.
    """
    digest = hashlib.sha256()
    package = os.path.dirname(__file__)
    for where, _, names in sorted(os.walk(package)):
        for name in sorted(name for name in names if name.endswith(".py")):
            digest.update(f"{where.removeprefix(package)}/{name}\n".encode())
            digest.update(Path(where, name).read_bytes())
    for compiler in ("numba", "llvmlite"):
        digest.update(_version_file(compiler))
    settings = sorted((k, v) for k, v in os.environ.items() if k.startswith("NUMBA_") and k not in _OTHER_SETTINGS)
    digest.update(repr((sys.version_info[:3], sys.abiflags, cpu, settings)).encode())
    chosen = _choose_folder(f"kernels-{digest.hexdigest()[:24]}")
    if chosen.refused and speaks():
        notice(f"kernels: {chosen.refused}; {chosen.remedy}")
    return chosen


def speaks() -> bool:
    """Tell whether this process prints notices about the cache: the first process of each node does."""
    return launched_local_rank(os.environ) == 0


def folder(cpu: str) -> Path:
    """Return the path of the cache folder of :func:`find_folder`, which is made if it is missing."""
    return find_folder(cpu).path


def interpreted() -> bool:
    """Tell whether kernels run as plain Python (``NUMBA_DISABLE_JIT`` is set and not 0), for debugging and coverage."""
    return os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file while the context is active; if the process dies, the lock is released.

    If the file system has no locks, do nothing.
    """
    import fcntl

    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):  # without locks several processes compile the same bytes, and the last rename wins
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _read(path: Path) -> bytes | None:
    """Return the machine code in a file; None if the file is missing or damaged, or others could have written it."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(number, "rb") as file:
        status = os.fstat(number)
        if wrong := foreign(status):
            notice(f"kernels: {path} {wrong}: not loaded, but compiled again")
        if wrong or not stat.S_ISREG(status.st_mode):
            return None
        stored = file.read()
    code = stored[_DIGEST:]
    return code if hashlib.sha256(code).digest() == stored[:_DIGEST] else None


def load_or_build(path: Path, build: Callable[[], bytes]) -> bytes:
    """Return the machine code stored in the file ``path``.

    If the file is missing or damaged, or other users could have written it, one process of the node calls ``build``,
    which returns the machine code, and stores it with a checksum. The other processes wait for the file.
    """
    if (code := _read(path)) is not None:
        return code
    with _locked(path.with_suffix(".lock")):
        if (code := _read(path)) is not None:
            return code
        import tempfile

        code = build()
        number, temporary = tempfile.mkstemp(prefix=f"{path.stem}.", dir=path.parent)  # of mode 0600
        with open(number, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(temporary, path)
    return code
