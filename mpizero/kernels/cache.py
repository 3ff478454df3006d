"""Folder of compiled kernels: one object file per kernel and dtype, made by one process per node.

The folder's name is a hash of every source file in this package, of the compiler's version and of the CPU, so an
edited formula, a new numba or another CPU type starts an empty folder, and stale code cannot be loaded.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DIGEST = 32
_OTHER_SETTINGS = ("NUMBA_CACHE_DIR", "NUMBA_ENABLE_CUDASIM", "NUMBA_NUM_THREADS")  # they change no machine code


def _writable_root() -> Path:
    """Find a folder that only this user can write: machine code is loaded from it."""
    if configured := os.environ.get("MPIZERO_CACHE_DIR"):
        return Path(configured)
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    root = Path(caches) / "mpizero"
    with suppress(OSError):
        root.mkdir(parents=True, exist_ok=True)
    if os.access(root, os.W_OK | os.X_OK):
        return root
    root = Path(tempfile.gettempdir()) / f"mpizero-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise PermissionError(f"{root} belongs to another user: set MPIZERO_CACHE_DIR to a folder of your own")
    return root


def _version_file(package: str) -> bytes:
    """Read a package's version without importing it: importing numba takes 0.4 s."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{package} is needed to compile kernels: pip install numba", name=package)
    return Path(spec.origin).with_name("_version.py").read_bytes()


@functools.cache
def folder(cpu: str) -> Path:
    """Return the folder for this version of the kernels on ``cpu``, creating it.

    Raises
    ------
    OSError
        No folder can be written; the message names it.
    """
    digest = hashlib.sha256()
    package = Path(__file__).parent
    for source in sorted(package.rglob("*.py")):
        digest.update(f"{source.relative_to(package).as_posix()}\n".encode())
        digest.update(source.read_bytes())
    for compiler in ("numba", "llvmlite"):
        digest.update(_version_file(compiler))
    settings = sorted((k, v) for k, v in os.environ.items() if k.startswith("NUMBA_") and k not in _OTHER_SETTINGS)
    digest.update(repr((sys.version_info[:3], sys.abiflags, cpu, settings)).encode())
    path = _writable_root() / f"kernels-{digest.hexdigest()[:24]}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def interpreted() -> bool:
    """Tell whether ``NUMBA_DISABLE_JIT`` asks for plain Python (debugging, coverage)."""
    return os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the others sleep in the kernel, and a dead holder's lock is released."""
    import fcntl

    with open(path, "wb") as file:
        with suppress(OSError):  # without locks several processes compile the same bytes, and the last rename wins
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> bytes | None:
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    code = stored[_DIGEST:]
    return code if hashlib.sha256(code).digest() == stored[:_DIGEST] else None


def load_or_build(path: Path, build: Callable[[], bytes]) -> bytes:
    """Return the bytes stored in ``path``; where missing or damaged, one process builds and stores them."""
    if (code := _read(path)) is not None:
        return code
    with _locked(path.with_suffix(".lock")):
        if (code := _read(path)) is not None:
            return code
        code = build()
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(hashlib.sha256(code).digest() + code)
        os.replace(temporary, path)
    return code
