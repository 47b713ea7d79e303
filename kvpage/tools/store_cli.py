"""`kvpage store`: lists and checks the records of a tier, and makes room in it."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from kvpage.store import inspection
from kvpage.store.config import parse_size
from kvpage.store.tiers.tier import Tier, TierError

store_app = typer.Typer(no_args_is_help=True, help="Look into a store of chunks, by a tier's URL.")
Url = Annotated[str, typer.Argument(help="such as disk:///var/kv, disk:kv (relative) or redis://host:6379/0")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@contextmanager
def opened(url: str, open_tier: Callable[[str], Tier], command: str = "kvpage store") -> Iterator[Tier]:
    """Yield the tier. Its errors end the `command` with one line. Other owners are named on standard error."""
    try:
        tier = open_tier(url)
        for owner in inspection.owners_of(tier):
            print(f"{owner} has it open: the following is a view of one moment", file=sys.stderr)
        try:
            yield tier
        finally:
            tier.close()
    except (ValueError, OSError, TierError) as error:
        raise SystemExit(f"{command}: {error}") from error


@store_app.command()
def ls(url: Url, as_json: AsJson = False) -> None:
    """List the records."""
    with opened(url, inspection.view_tier) as tier:
        records = list(inspection.summaries(tier))
    if as_json:
        print(json.dumps([{**asdict(record), "namespace": (record.namespace or b"").hex()} for record in records]))
        return
    table = Table("key", "model", "namespace", "tokens", "codec", "bytes", "age")
    for record in records:
        age = "" if record.age is None else f"{record.age:.0f} s"
        model = "(unreadable)" if record.model is None else escape(record.model)
        name = "" if not record.namespace else escape(repr(record.namespace)[2:-1])
        num_tokens, codec = str(record.num_tokens or ""), record.codec or ""
        table.add_row(record.key[:16], model, name, num_tokens, codec, f"{record.num_bytes:,}", age)
    Console().print(table)


@store_app.command()
def stat(url: Url, as_json: AsJson = False) -> None:
    """Count records, tokens and bytes, by model."""
    with opened(url, inspection.view_tier) as tier:
        rows = inspection.by_model(list(inspection.summaries(tier)))
        stats = tier.stats()  # afterwards: without records that are gone
    if as_json:
        models = [dict(zip(("model", "records", "tokens", "bytes"), row, strict=True)) for row in rows]
        print(json.dumps({**asdict(stats), "models": models}))
        return
    table = Table("model", "records", "tokens", "bytes", title=f"{stats.name}: {stats.num_records} records")
    for model, *counts in rows:
        table.add_row(escape(model), *(f"{count:,}" for count in counts))
    Console().print(table)
    if stats.capacity:
        Console().print(f"{stats.num_bytes or 0:,} of {stats.capacity:,} bytes")


@store_app.command()
def verify(url: Url, delete: Annotated[bool, typer.Option("--delete", help="remove broken records")] = False) -> None:
    """Read every record, and compare its checksum. Exit code 1 if one is broken, or the tier itself is damaged."""
    open_tier = inspection.open_tier if delete else inspection.view_tier
    with opened(url, open_tier) as tier, Progress(console=Console(stderr=True), transient=True) as progress:
        num_records = tier.stats().num_records
        task = progress.add_task("verifying", total=num_records)
        num_whole, broken = inspection.verify(tier, lambda count: progress.advance(task, count))
        num_damaged = tier.stats().corrupted
        if delete:
            tier.remove(broken)
            tier.flush(sync=True)
    print(f"{num_whole} records are whole, {len(broken)} are broken{' and removed' if delete and broken else ''}")
    if (num_left := (num_records or 0) - num_whole - len(broken)) > 0:
        print(f"{num_left} are not checked: their key is not here, or they went meanwhile")
    if num_damaged:
        print(f"{num_damaged} places are damaged: their records are lost")
    for key in broken:
        print(key.hex())
    raise typer.Exit(1 if broken or num_damaged else 0)


@store_app.command()
def gc(
    url: Url,
    free: Annotated[str | None, typer.Option(help="bytes to free, such as 10GiB: the least recently used go")] = None,
    older_than: Annotated[str | None, typer.Option(help="age since the last use, such as 12h or 7d")] = None,
) -> None:
    """Make room. A disk tier that a process has open is refused: that process makes room by itself."""
    if (free is None) == (older_than is None):
        raise SystemExit("kvpage store: give either --free or --older-than")
    with opened(url, inspection.open_tier) as tier:
        if free is not None:
            count = inspection.free(tier, parse_size(free))
        else:
            count = inspection.remove_older(tier, parse_age(older_than or ""))
        tier.flush(sync=True)
    print(f"{count} records removed")


def parse_age(text: str) -> float:
    """Return the seconds of "90s", "5m", "12h" or "7d". Raises ValueError for other texts."""
    unit = UNITS.get(text[-1:])
    if unit is None or not text[:-1].isdecimal():
        raise ValueError(f"an age must be like 90s, 5m, 12h or 7d, got {text!r}")
    return int(text[:-1]) * float(unit)
