"""check_picture: a file that a picture can be written to."""

import os
from pathlib import Path


def check_picture(path: Path) -> None:
    """Check that a picture can be written, before the work that it shows.

    Args:
        path: The file.

    Raises:
        ValueError: Its folder is none, or it cannot be written.
    """
    if not path.parent.is_dir():
        raise ValueError(f"--plot must be in an existing folder, {path.parent} is none")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--plot must be a file that can be written, {path} is none")
