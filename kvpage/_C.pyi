"""The native core: addresses, sizes and stream handles in; no torch."""

from collections.abc import Sequence
from typing import Any

from kvpage.errors import OutOfBlocks as OutOfBlocks

def build_info() -> dict[str, Any]: ...

# --- blocks: moving them ---

Layer = tuple[int, Sequence[int]]  # address, strides in bytes

class BlockCopier:
    def __init__(
        self,
        *,
        sizes: Sequence[int],
        block_dim: int,
        element_bytes: int,
        srcs: Sequence[Layer],
        dsts: Sequence[Layer],
        num_src_blocks: int,
        num_dst_blocks: int,
        src_device: int,
        dst_device: int,
        pinned: bool,
    ) -> None: ...
    @property
    def num_pieces(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    def run(self, pairs: int, num_pairs: int, stream: int, max_threads: int) -> None: ...
    def check(self, pairs: int, num_pairs: int) -> None: ...
    def extents(self, pairs: int, num_pairs: int, begin: int = 0, end: int = ...) -> list[tuple[int, int, int]]: ...

def _copy_kernel_on_host(
    copier: BlockCopier, pairs: int, num_pairs: int, vector_bytes: int = 0, max_threads: int = ...
) -> None: ...
def cuda_error() -> str | None: ...
def cuda_machine() -> dict[str, Any] | None: ...
