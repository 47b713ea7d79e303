"""The part of a rank that follows: it makes its shard of the cache, and computes with rank 0 until that one ends."""

from transformers import PreTrainedModel

from kvpage.checks.interrupts import HeldInterrupts
from kvpage.serving.assembly.parts import assemble_rank, check_servable
from kvpage.serving.config import EngineConfig
from kvpage.serving.loop.ranks.follower import Follower
from kvpage.serving.loop.ranks.ranked_store import StoreFollower
from kvpage.serving.loop.ranks.ranks import Ranks, Role
from kvpage.serving.loop.store_connector import BlockStore


def follow(model: PreTrainedModel, config: EngineConfig, store: BlockStore | None) -> None:
    """Compute with rank 0; see Engine.follow."""
    ranks = Ranks.join(model, config, Role.FOLLOWS, store)
    with HeldInterrupts():
        with ranks.together(), ranks.watch.waiting():
            servable = check_servable(model, config)
            cache = assemble_rank(servable, config).cache
            follower_store = None if store is None else StoreFollower(store, cache, ranks)
            ranks.meet()
        Follower(ranks, servable.runner, cache, follower_store).run()
