"""The lock of a directory: a file that its owner keeps locked while the tier is open, with the owner's name in it.

The name is for people. The lock alone decides whether the directory is taken, and it ends with its owner.
"""

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from typing import NamedTuple

from kvpage.store.disk.segment import open_file

MAX_OWNER_BYTES = 512


class DiskOwner(NamedTuple):
    """The process that has a directory open. pid: its number on its own host, or in its container."""

    pid: int
    host: str

    @classmethod
    def here(cls) -> "DiskOwner":
        return cls(os.getpid(), socket.gethostname())

    @property
    def is_alive(self) -> bool:
        """Return whether the process seems to live. Processes of other hosts count as living."""
        if self.host != socket.gethostname():
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's
            return True
        return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def lock_path(folder: Path) -> Path:
    return folder / "lock"


def take_lock(folder: Path, make: bool) -> int:
    """Return a descriptor that holds the lock until `give_lock`, or the process's death.

    make: create the folder and the file, too. Raises ValueError if another tier has it, with the owner's pid; OSError.
    """
    if make:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = open_file(lock_path(folder), os.O_CREAT if make else 0)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _holder(_read_owner(fd))
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise ValueError(f"{folder} must be open once, {holder} has it") from None
        raise
    with contextlib.suppress(OSError):  # on a full disk no owner is named
        os.ftruncate(fd, 0)
        os.pwrite(fd, "{} {}\n".format(*DiskOwner.here()).encode(), 0)
    return fd


def give_lock(fd: int) -> None:
    """Release the lock. A forked child leaves its parent's name in the file."""
    with contextlib.suppress(OSError):
        if _read_owner(fd) == DiskOwner.here():
            os.ftruncate(fd, 0)
    os.close(fd)


def owner_of(folder: Path) -> DiskOwner | None:
    """Return the process that has the folder open, by the file's text; None if it is known to be dead.

    No lock is taken. Raises OSError if there is no such file.
    """
    fd = open_file(lock_path(folder), access=os.O_RDONLY)
    try:
        owner = _read_owner(fd)
    finally:
        os.close(fd)
    return owner if owner is not None and owner.is_alive else None


def _read_owner(fd: int) -> DiskOwner | None:
    pid, _, host = os.pread(fd, MAX_OWNER_BYTES, 0).decode("ascii", "replace").strip().partition(" ")
    return DiskOwner(int(pid), host) if pid.isdecimal() and 0 < int(pid) < 1 << 31 and host else None


def _holder(owner: DiskOwner | None) -> str:
    if owner is None or not owner.is_alive:
        return "another tier or process"
    return f"another tier of this process, {owner.pid}," if owner == DiskOwner.here() else str(owner)
