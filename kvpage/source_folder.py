"""usable_path: finds the installed kvpage, for a Python that was started in the project's own folder.

    sys.path:  ""  ─► ./kvpage            sources alone: nothing is compiled in here
               site-packages ─► kvpage    built by `pip install .`

There Python finds the sources first. Their package then takes its modules from the installed one.
"""

import importlib.machinery
from collections.abc import Iterable, Sequence
from pathlib import Path


def usable_path(package_path: Sequence[str], search_path: Iterable[str]) -> list[str]:
    """Return the folders of kvpage's modules: `package_path` if compiled, else those of an installed kvpage.

    Args:
        package_path: kvpage.__path__ as Python has set it.
        search_path: sys.path.

    Raises:
        ImportError: `package_path` has no extension for this Python, and no other kvpage is installed.
    """
    if has_extension(package_path):
        return list(package_path)
    own = {Path(folder).resolve() for folder in package_path}
    for entry in search_path:
        folder = (Path(entry or ".") / "kvpage").resolve()
        if folder not in own and has_extension([str(folder)]):
            return [str(folder)]
    raise ImportError(
        f"kvpage is being imported from its source folder {package_path[0]}, in which nothing is compiled for this "
        "Python, and no other kvpage is installed: run `pip install .`, or `pip install -e .` to work on it"
    )


def has_extension(package_path: Sequence[str]) -> bool:
    """Return whether one of the folders has kvpage._C, compiled for this Python."""
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    return any((Path(folder) / f"_C{suffix}").is_file() for folder in package_path for suffix in suffixes)
