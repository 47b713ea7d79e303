"""`kvpage explain`: how many tokens of a prompt each tier has, why it ends there, and what is refused."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpage.store import inspection
from kvpage.store.config import TierURL
from kvpage.store.prompt_reach import TierReach, tier_reach
from kvpage.tools.store_cli import opened


def explain(
    store: Annotated[list[str], typer.Option(help="a tier's URL, such as disk:///var/kv; may be repeated")],
    tokens: Annotated[
        str, typer.Option(help="a file of token ids: JSON, or with spaces or commas; - for standard input")
    ],
    model: Annotated[str | None, typer.Option(help="tell of this model's records alone")] = None,
    namespace: Annotated[str | None, typer.Option(help="tell of this namespace alone")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Tell how many tokens of a prompt each tier has, why it ends there, and what is refused. Nothing is changed."""
    name = None if namespace is None else namespace.encode()
    try:
        ids = read_tokens(sys.stdin.read() if tokens == "-" else Path(tokens).read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"kvpage explain: {error}") from error
    for url in store:
        with opened(url, inspection.view_tier, "kvpage explain") as tier:
            reach = tier_reach(tier, ids, model, name)
        shown = TierURL.parse(url).text
        print(json.dumps({"store": shown, **_plain(asdict(reach))}) if as_json else told(shown, reach, len(ids)))


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
    lines += [] if reach.reaches else ["no chunk of this model and namespace is here"]
    return "\n  ".join(lines)


def _plain(value: Any) -> Any:
    """Return the value with bytes as hexadecimal text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
