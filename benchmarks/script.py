"""The frame of every benchmark: its options, and its end, which is a picture and a line of JSON."""

import argparse
import math
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from kvpage.benchmarks.figure import dumps

NO_SETTINGS = ("benchmark", "plot", "device", "url", "api_key")


def positive(text: str) -> int:
    """Return the integer that the text says, at least 1. Raises argparse.ArgumentTypeError for others."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"it must be a positive integer, got {text!r}")
    return number


class Option(NamedTuple):
    """An option of a benchmark. Its type follows from its default: integers are positive, a list or tuple takes several
    values, False is a flag. more: as of add_argument.
    """

    default: Any
    help: str = ""
    more: dict[str, Any] = {}

    def add_to(self, parser: argparse.ArgumentParser, name: str) -> None:
        """Add it to a command line."""
        kinds: dict[str, Any] = {"action": "store_true"} if self.default is False else self._kinds()
        parser.add_argument(f"--{name}", default=self.default, help=self.help, **{**kinds, **self.more})

    def _kinds(self) -> dict[str, Any]:
        is_many = isinstance(self.default, list | tuple)
        first = (self.default or [""])[0] if is_many else self.default
        kind = positive if isinstance(first, int) else str if first is None else type(first)
        return {"type": kind, **({"nargs": "+"} if is_many else {})}


def option(default: Any, help: str = "", **more: Any) -> Option:
    """Return an option. more: as of add_argument."""
    return Option(default, help, more)


VLLM = option(None, "an interpreter that has vLLM's CPU build", type=Path, metavar="PYTHON")
WITHOUT = option([], "contenders to leave out", metavar="NAME")
PATH = option(None, "a directory on the disk to be measured; by default a temporary one", type=Path)
DEVICE = option("cpu", "a device to measure", choices=["cpu", "cuda"])


def parse(
    name: str,
    about: str | None,
    arguments: Sequence[str] | None = None,
    /,
    check: Callable[[argparse.Namespace], str | None] = lambda options: None,
    has_plot: bool = True,
    **options: Any,
) -> argparse.Namespace:
    """Return the options of `kvpage bench NAME`, and set torch's threads. Without a device that they name, it ends.

    Args:
        about: The words of --help.
        arguments: By default the command line's.
        check: Returns an error of the options together, or None.
        **options: By name: an option, or its default.
    """
    parser = argparse.ArgumentParser(
        prog=f"kvpage bench {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(benchmark=name)
    if has_plot:
        options["plot"] = option(None, "draws a picture there", type=Path)
    for key, value in options.items():
        made = value if isinstance(value, Option) else Option(value, "of torch" if key == "threads" else "")
        made.add_to(parser, key.replace("_", "-"))
    parsed = parser.parse_args(arguments)
    if error := check(parsed):
        parser.error(error)
    if "kvpage" in getattr(parsed, "without", []):
        parser.error("--without must leave kvpage in, with whose tokens all are compared")
    if isinstance(getattr(parsed, "threads", None), int):
        import torch

        torch.set_num_threads(parsed.threads)
    if getattr(parsed, "device", "cpu") == "cuda":
        need_device("; --device cpu tries the script without one")
    return parsed


def need_device(words: str = ": nothing was measured") -> None:
    """End where there is no CUDA device. words: the end of what is said then."""
    import torch

    if not torch.cuda.is_available():
        skip(f"needs a CUDA device{words}")


def machine(device: str = "cpu") -> str:
    """Return the name of the GPU, or of the processor."""
    if device == "cpu":
        return platform.processor() or platform.machine()
    import torch

    return torch.cuda.get_device_name()


def skip(words: str) -> NoReturn:
    """End with a line of JSON that says why nothing was measured."""
    print(dumps({"skipped": words}))
    sys.exit(0)


def finish(options: argparse.Namespace, draw: Callable[[Path], object] | None = None, **figures: Any) -> None:
    """Draw into the file of --plot, and end with a line of JSON: settings, and the measurements."""
    if draw is not None and options.plot:
        draw(options.plot)
    about = {"benchmark": options.benchmark, "machine": machine(getattr(options, "device", "cpu"))}
    for package in ("torch", "transformers"):
        if package in sys.modules:
            about[package] = sys.modules[package].__version__
    # No paths, addresses or keys, and no number that JSON lacks.
    named = {name: value for name, value in vars(options).items() if name not in NO_SETTINGS and value is not None}
    settings = {name: value for name, value in named.items() if not isinstance(value, Path) and value != math.inf}
    print(dumps({**about, **settings, **figures}))
