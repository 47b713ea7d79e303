"""picture: a Snapshot as the page draws it, in plain values for JSON.

hits: where the tokens of prompts were found; the engine computed the rest of "prompt"

    prompt  |  device  |  host  |  memory  |  disk  |  remote  |  computed  |
"""

from collections.abc import Callable, Iterable
from typing import Any

from kvpage._C import HotPrefix
from kvpage.server.page.ended import Ended, why
from kvpage.server.page.snapshot import MAX_LANES, Snapshot
from kvpage.serving import EngineStats, RequestState, SessionState
from kvpage.store import KVStoreStats

Text = Callable[[bytes], str]
"""The text of tokens, given as the bytes of int32."""


def picture(snapshot: Snapshot, store: KVStoreStats | None, ended: Iterable[Ended], text: Text) -> dict[str, Any]:
    """Return the values that the page draws.

    Args:
        snapshot: The engine's part.
        store: The store's part; None without one.
        ended: Requests that have ended lately, the last one first.
        text: Makes text of tokens.

    Returns:
        Plain values.
    """
    stats = snapshot.stats
    return {
        "time": snapshot.time,
        "blocks": _device_blocks(stats),
        "host": _host_blocks(stats),
        "tokens": {
            "prompt": stats.num_prompt_tokens,
            "cached": stats.num_cached_tokens,
            "computed": stats.num_computed_tokens,
            "generated": stats.num_generated_tokens,
        },
        "hits": _hits(stats, store),
        "tiers": _tiers(store),
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "preempted": stats.num_preemptions,
        "evicted": stats.blocks.evicted_blocks,
        "requests": [_lane(state, snapshot.time) for state in snapshot.requests],
        "sessions": [_session(state) for state in snapshot.sessions],
        "ended": [request.lane(snapshot.time) for request in list(ended)[:MAX_LANES]],
        "prefixes": _rows(snapshot.prefixes, text),
    }


def _device_blocks(stats: EngineStats) -> dict[str, int]:
    blocks = stats.blocks
    pinned = min(blocks.space.num_pinned_blocks, blocks.num_used_blocks)
    return {
        "total": blocks.num_blocks,
        "free": blocks.num_free_blocks,
        "cached": blocks.num_evictable_blocks,
        "used": blocks.num_used_blocks - pinned,
        "pinned": pinned,
    }


def _host_blocks(stats: EngineStats) -> dict[str, int] | None:
    space = stats.blocks.space
    if not space.num_host_blocks:
        return None
    num_used = space.num_host_blocks - space.num_free_host_blocks - space.num_cached_host_blocks
    return {
        "total": space.num_host_blocks,
        "free": space.num_free_host_blocks,
        "cached": space.num_cached_host_blocks,
        "used": num_used,
        "pinned": 0,
    }


def _hits(stats: EngineStats, store: KVStoreStats | None) -> list[tuple[str, int]]:
    """Return the tokens of prompts that each tier gave, the fastest tier first."""
    num_loaded = 0 if stats.store is None else stats.store.num_loaded_tokens
    num_host = stats.blocks.space.host_hit_tokens
    hits = [("device", max(stats.num_cached_tokens - num_host - num_loaded, 0))]
    if stats.blocks.space.num_host_blocks:
        hits.append(("host", num_host))
    if store is not None:
        num_read = sum(store.read_chunks)
        for tier, num_chunks in zip(store.tiers, store.read_chunks, strict=True):
            name = "store" if tier is None else tier.name
            hits.append((name, num_loaded * num_chunks // num_read if num_read else 0))
    elif stats.store is not None:
        hits.append(("store", num_loaded))
    return hits


def _tiers(store: KVStoreStats | None) -> list[dict[str, Any]]:
    tiers = () if store is None else store.tiers
    return [
        {"name": tier.name, "records": tier.num_records, "bytes": tier.num_bytes, "capacity": tier.capacity}
        for tier in tiers
        if tier is not None
    ]


def _lane(state: RequestState, now: float) -> dict[str, Any]:
    num_prompt = min(state.num_computed_tokens, state.num_prompt_tokens)
    num_found = state.num_cached_tokens + state.num_loaded_tokens
    return {
        "id": state.request_id if not state.sample_index else f"{state.request_id}/{state.sample_index}",
        "stage": state.stage,
        "prompt": state.num_prompt_tokens,
        "cached": state.num_cached_tokens,
        "loaded": state.num_loaded_tokens,
        "computed": max(num_prompt - num_found, 0),
        "generated": state.num_generated_tokens,
        "seconds": now - state.arrival_time,
        "why": why(state.explanation),
    }


def _session(state: SessionState) -> dict[str, Any]:
    """Return a session for the page, with what its last edit has cost."""
    edit = state.edits[-1] if state.edits else None
    return {
        "id": state.session_id,
        "branches": len(state.branches),
        "tokens": sum(branch.num_tokens for branch in state.branches),
        "blocks": sum(branch.num_retained_blocks for branch in state.branches),
        "paused_in": state.paused_in,
        "due_in": state.due_in,
        "turns": state.num_turns,
        "edit": None if edit is None else str(edit),
        "edit_tokens": None if edit is None else edit.num_tokens_to_compute,
    }


def _rows(groups: list[list[HotPrefix]], text: Text) -> list[dict[str, Any]]:
    """Return the prefixes of all namespaces as one list; `parent` is a place in it."""
    rows: list[dict[str, Any]] = []
    for prefixes in groups:
        begin = len(rows)
        for prefix in prefixes:
            row = {
                "parent": None if prefix.parent is None else begin + prefix.parent,
                "text": text(prefix.first_tokens.tobytes()),
                "start": prefix.start,
                "tokens": prefix.num_tokens,
                "hits": prefix.num_hits,
                "pins": prefix.num_pins,
                "blocks": prefix.num_blocks,
                "host_blocks": prefix.num_host_blocks,
            }
            rows.append(row)
    return rows
