"""`kvpage explain`: how many tokens of a prompt a server, or a tier, has, why it ends there, and what is refused."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpage.store import inspection
from kvpage.store.config import TierURL
from kvpage.store.prompt_reach import TierReach, printable, tier_reach
from kvpage.tools.explain_server import ServerQuestion
from kvpage.tools.store_cli import opened


def explain(
    url: Annotated[str | None, typer.Argument(help="of a running server, such as http://127.0.0.1:8000")] = None,
    store: Annotated[
        list[str] | None, typer.Option(help="a tier's URL in place of a server, such as disk:///var/kv; repeatable")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="a file of token ids: JSON, or with spaces or commas; - for standard input")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="the prompt's text, for a server")] = None,
    messages: Annotated[
        str | None, typer.Option(help="a file with a chat, for a server: JSON, its messages or a whole body")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="of a server: its name; of a tier: this model's records alone")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="of a tier: this namespace alone")] = None,
    cache_salt: Annotated[str | None, typer.Option(help="of a server: the requests' salt")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="KVPAGE_API_KEY", help="of a server")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Tell how many tokens of a prompt a server or a tier has, and why it ends there. Nothing is changed."""
    try:
        _check(url, store or (), (tokens, prompt, messages), namespace, cache_salt)
        if url is not None:
            body = {**_asked(tokens, prompt, messages), "model": model, "cache_salt": cache_salt}
            body = {name: value for name, value in body.items() if value is not None}
            answer = ServerQuestion(url, body, api_key).ask()
            print(json.dumps(answer) if as_json else _told_by_server(answer))
            return
        ids = read_tokens(_text_of(str(tokens)))
    except (OSError, ValueError) as error:
        raise SystemExit(f"kvpage explain: {error}") from error
    _explain_tiers(store or (), ids, model, None if namespace is None else namespace.encode(), as_json)


def _check(
    url: str | None,
    store: Sequence[str],
    prompts: tuple[str | None, str | None, str | None],
    namespace: str | None,
    cache_salt: str | None,
) -> None:
    """ValueError for options that do not go together. prompts: the tokens, the text, the messages."""
    tokens, *others = prompts
    if (url is None) != bool(store):
        raise ValueError("give either the URL of a server, or --store")
    if sum(value is not None for value in prompts) != 1:
        raise ValueError("give one of --tokens, --prompt and --messages")
    if store and (tokens is None or cache_salt is not None):
        raise ValueError("--store needs --tokens, and takes --namespace in place of --cache-salt")
    if url is not None and namespace is not None:
        raise ValueError("a server takes --cache-salt in place of --namespace")


def _asked(tokens: str | None, prompt: str | None, messages: str | None) -> dict[str, Any]:
    """Return the body with the prompt. ValueError for a file that holds none."""
    if tokens is not None:
        return {"prompt": read_tokens(_text_of(tokens))}
    if prompt is not None:
        return {"prompt": prompt}
    try:
        chat = json.loads(_text_of(str(messages)))
    except json.JSONDecodeError as error:
        raise ValueError(f"messages must be JSON: {error}") from None
    if isinstance(chat, dict) and "messages" in chat:
        return chat
    if not isinstance(chat, list):
        raise ValueError(f"messages must be a list, or an object with one, got {type(chat).__name__}")
    return {"messages": chat}


def _text_of(path: str) -> str:
    return sys.stdin.read() if path == "-" else Path(path).read_text()


def _told_by_server(answer: dict[str, Any]) -> str:
    """Return the lines of an answer, without characters that are not printable: others have written the tokens."""
    lines = str(answer.get("text", "")).split("\n")
    for group in answer.get("groups", []):
        if isinstance(group, dict) and group.get("token_text") is not None:
            token, cached = group["token_text"], group.get("cached_token_text")
            lines.append(f"  {group.get('group')}: the prompt has {token!r}, cached is {cached!r}")
    return "\n".join(map(printable, lines))


def _explain_tiers(
    urls: Sequence[str], ids: list[int], model: str | None, namespace: bytes | None, as_json: bool
) -> None:
    for url in urls:
        with opened(url, inspection.view_tier, "kvpage explain") as tier:
            reach = tier_reach(tier, ids, model, namespace)
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
