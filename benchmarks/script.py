"""The frame of every benchmark: its options, and its end, which is a picture and a line of JSON."""

import argparse
import math
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvpage.benchmarks.arguments import positive
from kvpage.benchmarks.figure import dumps

NO_SETTINGS = ("benchmark", "plot", "device", "url", "api_key")


class Options(argparse.ArgumentParser):
    """The options of `kvpage bench NAME`, those that several benchmarks have among them.

    Args:
        name: The benchmark's.
        about: The words of --help.
        rounds: The default of --rounds; None for no such option.
        threads: The default of --threads, of torch; None for no such option.
        device: The default of --device; None for no such option.
        has_plot: Whether there is --plot.
    """

    def __init__(
        self,
        name: str,
        about: str | None,
        rounds: int | None = None,
        threads: int | None = None,
        device: str | None = None,
        has_plot: bool = True,
    ) -> None:
        super().__init__(
            prog=f"kvpage bench {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.set_defaults(benchmark=name)
        if rounds is not None:
            self.add("--rounds", rounds)
        if threads is not None:
            self.add("--threads", threads, help="of torch")
        if device is not None:
            self.add("--device", device, choices=["cpu", "cuda"])
        if has_plot:
            self.add("--plot", type=Path, help="draws a picture there")

    def add(self, option: str, default: Any = None, **more: Any) -> None:
        """Add an option. Its type follows from its default; integers are positive. A sequence takes several values.

        Args:
            option: Its name.
            default: Its value, or a sequence of them.
            **more: As of add_argument.
        """
        is_many = isinstance(default, Sequence) and not isinstance(default, str)
        first = default[0] if is_many and default else default
        kind: Any = positive if isinstance(first, int) else str if first is None or is_many else type(first)
        self.add_argument(option, default=default, **{"type": kind, **({"nargs": "+"} if is_many else {}), **more})

    def add_vllm(self) -> None:
        """Add --vllm."""
        self.add("--vllm", type=Path, metavar="PYTHON", help="an interpreter that has vLLM's CPU build")

    def add_without(self) -> None:
        """Add --without."""
        self.add("--without", default=[], nargs="+", metavar="NAME", help="contenders to leave out")

    def parse(self) -> argparse.Namespace:
        """Return the options of the command line. Torch has as many threads as they say."""
        options = self.parse_args()
        if "kvpage" in getattr(options, "without", []):
            self.error("--without must leave kvpage in, with whose tokens all are compared")
        if isinstance(getattr(options, "threads", None), int):
            import torch

            torch.set_num_threads(options.threads)
        return options


def machine(device: str = "cpu") -> str:
    """Return the name of the GPU, or of the processor."""
    if device == "cpu":
        return platform.processor() or platform.machine()
    import torch

    return torch.cuda.get_device_name()


def skip(words: str) -> None:
    """End with a line of JSON that says why nothing was measured."""
    print(dumps({"skipped": words}))


def finish(options: argparse.Namespace, draw: Callable[[Path], object] | None = None, **found: Any) -> None:
    """Draw, where --plot asks for it, and end with a line of JSON.

    Args:
        options: Of the command line; the settings among them are in the line, too.
        draw: Draws into a file; None where there is nothing to draw.
        **found: What was measured.
    """
    if draw is not None and options.plot:
        draw(options.plot)
    about = {"benchmark": options.benchmark, "machine": machine(getattr(options, "device", "cpu"))}
    for package in ("torch", "transformers"):
        if package in sys.modules:
            about[package] = sys.modules[package].__version__
    print(dumps({**about, **_settings(options), **found}))


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return what sets the work: no paths, addresses or keys, and no number that JSON lacks."""
    named = {name: value for name, value in vars(options).items() if name not in NO_SETTINGS and value is not None}
    return {name: value for name, value in named.items() if not isinstance(value, Path) and value != math.inf}
