"""All batteries, in the order of the tables."""

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # as pytest does

from battery import Battery  # noqa: E402


def all_batteries() -> list[Battery]:
    """Those of the modules battery_*.py: each has a list BATTERIES."""
    modules = sorted(path.stem for path in HERE.glob("battery_*.py"))
    return [battery for name in modules for battery in importlib.import_module(name).BATTERIES]
