"""Device: stands in for Triton's driver, so that a launch compiles a kernel for a GPU and runs its PTX on the CPU."""

import ctypes
import gc
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from support.ptx.kernel import Kernel
from support.ptx.machine.execution import Pick
from support.ptx.machine.global_memory import Region
from triton.runtime.cache import get_cache_manager

from kvpage.benchmarks.compiling_driver import CompilingDriver, Launch

NUM_MULTIPROCESSORS = {80: 108, 90: 132}


class Device(CompilingDriver):
    """arch: 80 or 90. pick, finds_races: as of Kernel.launch.

    launches: how often each kernel ran. last: what each was compiled to when it ran the last time.
    """

    def __init__(self, arch: int, pick: Pick | None = None, finds_races: bool = True) -> None:
        super().__init__(1000 + arch, arch, NUM_MULTIPROCESSORS[arch])
        self.pick, self.finds_races = pick, finds_races
        self._kernels: dict[str, Kernel] = {}  # by the hash of what they were compiled from
        self.launches: Counter[str] = Counter()
        self.last: dict[str, Kernel] = {}

    def take(self, launch: Launch, source: Any, metadata: Any) -> None:
        _, grid, _, given = launch
        if metadata.hash not in self._kernels:
            self._kernels[metadata.hash] = Kernel(ptx_of(source, metadata))
        self.run(self._kernels[metadata.hash], metadata, source.signature, grid, given)

    def run(self, kernel: Kernel, metadata: Any, signature: dict[str, str], grid: Any, given: Iterable[Any]) -> None:
        pairs = zip(signature.items(), given, strict=True)
        arguments = {name: value for (name, kind), value in pairs if kind != "constexpr"}
        tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        regions = [region_of(tensor) for tensor in tensors]
        pointers = [value for name, value in arguments.items() if signature[name][0] == "*" and type(value) is int]
        regions += regions_at([*pointers, *addresses_in(arguments)])
        values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments.values()]
        block_size = 32 * metadata.num_warps
        parameters = kernel.pack(values)
        kernel.launch(grid, block_size, parameters, regions, metadata.shared, self.pick, self.finds_races)
        self.launches[kernel.entry.name] += 1
        self.last[kernel.entry.name] = kernel


def ptx_of(source: Any, metadata: Any) -> str:
    """Return what was compiled of a source. Triton hands a driver no PTX, but keeps it in the cache of its compiler."""
    files = get_cache_manager(metadata.hash).get_group(f"{source.name[:150]}.json")
    return Path(next(path for name, path in files.items() if name.endswith(".ptx"))).read_text()


def region_of(tensor: torch.Tensor) -> Region:
    """Return all the memory that a tensor is a view of."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def addresses_in(arguments: dict[str, Any]) -> list[int]:
    """Return the addresses that a kernel gets as numbers, or in a tensor of them."""
    given = [value for name, value in arguments.items() if name.endswith("_address")]
    table = arguments.get("address_ptr")
    if isinstance(table, int):  # of a launch that is repeated
        return [*given, *(ctypes.c_int64 * (4 * arguments["num_layers"])).from_address(table)]
    return [*given, *(() if table is None else table.tolist())]


def regions_at(addresses: list[int]) -> list[Region]:
    """Return the memory of the tensors in which these addresses lie."""
    wanted = [address for address in addresses if address]
    if not wanted:
        return []
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.device.type == "cpu"]
    regions = {region_of(tensor) for tensor in tensors}
    return [(start, size) for start, size in regions if any(start <= address < start + size for address in wanted)]
