"""CompilingDriver: Triton's driver of a GPU that is not there. It compiles for the GPU, and launches nothing."""

from collections.abc import Callable
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

SHARED_MEMORY = {arch: kib * 1024 for arch, kib in {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}.items()}
"""Bytes of shared memory that a thread block may have, by compute capability."""
NUM_LOADED = 5 if hasattr(triton, "knobs") else 4
"""Values that Triton expects of `load_binary`: from 3.4 on the most threads, too."""

Launch = tuple[str, tuple[int, int, int], int, tuple[Any, ...]]


class CompilingDriver:
    """A driver of a device whose launches a subclass takes.

    number: of the device: kernels keep by it what was compiled for them. arch: its compute capability, ten times the
    major number plus the minor one.
    """

    def __init__(self, number: int, arch: int = 90, num_multiprocessors: int = 132) -> None:
        self.number, self.arch, self.num_multiprocessors = number, arch, num_multiprocessors
        self.utils = self

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[self.arch], "multiprocessor_count": self.num_multiprocessors}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return (name, self.function_of(name, binary), 0, 0, 1024)[:NUM_LOADED]

    def unload_module(self, module: Any) -> None:
        """Nothing was loaded."""

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(x: int, y: int, z: int, stream: int, function: Any, packed: Any, about: Any, *rest: Any) -> None:
            enter, leave, *arguments = rest
            for hook in (enter, leave):
                if hook is not None:
                    hook(about)
            self.take((function, (x, y, z), stream, tuple(arguments)), source, metadata)

        return launch

    def function_of(self, name: str, binary: bytes) -> Any:
        """Return what stands for the machine code in launches."""
        return name

    def take(self, launch: Launch, source: Any, metadata: Any) -> None:
        """Take a launch. source, metadata: Triton's, of the kernel."""
        raise NotImplementedError
