"""What the tests compile, by names of its contents: in the user's cache folder, where all clones of a machine find it.

A name is a digest of sources, headers, flags and compiler, so no file in the folder is ever wrong, only unused.
"""

import os
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

MOST_BYTES = 1 << 30
BUSY_SECONDS = 3600  # another process may link what was used within the last hour
INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)


def folder(otherwise: Path) -> Path:
    """Return the user's folder for objects of tests, made; `otherwise` where the user has none to write to."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    for path in (Path(base) / "kvpage" / "native", otherwise):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(path, os.W_OK):
            return path
    return otherwise


def note_use(path: Path) -> bool:
    """Return whether the file is there, and tell `trim` that it was used now."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def sources_of(source: Path, roots: Iterable[Path]) -> list[Path]:
    """Return a C++ file and all headers of the folders `roots` that it includes, or that these include, once each."""
    roots, known = list(roots), [source]
    for path in known:  # which grows
        for name in INCLUDE.findall(path.read_text()):
            header = next((root / name for root in (path.parent, *roots) if (root / name).exists()), None)
            if header is not None and header not in known:
                known.append(header)
    return known


def trim(cache: Path, most_bytes: int = MOST_BYTES) -> None:
    """Remove the files that were unused longest until `most_bytes` are left, but none of the last hour's."""
    entries = sorted(((path.stat(), path) for path in _entries(cache)), key=lambda entry: entry[0].st_mtime)
    num_bytes = sum(stat.st_size for stat, _ in entries)
    for stat, path in entries:
        if num_bytes <= most_bytes or stat.st_mtime > time.time() - BUSY_SECONDS:
            return
        num_bytes -= stat.st_size
        if path.is_dir():  # of a process that was killed
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _entries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.exists()]
