"""Touching: has the system give a slab its memory when it is made, with a progress bar where that takes long.

Otherwise the first store into each place of the slab waits for the system to clear it, page by page.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvpage.layout.host_memory import prefault

SHOWN_BYTES = 8 << 30  # from which on progress is shown: about a second
logger = logging.getLogger(__name__)


def touch(slab: torch.Tensor, name: str) -> None:
    """Have the system give the slab its memory, by as many threads as torch uses. Its bytes stay as they are.

    name: of the tier. Raises OSError if there is less memory than that.
    """
    with _shown(slab.nbytes, name) as advance:
        try:
            prefault(slab, torch.get_num_threads(), advance)
        except OSError as error:
            raise OSError(
                error.errno, f"{name} must have {slab.nbytes} bytes of memory, got less: {error.strerror}"
            ) from error


@contextmanager
def _shown(num_bytes: int, name: str) -> Iterator[Callable[[int], object]]:
    """Yield a function that takes the bytes of a portion that is done."""
    if num_bytes < SHOWN_BYTES:
        yield lambda count: None
        return
    logger.info("%s: touching %.1f GiB", name, num_bytes / (1 << 30))
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:  # an extra
        yield lambda count: None
        return
    columns = TextColumn(f"touching {name}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("touching", total=num_bytes)
        yield lambda count: progress.advance(task, count)
