"""shown_progress: a progress bar on the terminal for memory that takes long to get ready."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHOWN_BYTES = 8 << 30  # from which on progress is shown: about a second
logger = logging.getLogger(__name__)


@contextmanager
def shown_progress(task: str, num_bytes: int) -> Iterator[Callable[[int], object]]:
    """Yield a function that takes the bytes of a portion that is done.

    task: such as "touching memory", for the log and the bar. Without the package rich there is no bar.
    """
    if num_bytes < SHOWN_BYTES:
        yield lambda count: None
        return
    logger.info("%s: %.1f GiB", task, num_bytes / (1 << 30))
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:  # an extra
        yield lambda count: None
        return
    columns = TextColumn(task), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        shown = progress.add_task(task, total=num_bytes)
        yield lambda count: progress.advance(shown, count)
