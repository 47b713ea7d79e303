"""`kvpage explain`: how many tokens of a prompt each tier has, why it ends there, and what is refused."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpage.store import inspection
from kvpage.store.config import TierURL
from kvpage.store.doors.sglang_prompt import SGLangPrompt
from kvpage.store.doors.vllm_prompt import VllmPrompt
from kvpage.store.prompt_reach import Door, TierReach, door_reach, tier_reach
from kvpage.store.tiers.tier import Tier
from kvpage.tools.store_cli import opened

OF_DOORS = {
    "vllm": {"salt", "adapter", "block_size", "hash_algo", "hash_seed"},
    "sglang": {"salt", "adapter", "rank"},
}


def explain(
    store: Annotated[list[str], typer.Option(help="a tier's URL, such as disk:///var/kv; may be repeated")],
    tokens: Annotated[
        str, typer.Option(help="a file of token ids: JSON, or with spaces or commas; - for standard input")
    ],
    model: Annotated[str | None, typer.Option(help="tell of this model's records alone; its name, or folder")] = None,
    namespace: Annotated[str | None, typer.Option(help="tell of this namespace alone")] = None,
    door: Annotated[str | None, typer.Option(help="vllm or sglang: chunks under that engine's keys")] = None,
    salt: Annotated[str | None, typer.Option(help="of a door: the request's cache_salt")] = None,
    adapter: Annotated[str | None, typer.Option(help="of a door: the request's LoRA, as NAME=PATH")] = None,
    block_size: Annotated[int | None, typer.Option(help="of vllm: tokens of a block, where groups differ")] = None,
    hash_algo: Annotated[str | None, typer.Option(help="of vllm: its --prefix-caching-hash-algo; sha256")] = None,
    hash_seed: Annotated[str | None, typer.Option(help="of vllm: its PYTHONHASHSEED, if it has one")] = None,
    rank: Annotated[str | None, typer.Option(help="of sglang: the rank's name, such as dp0-pp0-cp0-tp1")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Tell how many tokens of a prompt each tier has, why it ends there, and what is refused. Nothing is changed."""
    options = {
        "salt": salt, "adapter": adapter, "block_size": block_size, "hash_algo": hash_algo, "hash_seed": hash_seed,
        "rank": rank,
    }  # fmt: skip
    try:
        ids = read_tokens(sys.stdin.read() if tokens == "-" else Path(tokens).read_text())
        reach_of = _reach_by(ids, model, namespace, door, {name: at for name, at in options.items() if at is not None})
    except (OSError, ValueError) as error:
        raise SystemExit(f"kvpage explain: {error}") from error
    for url in store:
        with opened(url, inspection.view_tier, "kvpage explain") as tier:
            reach = reach_of(tier)
        shown = TierURL.parse(url).text
        print(json.dumps({"store": shown, **_plain(asdict(reach))}) if as_json else told(shown, reach, len(ids)))


def _reach_by(
    ids: list[int], model: str | None, namespace: str | None, door: str | None, options: dict[str, Any]
) -> Callable[[Tier], TierReach]:
    """Return what tells of a tier. options: those that were given. Raises ValueError for some that do not fit."""
    if door not in (None, *OF_DOORS):
        raise ValueError(f"--door must be one of {', '.join(OF_DOORS)}, got {door!r}")
    strange = sorted(set(options) - OF_DOORS.get(door or "", set()))
    strange += ["namespace"] if door and namespace is not None else []
    if strange:
        shown = ", ".join(f"--{name.replace('_', '-')}" for name in strange)
        raise ValueError(f"options must be of {f'the door {door}' if door else 'chunks, without --door'}, got {shown}")
    if door is None:
        name = None if namespace is None else namespace.encode()
        return lambda tier: tier_reach(tier, ids, model, name)
    prompt = _prompt(ids, model, door, options)
    return lambda tier: door_reach(tier, prompt)


def _prompt(ids: list[int], model: str | None, door: str, options: dict[str, Any]) -> Door:
    adapter = options.pop("adapter", None)
    if adapter is not None:
        name, is_there, path = adapter.partition("=")
        if not is_there:
            raise ValueError(f"--adapter must be NAME=PATH, got {adapter!r}")
        options["adapter"] = (name, path)
    return VllmPrompt(ids, model=model, **options) if door == "vllm" else SGLangPrompt(ids, model=model, **options)


def read_tokens(text: str) -> list[int]:
    """Return the ids in a text. Raises ValueError for another text."""
    try:
        return [int(part) for part in text.strip().strip("[]").replace(",", " ").split()]
    except ValueError:
        raise ValueError("tokens must be integers, as JSON or with spaces or commas between them") from None


def told(url: str, reach: TierReach, num_tokens: int) -> str:
    """Return the lines of one tier."""
    most = reach.reaches[0].num_tokens if reach.reaches else 0
    lines = [f"{url}: {most} of {num_tokens} tokens", *map(str, reach.reaches)]
    lines += [f"{count} records are {kind}" for kind, count in reach.others.items()]
    lines += [] if reach.reaches else ["no chunk of this model and namespace, or door, is here"]
    return "\n  ".join(lines)


def _plain(value: Any) -> Any:
    """Return the value with bytes as hexadecimal text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
