"""kvpage: the paged KV cache of a language-model server, as a library.

Importing it needs neither a GPU nor Triton nor transformers.
"""

from kvpage.errors import OutOfBlocks  # isort: skip  (the extension looks it up)
from kvpage import _C
from kvpage._C import BlockPool, Match, PartMatch, PrefixTree, TreeEntry
from kvpage.backends import AttentionBackend, register_backend
from kvpage.block_manager import Allocation, BlockManager
from kvpage.block_stats import BlockStats
from kvpage.build import build_info
from kvpage.cache_engine import CacheEngine
from kvpage.calibration import Calibration, calibrate
from kvpage.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig
from kvpage.kv_scales import KVScales
from kvpage.layout import CacheLayout
from kvpage.transfer import Transfer

__version__: str = _C.build_info()["version"]

__all__ = [
    "Allocation",
    "AttentionBackend",
    "BlockManager",
    "BlockPool",
    "BlockStats",
    "CacheConfig",
    "CacheEngine",
    "CacheLayout",
    "Calibration",
    "DeviceConfig",
    "KVScales",
    "Match",
    "ModelConfig",
    "OutOfBlocks",
    "ParallelConfig",
    "PartMatch",
    "PrefixTree",
    "Transfer",
    "TreeEntry",
    "build_info",
    "calibrate",
    "register_backend",
    "__version__",
]
