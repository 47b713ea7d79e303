"""PrefixRouting: the choices of PrefixRouter, in the methods that Ray Serve calls.

replica ─► record_routing_stats: a digest ─► Serve's controller ─► every router's PrefixIndex
prompt  ─► block hashes ─► how much does each replica hold? ─► rank, by that and by load ─► else two at random
"""

import random
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvpage.integrations.remote.calls import GenerateCall
from kvpage.integrations.routing import Candidate, DigestReport, PrefixIndex, rank
from kvpage.observe.events.block_hashes import block_hashes

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

SECONDS_TO_SEND = 2.0
"""Seconds after which a request that was given a replica, and did not reach it, no longer counts as its load."""

MAX_EARLY_ENDS = 1024
"""Ends that are remembered until Serve tells that the request has begun. Others are of requests that were refused."""


class PrefixRouting:
    """Methods for a class of Serve's LocalityMixin and RequestRouter, which comes after this one."""

    if TYPE_CHECKING:  # of Serve's classes
        replica_queue_len_cache: Any
        apply_locality_routing: Any

    def initialize_state(self, block_size: int = 16, imbalance: int = 8, max_routed: int = 65_536) -> None:
        """Take the router's arguments; Serve calls it.

        Args:
            block_size: Tokens of a block of the replicas.
            imbalance: See `rank`.
            max_routed: See PrefixIndex.
        """
        self._block_size, self._imbalance = block_size, imbalance
        self._index = PrefixIndex(max_routed)
        self._routed: dict[str, ReplicaID] = {}
        self._chosen: dict[str, tuple[ReplicaID, float]] = {}
        self._early_ends: OrderedDict[tuple[ReplicaID, str], None] = OrderedDict()

    def update_replicas(self, replicas: "list[RunningReplica]") -> None:
        """Take the replicas that run now, and their latest reports.

        Args:
            replicas: All of them.
        """
        super().update_replicas(replicas)  # type: ignore[misc, unused-ignore]
        self._index.keep_only(replica.replica_id for replica in replicas)
        for replica in replicas:
            report = DigestReport.from_wire(replica.routing_stats or {})
            if report is not None:
                self._index.take_report(replica.replica_id, report)

    async def choose_replicas(
        self, candidate_replicas: "list[RunningReplica]", pending_request: "PendingRequest | None" = None
    ) -> "list[list[RunningReplica]]":
        """Return replicas for a request in the order in which they are asked.

        Args:
            candidate_replicas: The replicas that run.
            pending_request: The request.

        Returns:
            One replica a rank by prefix, or two at random.
        """
        by_id: dict[Any, RunningReplica] = {replica.replica_id: replica for replica in candidate_replicas}
        near = [replica_id for replica_id in self.apply_locality_routing(pending_request) if replica_id in by_id]
        fallback = [[by_id[replica_id] for replica_id in random.sample(near, min(2, len(near)))]]
        hashes = self._hashes(pending_request)
        if pending_request is None or not hashes:
            return fallback
        ranked = self._ranked(candidate_replicas, hashes)
        if not ranked or not any(candidate.num_matched for candidate in ranked):
            ranked = ranked[:1]
        self._note_chosen(pending_request, ranked, hashes)
        return [*([by_id[candidate.replica]] for candidate in ranked), *fallback]

    def on_request_routed(self, pending_request: "PendingRequest", replica_id: "ReplicaID", result: Any) -> None:
        """Note that a replica has taken a request; Serve calls it.

        Args:
            pending_request: The request.
            replica_id: The replica.
            result: Its answer, which begins.
        """
        request_id = pending_request.metadata.internal_request_id
        self._chosen.pop(request_id, None)
        if (replica_id, request_id) in self._early_ends:  # it was over before Serve could tell that it had begun
            del self._early_ends[replica_id, request_id]
        else:
            self._routed[request_id] = replica_id
        self._index.note_routed(replica_id, self._hashes(pending_request))

    def on_request_completed(self, replica_id: "ReplicaID", internal_request_id: str) -> None:
        """Note that a replica has ended a request; Serve calls it.

        Args:
            replica_id: The replica.
            internal_request_id: The request.
        """
        if self._routed.get(internal_request_id) == replica_id:
            del self._routed[internal_request_id]
            return
        self._early_ends[replica_id, internal_request_id] = None
        if len(self._early_ends) > MAX_EARLY_ENDS:
            self._early_ends.popitem(last=False)

    def _hashes(self, pending_request: "PendingRequest | None") -> Sequence[int]:
        call = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if not isinstance(call, GenerateCall):
            return ()
        return block_hashes(call.tokens, self._block_size, call.namespace)

    def _ranked(self, replicas: "Sequence[RunningReplica]", hashes: Sequence[int]) -> list[Candidate]:
        loads = self._loads()
        candidates = [
            Candidate(
                replica.replica_id, self._index.num_matched(replica.replica_id, hashes), self._load(replica, loads)
            )
            for replica in replicas
        ]
        random.shuffle(candidates)
        return rank(candidates, self._imbalance)

    def _loads(self) -> "Counter[ReplicaID]":
        """Return the requests of each replica that this router has sent, or is about to."""
        oldest = time.monotonic() - SECONDS_TO_SEND
        self._chosen = {key: sent for key, sent in self._chosen.items() if sent[1] >= oldest}
        return Counter([*self._routed.values(), *(replica for replica, _ in self._chosen.values())])

    def _load(self, replica: "RunningReplica", loads: "Counter[ReplicaID]") -> int:
        """Return a replica's requests: also requests of other routers, as far as Serve knows them."""
        known = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return max(known, loads[replica.replica_id])

    def _note_chosen(self, request: "PendingRequest", ranked: Sequence[Candidate], hashes: Sequence[int]) -> None:
        """Note the first choice at once: requests of the same moment follow it, and count it."""
        replica: Any = ranked[0].replica if ranked else None
        if replica is not None:
            self._chosen[request.metadata.internal_request_id] = replica, time.monotonic()
            self._index.note_routed(replica, hashes)
