"""kvpage: the paged KV cache of a language-model server, as a library.

Importing it needs neither a GPU nor Triton nor transformers.
"""

import sys

from kvpage.source_folder import usable_path

__path__ = usable_path(__path__, sys.path)

from kvpage.errors import OutOfBlocks  # isort: skip  (the extension looks it up)
from kvpage import _C
from kvpage._C import BlockPool, Match, PartMatch, PrefixTree, TreeEntry
from kvpage.backends import AttentionBackend, register_backend
from kvpage.block_manager import Allocation, BlockManager
from kvpage.block_moves import BlockMove, BlockMoves
from kvpage.block_space import HostPolicy, SpaceStats
from kvpage.block_stats import BlockStats
from kvpage.build import build_info
from kvpage.cache_engine import CacheEngine
from kvpage.calibration import Calibration, Throughput, calibrate
from kvpage.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig
from kvpage.kv_scales import KVScales
from kvpage.kv_view import KVView
from kvpage.layout import CacheLayout
from kvpage.load_or_compute import LoadOrCompute
from kvpage.transfer import Transfer
from kvpage.transfer_stream import TransferEvent, TransferStream

__version__: str = _C.build_info()["version"]

__all__ = [
    "Allocation",
    "AttentionBackend",
    "BlockManager",
    "BlockMove",
    "BlockMoves",
    "BlockPool",
    "BlockStats",
    "CacheConfig",
    "CacheEngine",
    "CacheLayout",
    "Calibration",
    "DeviceConfig",
    "HostPolicy",
    "KVScales",
    "KVView",
    "LoadOrCompute",
    "Match",
    "ModelConfig",
    "OutOfBlocks",
    "ParallelConfig",
    "PartMatch",
    "PrefixTree",
    "SpaceStats",
    "Throughput",
    "Transfer",
    "TransferEvent",
    "TransferStream",
    "TreeEntry",
    "build_info",
    "calibrate",
    "register_backend",
    "__version__",
]
