"""kvpage: the paged KV cache of a language-model server, as a library.

    BlockManager ── which blocks each sequence has ──► block tables, slots, moves
    CacheEngine  ── the tensors of both tiers      ──► swap_in, swap_out, copy
    CacheLayout  ── how a tensor is read           ──► kvpage.ops

Importing it needs neither a GPU nor Triton nor transformers. Further parts are imported by name: kvpage.ops (kernels),
kvpage.store (chunks on disk and servers), kvpage.serving (an engine for Hugging Face models).
"""

import sys

from kvpage.source_folder import usable_path

__path__ = usable_path(__path__, sys.path)

from kvpage.checks.errors import OutOfBlocks  # isort: skip  (the extension looks it up)
import kvpage._C as _C
from kvpage._C import BlockPool, HotPrefix, Match, PartMatch, PrefixTree, TreeEntry
from kvpage.blocks.config import BlockConfig, HostPolicy
from kvpage.blocks.explain import EditCost, Ending, Explanation, GroupReach, StoreReach, StoreVerdict
from kvpage.blocks.groups.held_blocks import HeldBlocks
from kvpage.blocks.groups.states.state_space import States
from kvpage.blocks.groups.window_blocks import Window, WindowStats
from kvpage.blocks.groups.window_group import HeldWindow
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.moves import BlockMove, BlockMoves
from kvpage.blocks.rows import StepInputs
from kvpage.blocks.sequence_state import Allocation
from kvpage.blocks.stats import BlockStats, SlotStats, SpaceStats
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.calibration import Calibration, Throughput, calibrate
from kvpage.cache.layer_slice import LayerCaches, LayerSlice
from kvpage.cache.layered_moves import Arrival, LayeredMoves, LayerEvents
from kvpage.cache.state_cache import StateCache
from kvpage.cache.transfer import Transfer
from kvpage.cache.transfer_stream import TransferEvent, TransferStream
from kvpage.layout.backends import AttentionBackend, register_backend
from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig
from kvpage.layout.groups import CacheGroup, GroupKind, StateLayout, StatePart
from kvpage.layout.kv_scales import KVScales
from kvpage.layout.kv_view import KVView
from kvpage.layout.layer_shape import LayerShape
from kvpage.tools.build import build_info

__version__: str = _C.build_info()["version"]

__all__ = [
    "Allocation",
    "Arrival",
    "AttentionBackend",
    "BlockConfig",
    "BlockManager",
    "BlockMove",
    "BlockMoves",
    "BlockPool",
    "BlockStats",
    "CacheConfig",
    "CacheEngine",
    "CacheGroup",
    "CacheLayout",
    "Calibration",
    "DeviceConfig",
    "EditCost",
    "Ending",
    "Explanation",
    "GroupKind",
    "GroupReach",
    "HostPolicy",
    "HotPrefix",
    "HeldBlocks",
    "HeldWindow",
    "States",
    "KVScales",
    "KVView",
    "LayerCaches",
    "LayerEvents",
    "LayerSlice",
    "LayeredMoves",
    "LoadOrCompute",
    "Match",
    "LayerShape",
    "ModelConfig",
    "OutOfBlocks",
    "ParallelConfig",
    "PartMatch",
    "PrefixTree",
    "SlotStats",
    "SpaceStats",
    "StateCache",
    "StateLayout",
    "StatePart",
    "StepInputs",
    "StoreReach",
    "StoreVerdict",
    "Throughput",
    "Transfer",
    "TransferEvent",
    "TransferStream",
    "TreeEntry",
    "Window",
    "WindowStats",
    "build_info",
    "calibrate",
    "register_backend",
    "__version__",
]
