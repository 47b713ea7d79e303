"""What tiers of a store have of a prompt, for `kvpage explain --store`, as lines or as JSON."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from kvpage.store.doors.sglang_prompt import SGLangPrompt
from kvpage.store.doors.vllm_prompt import VllmPrompt
from kvpage.store.prompt_reach import Door, TierReach, door_reach, tier_reach
from kvpage.store.tiers.tier import Tier

OF_DOORS = {
    "vllm": {"cache_salt", "adapter", "block_size", "hash_algo", "hash_seed"},
    "sglang": {"cache_salt", "adapter", "rank"},
}
"""Options by the engine under whose keys chunks are searched."""
ReachOf = Callable[[Tier], TierReach]


def reach_by(
    ids: list[int], model: str | None, namespace: str | None, door: str | None, options: Mapping[str, Any]
) -> ReachOf:
    """Return what tells how far a tier reaches into a prompt.

    Args:
        ids: The prompt's tokens.
        model: Tell of this model's records alone; None for all.
        namespace: Tell of this namespace alone; None for all.
        door: The engine that wrote the chunks; None for kvpage's own.
        options: Of the door, those that were given.

    Raises:
        ValueError: There is no such door, or options do not fit it.
    """
    if door not in (None, *OF_DOORS):
        raise ValueError(f"--door must be one of {', '.join(OF_DOORS)}, got {door!r}")
    strange = sorted(set(options) - OF_DOORS.get(door or "", set()))
    strange += ["namespace"] if door and namespace is not None else []
    if strange:
        shown = ", ".join(f"--{name.replace('_', '-')}" for name in strange)
        raise ValueError(f"--door {door} takes no {shown}" if door else f"{shown} must come with --door")
    if door is None:
        name = None if namespace is None else namespace.encode()
        return lambda tier: tier_reach(tier, ids, model, name)
    prompt = _prompt(ids, model, door, dict(options))
    return lambda tier: door_reach(tier, prompt)


def told_by_tier(url: str, reach: TierReach, num_tokens: int) -> str:
    """Return the lines of one tier."""
    most = reach.reaches[0].num_tokens if reach.reaches else 0
    lines = [f"{url}: {most} of {num_tokens} tokens", *map(str, reach.reaches)]
    lines += [f"{count} records are {kind}" for kind, count in reach.others.items()]
    lines += [] if reach.reaches else ["no chunk of this model and namespace, or door, is here"]
    return "\n  ".join(lines)


def as_plain(url: str, reach: TierReach) -> dict[str, Any]:
    """Return what JSON can hold of one tier, with bytes as hexadecimal text."""
    return {"store": url, **_plain(asdict(reach))}


def _prompt(ids: list[int], model: str | None, door: str, options: dict[str, Any]) -> Door:
    adapter, salt = options.pop("adapter", None), options.pop("cache_salt", None)
    if salt is not None:
        options["salt"] = salt
    if adapter is not None:
        name, is_there, path = adapter.partition("=")
        if not is_there:
            raise ValueError(f"--adapter must be NAME=PATH, got {adapter!r}")
        options["adapter"] = (name, path)
    return VllmPrompt(ids, model=model, **options) if door == "vllm" else SGLangPrompt(ids, model=model, **options)


def _plain(value: Any) -> Any:
    """Return the value with bytes as hexadecimal text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
