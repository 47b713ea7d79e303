"""`kvpage explain`: how many tokens of a prompt a server, or a tier, has, why it ends there, and what is refused."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpage.store import inspection
from kvpage.store.config import TierURL
from kvpage.store.prompt_reach import printable
from kvpage.tools.explain.server_question import ServerQuestion
from kvpage.tools.explain.tier_question import ReachOf, as_plain, reach_by, told_by_tier
from kvpage.tools.store_cli import opened

SERVER, DOOR = "Of a server", "Of a tier's engine"  # panels of the help
Prompts = tuple[str | None, str | None, str | None]
"""The file of tokens, the text, the file of messages."""


def explain(
    context: typer.Context,
    url: Annotated[str | None, typer.Argument(help="of a running server, such as http://127.0.0.1:8000")] = None,
    store: Annotated[
        list[str] | None, typer.Option(help="a tier's URL in place of a server, such as disk:///var/kv; repeatable")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="a file of token ids: JSON, or with spaces or commas; - for standard input")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="of a server: its name; of a tier: this model's records alone, by name or folder")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="of a tier: this namespace alone")] = None,
    cache_salt: Annotated[str | None, typer.Option(help="of a server or a door: the request's")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    prompt: Annotated[str | None, typer.Option(help="the prompt's text", rich_help_panel=SERVER)] = None,
    messages: Annotated[
        str | None,
        typer.Option(help="a file with a chat: JSON, its messages or a whole body", rich_help_panel=SERVER),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="KVPAGE_API_KEY", help="the caller's", rich_help_panel=SERVER)
    ] = None,
    door: Annotated[
        str | None, typer.Option(help="vllm or sglang: chunks under that engine's keys", rich_help_panel=DOOR)
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="the request's LoRA, as NAME=PATH", rich_help_panel=DOOR)] = None,
    block_size: Annotated[
        int | None, typer.Option(help="of vllm: tokens of a block, where groups differ", rich_help_panel=DOOR)
    ] = None,
    hash_algo: Annotated[
        str | None, typer.Option(help="of vllm: its --prefix-caching-hash-algo; sha256", rich_help_panel=DOOR)
    ] = None,
    hash_seed: Annotated[
        str | None, typer.Option(help="of vllm: its PYTHONHASHSEED, if it has one", rich_help_panel=DOOR)
    ] = None,
    rank: Annotated[
        str | None, typer.Option(help="of sglang: the rank's name, such as dp0-pp0-cp0-tp1", rich_help_panel=DOOR)
    ] = None,
) -> None:
    """Tell how many tokens of a prompt a server or a tier has, and why it ends there. Nothing is changed."""
    options = {
        "adapter": adapter, "block_size": block_size, "hash_algo": hash_algo, "hash_seed": hash_seed, "rank": rank,
    }  # fmt: skip
    options = {name: value for name, value in options.items() if value is not None}
    prompts = tokens, prompt, messages
    try:
        _check(url, store or (), prompts)
        if store and _is_written(context, "api_key"):
            raise ValueError("--api-key must come with the URL of a server, got it with --store")
        if url is not None:
            _check_server(namespace, door, options)
            _explain_server(url, {**_asked(prompts), **_present(model=model, cache_salt=cache_salt)}, api_key, as_json)
            return
        ids = read_tokens(_text_of(str(tokens)))
        reach_of = reach_by(ids, model, namespace, door, {**options, **_present(cache_salt=cache_salt)})
    except (OSError, ValueError) as error:
        raise SystemExit(f"kvpage explain: {error}") from error
    _explain_tiers(store or (), reach_of, len(ids), as_json)


def _check(url: str | None, store: Sequence[str], prompts: Prompts) -> None:
    """ValueError unless there is one prompt, and a server or tiers that take it."""
    if (url is None) != bool(store):
        raise ValueError("give either the URL of a server, or --store")
    if sum(value is not None for value in prompts) != 1:
        raise ValueError("give one of --tokens, --prompt and --messages")
    if store and prompts[0] is None:
        raise ValueError("--store needs --tokens")


def _is_written(context: typer.Context, name: str) -> bool:
    """Whether an option is on the command line, and not merely in the environment, where it may be for others."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"  # typer has an enumeration of its own, or click's


def _check_server(namespace: str | None, door: str | None, options: dict[str, Any]) -> None:
    """ValueError for options of tiers."""
    if namespace is not None:
        raise ValueError("a server takes --cache-salt in place of --namespace")
    strange = [*_present(door=door), *options]
    if strange:
        raise ValueError(f"--{strange[0].replace('_', '-')} must come with --store, got it with the URL of a server")


def _present(**values: str | None) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}


def _asked(prompts: Prompts) -> dict[str, Any]:
    """Return the body with the prompt. ValueError for a file that holds none."""
    tokens, prompt, messages = prompts
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


def _explain_server(url: str, body: dict[str, Any], api_key: str | None, as_json: bool) -> None:
    answer = ServerQuestion(url, body, api_key).ask()
    print(json.dumps(answer) if as_json else _told_by_server(answer))


def _told_by_server(answer: dict[str, Any]) -> str:
    """Return the lines of an answer, without characters that are not printable: others have written the tokens."""
    lines = str(answer.get("text", "")).split("\n")
    for group in answer.get("groups", []):
        if isinstance(group, dict) and group.get("token_text") is not None:
            token, cached = group["token_text"], group.get("cached_token_text")
            lines.append(f"  {group.get('group')}: the prompt has {token!r}, cached is {cached!r}")
    return "\n".join(map(printable, lines))


def _explain_tiers(urls: Sequence[str], reach_of: ReachOf, num_tokens: int, as_json: bool) -> None:
    for url in urls:
        with opened(url, inspection.view_tier, "kvpage explain") as tier:
            reach = reach_of(tier)
        shown = TierURL.parse(url).text
        print(json.dumps(as_plain(shown, reach)) if as_json else told_by_tier(shown, reach, num_tokens))


def read_tokens(text: str) -> list[int]:
    """Return the ids in a text. Raises ValueError for another text."""
    try:
        return [int(part) for part in text.strip().strip("[]").replace(",", " ").split()]
    except ValueError:
        raise ValueError("tokens must be integers, as JSON or with spaces or commas between them") from None
