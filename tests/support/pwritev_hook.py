"""The native writer of the disk tier calls the system's pwritev by itself. In a process that begins with a library of
ours, a function of Python's takes its place:

    environment() ─► another Python ─► PWRITEV.write = function ─► C++ ─► pwritev ─► function(fd, data, offset)
"""

import ctypes
import errno
import os
import shutil
import traceback
from collections.abc import Callable

import native_build

Write = Callable[[int, bytes, int], int]
"""write(fd, data, offset) -> bytes written, which may be fewer. OSError."""


class _Run(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t)]


_HOOK = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_int, ctypes.POINTER(_Run), ctypes.c_int, ctypes.c_long)


class PWritev:
    """write: the call in place of the system's, from any thread; None: the system's. num_calls: of `write`. What
    it raises, and is no OSError, ends the process: nobody else would hear of it.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._write: Write | None = None
        self._hook = _HOOK()

    @property
    def write(self) -> Write | None:
        return self._write

    @write.setter
    def write(self, write: Write | None) -> None:
        """RuntimeError in a process that did not begin with environment(). Nobody may be writing."""
        if not is_loaded():
            raise RuntimeError("pwritev can be replaced in a process that began with pwritev_hook.environment() only")
        self._write, self._hook = write, _HOOK(self._call) if write else _HOOK()
        ctypes.CDLL(None).kvpage_test_hook_pwritev(self._hook)

    def _call(self, fd: int, runs, num_runs: int, offset: int) -> int:
        self.num_calls += 1
        data = b"".join(ctypes.string_at(run.address, run.num_bytes) for run in runs[:num_runs])
        try:
            return self._write(fd, data, offset)
        except OSError as error:
            return -(error.errno or errno.EIO)
        except BaseException:
            traceback.print_exc()
            os.abort()


PWRITEV = PWritev()


def missing() -> str | None:
    """Why no process can begin with it here."""
    if any(mark in str(native_build.CACHE) for mark in " :"):
        return f"needs a path without spaces and colons, of which LD_PRELOAD is made, got {native_build.CACHE}"
    found = shutil.which(native_build.compiler())
    return None if found else f"needs a C++ compiler, there is no {native_build.compiler()}"


def is_loaded() -> bool:
    return hasattr(ctypes.CDLL(None), "kvpage_test_hook_pwritev")


def was_asked_for() -> bool:
    """Return whether this process began with environment(): then it is loaded, or cannot be loaded here."""
    return "pwritev_hook" in os.environ.get("LD_PRELOAD", "")


def environment() -> dict[str, str]:
    """Return the environment of a process that begins with the library."""
    library = str(native_build.library("pwritev_hook"))
    return {**os.environ, "LD_PRELOAD": ":".join(filter(None, [library, os.environ.get("LD_PRELOAD")]))}


def forget() -> None:
    """This process's children begin without it: those made with a sanitizer must come first."""
    others = [each for each in os.environ.get("LD_PRELOAD", "").split(":") if "pwritev_hook" not in each]
    os.environ["LD_PRELOAD"] = ":".join(others)
