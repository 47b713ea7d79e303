"""Prepared: a kernel with the arguments that many launches share, so that Triton compares them once.

    kernel(tensors ...,  numbers ...,   fixed ...)
           new at each launch           strides and constants of one kind of launches

Triton derives from all arguments the machine code to run. This takes longer than most kernels here need on a device,
and a model asks for the same once a layer and step. A repeated launch only reads addresses.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.nvidia.compiler import CUDAOptions
from triton.compiler import CompiledKernel
from triton.language.extra import cuda
from triton.runtime import driver

from kvpage.kernels.arguments import as_bits
from kvpage.kernels.rehearsal import ALIGNMENT, LARGEST, note, rehearsed
from kvpage.layout.kv_scales import KVScales

CAPACITY = 4096

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
TAKES_CONSTANTS = VERSION >= (3, 3)
# Whether a launch may begin before the one ahead of it ends, from sm_90 on, and wait for it by itself.
HAS_DEPENDENT_LAUNCH = hasattr(cuda, "gdc_wait") and "launch_pdl" in getattr(CUDAOptions, "__dataclass_fields__", {})
_HOOKS: Any = triton.knobs.runtime if hasattr(triton, "knobs") else CompiledKernel  # where Triton keeps them

Grid = tuple[int, int, int]


class Prepared:
    """A kernel that launches on other memory what it has launched before. It keeps no tensor alive.

    Tensors of one Prepared have the same dtypes, and the same of them are None. They are on one device.

    Args:
        kernel: Compiled by triton.jit. It is not specialised on numbers that differ within the kind. Its constants are
            its last arguments.
        fixed: The arguments after tensors and numbers.
        options: Those of a launch, as num_warps.
        num_bits: So many tensors, from the first on, are passed as integers of their size.
        aligned: Places of the tensors on whose alignment the kernel is specialised, among others perhaps.
    """

    __slots__ = ("_aligned", "_compiled", "_fixed", "_kernel", "_num_bits", "_options")

    def __init__(
        self, kernel: Any, fixed: tuple[Any, ...], options: dict[str, Any], num_bits: int, aligned: Sequence[int]
    ) -> None:
        self._kernel, self._fixed, self._options = kernel, fixed, options
        self._num_bits, self._aligned = num_bits, aligned
        self._compiled: _Compiled | None = None

    def launch(self, grid: Grid, tensors: Sequence[torch.Tensor | None], numbers: tuple[float, ...]) -> None:
        """Launch on the current stream of the tensors' device, which is the current one; or note it, in a rehearsal."""
        addresses = addresses_of(tensors)
        if self.repeat(grid, addresses, numbers):
            return
        bits = self._num_bits
        rows = [None if tensor is None else as_bits(tensor) for tensor in tensors[:bits]]
        arguments = *rows, *tensors[bits:], *numbers, *self._fixed
        if (variants := rehearsed.get()) is not None:
            note(variants, self._kernel, arguments, self._options)
            return
        kernel = self._kernel[grid](*arguments, **self._options)
        if isinstance(kernel, CompiledKernel) and self._is_usual(addresses, numbers):
            self._compiled = _Compiled.of(kernel, self._kernel, self._fixed)

    def repeat(self, grid: Grid, addresses: Sequence[int], numbers: tuple[float, ...]) -> bool:
        """Launch on tensors of these addresses, 0 for None. Return False, and do nothing, before the first launch."""
        compiled = self._compiled
        if compiled is None or not compiled.is_current() or not self._is_usual(addresses, numbers):
            return False
        compiled.launch(grid, (*addresses, *numbers))
        return True

    def _is_usual(self, addresses: Sequence[int], numbers: tuple[float, ...]) -> bool:
        bits = 0
        for index in self._aligned:
            bits |= addresses[index]
        return bits % ALIGNMENT == 0 and max(numbers, default=0) <= LARGEST


class _Compiled(NamedTuple):
    """Machine code on a device, and its last arguments."""

    kernel: Any  # Triton's CompiledKernel
    driver: Any  # Triton's, of the device
    device: int
    run: Any  # Triton's launcher
    function: Any
    metadata: Any
    fixed: tuple[Any, ...]

    @classmethod
    def of(cls, kernel: Any, source: Any, fixed: tuple[Any, ...]) -> "_Compiled":
        """Up to Triton 3.2 launchers take no constants, from 3.3 on they take all arguments."""
        if not TAKES_CONSTANTS:
            fixed = fixed[: len(fixed) - len(source.constexprs)]
        run = kernel.run  # loads the code
        active = driver.active
        return cls(kernel, active, active.get_current_device(), run, kernel.function, kernel.packed_metadata, fixed)

    def is_current(self) -> bool:
        """Return whether the current device is the one with the machine code."""
        active = driver.active
        return active is self.driver and bool(active.get_current_device() == self.device)

    def launch(self, grid: Grid, arguments: tuple[float, ...]) -> None:
        if _is_watched():
            self.kernel[grid](*arguments, *self.fixed)
            return
        stream = self.driver.get_current_stream(self.device)
        self.run(*grid, stream, self.function, self.metadata, None, None, None, *arguments, *self.fixed)


def _is_watched() -> bool:
    """Return whether a profiler asked to be called at each launch: then Triton launches, which does that."""
    enter, leave = _HOOKS.launch_enter_hook, _HOOKS.launch_exit_hook  # each None, a function, or some functions
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class PreparedKinds:
    """At most `capacity` kinds of launches of one kernel, each prepared once; when it is full, it starts anew."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._known: dict[Hashable, Any] = {}

    def get(self, kind: Hashable) -> Any:
        """Return what was kept for this kind, or None."""
        return self._known.get(kind)

    def keep(self, kind: Hashable, prepared: Any) -> None:
        """Keep a kind's launch: a Prepared, and what else follows from the kind."""
        if len(self._known) >= self._capacity:
            self._known.clear()
        self._known[kind] = prepared


def addresses_of(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Return the addresses; 0 for None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def form_of_scales(scales: KVScales | None) -> Hashable:
    """Return how many scales K and V have: one for all heads, or one for each."""
    return None if scales is None else (len(scales.key), len(scales.value))


def form(tensor: torch.Tensor | None) -> Hashable:
    """Return the dtype, the sizes after the first, and the strides: what a launch on many rows shares with another."""
    return None if tensor is None else (tensor.dtype, tensor.shape[1:], tensor.stride())
