"""Use the installed kvpage: the extension, the operations on a CPU, the blocks. Needs torch and numpy alone."""

import sys
from pathlib import Path

import torch

import kvpage
from kvpage import BlockManager, CacheLayout, ops


def use_ops() -> None:
    layout = CacheLayout(4, 2, 8, torch.float32)
    (cache,) = layout.allocate(3, 1, torch.device("cpu"))
    rows = torch.randn(5, 2, 8)
    ops.reshape_and_cache(rows, rows, cache, torch.arange(4, 9), layout)
    keys, values = ops.gather_cache(cache, torch.tensor([[1, 2]], dtype=torch.int32), [5], layout)
    assert torch.equal(keys, rows) and torch.equal(values, rows)


def use_blocks() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    allocation = manager.allocate("first", list(range(9)))
    assert allocation.num_cached_tokens == 0 and len(manager.block_ids("first")) == 3


def main() -> int:
    folder = Path(kvpage.__file__).parent
    assert folder.resolve() != Path(__file__).resolve().parents[1] / "kvpage", (
        f"kvpage must be an installed one, got {folder}"
    )
    use_ops()
    use_blocks()
    print(f"kvpage {kvpage.__version__} works with torch {torch.__version__}, Python {sys.version.split()[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
