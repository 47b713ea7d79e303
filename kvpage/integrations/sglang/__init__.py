"""kvpage's tiers as the storage of SGLang's HiCache: memory, disk, Redis, S3 below the host memory of an engine.

    python -m sglang.launch_server ... --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{...}'

    HiCache ── keys and pages of its host memory ─► KVPageHiCache ─► PageStorage ─► ByteStore ─► tiers

SGLang makes `kvpage.integrations.sglang.backend.KVPageHiCache`. This module can be imported without SGLang.
"""

from kvpage.integrations.sglang.page_storage import PageStorage
from kvpage.integrations.sglang.settings import HiCacheSettings
from kvpage.integrations.sglang.shard import Shard
from kvpage.integrations.sglang.weights import ServedModel

__all__ = ["HiCacheSettings", "PageStorage", "ServedModel", "Shard"]
