"""Ranks: this process among those that compute one model, connected to the others.

torchrun ─┬─► rank 0: Engine.from_model ─┐ agree     rank 0 decides ─── control ──────► the others do the same
          ├─► rank 1: Engine.follow ─────┤ on the    its store     ◄── finds, keeps ──► their stores
          └─► rank 2: Engine.follow ─────┘ config    it            ◄── watch ─────────► each of the others
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import torch.distributed as dist
from transformers import PreTrainedModel

from kvpage.checks.fork_guard import ForkGuard
from kvpage.serving.config import EngineConfig
from kvpage.serving.loop.ranks.answers import Answers
from kvpage.serving.loop.ranks.channel import Channel
from kvpage.serving.loop.ranks.rank_watch import RankWatch
from kvpage.serving.model.states.model_states import keeps_states
from kvpage.store.block_store import BlockStore, check_store

MAX_SETTLE_SECONDS = 5.0
ASSEMBLY_SECONDS = 86_400.0
"""For how long a rank waits for the others' parts: one that hangs is noticed by the watch."""


class Role(IntEnum):
    """The call of a rank."""

    LEADS = 0
    FOLLOWS = 1

    @property
    def call(self) -> str:
        """The name of the call."""
        return "Engine.from_model" if self is Role.LEADS else "Engine.follow"


class Ranks:
    """The connections of one rank. rank: the number of this one; 0 decides. size: how many there are.

    settle_seconds: for how long the others are waited for after an error: whether all had it, so that they can go on.
    control: rank 0's decisions. finds, keeps: the answers of the stores. watch: whether the others live.
    """

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        """Connect. All ranks call it at once."""
        self._model = model
        self.settle_seconds = min(config.rank_timeout / 4, MAX_SETTLE_SECONDS)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.control = Channel(config.rank_timeout)  # the first one waits for all ranks
        finds, keeps = Channel(config.rank_timeout), Channel(config.rank_timeout)
        self.watch = RankWatch(self.rank, self.size, config.rank_timeout, model.device)
        self.finds, self.keeps = Answers(finds, self.watch.beat), Answers(keeps, self.watch.beat)
        self.process = ForkGuard("the engine")

    @classmethod
    def join(cls, model: PreTrainedModel, config: EngineConfig, role: Role, store: BlockStore | None) -> "Ranks":
        """Connect this rank, and agree with the others on what is served.

        Raises ValueError, on all ranks: they have other models, configs or roles. RankLost if not all come.
        """
        size = config.tensor_parallel_size
        if size == 1:
            raise ValueError("follow needs tensor_parallel_size of 2 or more, got 1")
        if store is not None:
            check_groups(model, config)
            check_rank_store(store, size)
        ranks = cls(model, config)
        try:
            ranks._agree(config, role, store is not None)
        except BaseException:
            ranks.leave()
            raise
        return ranks

    def _agree(self, config: EngineConfig, role: Role, has_store: bool) -> None:
        values = [role, has_store, _digest(_settings(config)), _digest(_shape(self._model))]
        for rank, (rank_role, with_store, settings, shape) in enumerate(self.control.gather(values)):
            expected = Role.FOLLOWS if rank else Role.LEADS
            if rank_role != expected:
                raise ValueError(f"rank {rank} must call {expected.call}, it called {Role(rank_role).call}")
            if with_store != has_store:
                raise ValueError(f"store must be given on all ranks or on none, rank {rank} differs")
            if shape != values[3]:
                raise ValueError(f"model must be the same on all ranks, that of rank {rank} differs in its config")
            if settings != values[2]:
                raise ValueError(f"config must be the same on all ranks, that of rank {rank} differs")

    def meet(self) -> None:
        """Wait until all ranks have made their parts: then each takes what it is told. All call it at once."""
        self.control.gather([self.rank], ASSEMBLY_SECONDS)

    def least(self, number: int) -> int:
        """Return the least of the numbers that the ranks name. All call it at once."""
        return min(value for (value,) in self.control.gather([number], ASSEMBLY_SECONDS))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, this rank computes with the others; if anything raises, they are told that it has failed."""
        try:
            yield
        except BaseException:
            self.leave(has_failed=True)
            raise

    def leave(self, has_failed: bool = False) -> None:
        """Let go of the connections. The others raise, if they still compute."""
        self.watch.leave(has_failed)
        for way in (self.control, self.finds, self.keeps):
            way.drop()

    def abandon(self) -> None:
        """Leave after a failure amid the model's collectives: close all groups of the process, so that nobody waits."""
        with self.watch.limited():
            self.leave(has_failed=True)
            if dist.is_initialized():
                dist.destroy_process_group()

    def all_failed_alike(self, has_failed: bool) -> bool:
        """Whether all ranks had an error at the same place, so that the next step can follow. All call it at once."""
        told = self.control.gather([has_failed, _num_collectives(self._model)], self.settle_seconds)
        return all(failed for failed, _ in told) and len({number for _, number in told}) == 1


def check_groups(model: PreTrainedModel, config: EngineConfig) -> None:
    """Raise ValueError where a store would have chunks of several groups: ranks agree on those of one."""
    if config.num_window_blocks is not None:
        raise ValueError("store must be None with num_window_blocks and several ranks, got a store")
    if keeps_states(model.config):
        name = type(model).__name__
        raise ValueError(f"store must be None with several ranks for a model whose layers keep states, {name} does")


def check_rank_store(store: BlockStore, size: int) -> None:
    """Raise ValueError for a store whose keys would be those of other heads."""
    check_store(store)
    metadata, rank = store.metadata, dist.get_rank()
    if metadata is None:
        return
    named = metadata.world_size, metadata.worker_id
    if named != (size, rank):
        raise ValueError(
            f"the metadata of rank {rank}'s store must have world_size={size} and worker_id={rank}, by which its keys "
            f"are of its own heads, got {named[0]} and {named[1]}"
        )


def _num_collectives(model: PreTrainedModel) -> int:
    """Return how many collectives the model has begun on this rank; another number on each if that is not known."""
    owners = [getattr(model, "_device_mesh", None), *(getattr(x, "device_mesh", None) for x in model.parameters())]
    mesh = next((owner for owner in owners if owner is not None), None)
    groups = [] if mesh is None else mesh.get_all_groups()
    counts = [getattr(group, "_get_sequence_number_for_group", None) for group in groups]
    return sum(count() for count in counts if count is not None) if counts and all(counts) else -1 - dist.get_rank()


def _settings(config: EngineConfig) -> str:
    return repr(
        (
            config.cache_config,
            config.num_window_blocks,
            config.states,
            config.max_num_seqs,
            config.max_model_len,
            config.native_layers,
            config.generation_config,
            config.calibration_tokens,
            config.attention_backend,
        )
    )


def _shape(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} {model.dtype} {model.config.get_text_config(decoder=True).to_json_string()}"


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
