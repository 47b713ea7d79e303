"""A driver of Triton without a device: it compiles for a GPU, and keeps what it was to launch."""

from typing import Any

from kvpage.benchmarks.compiling_driver import CompilingDriver, Launch

DEVICE = 99  # no other test's: what was compiled stays with the kernels


class FakeDriver(CompilingDriver):
    """`launches` holds the name, grid, stream and arguments of each. `early`: of a launch, whether it may begin before
    the end of the one ahead of it."""

    def __init__(self, arch: int = 90) -> None:
        super().__init__(DEVICE + arch - 90, arch)
        self.launches: list[Launch] = []
        self.early: list[bool] = []

    def take(self, launch: Launch, source: Any, metadata: Any) -> None:
        self.launches.append(launch)
        self.early.append(getattr(metadata, "launch_pdl", False))
