"""Text of the demo: the answers of a model with a tokenizer, and the contents of its store's tier in words."""

from collections.abc import Iterable
from typing import Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpage.serving import RequestOutput
from kvpage.store.tiers.tier import TierStats

NUM_SHOWN, PROMPT_CHARACTERS = 4, 160
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


class Decoder(Protocol):
    """The part of a tokenizer that the demo uses. Tokenizers of transformers have it."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> str: ...


def show_answers(outputs: Iterable[RequestOutput], tokenizer: Decoder, console: Console) -> None:
    """Print the first few prompts, with the end of long ones, and the model's answers."""
    table = Table("prompt", "answer", "from the cache", title="the first answers", show_lines=True)
    for output in list(outputs)[:NUM_SHOWN]:
        prompt = tokenizer.decode(list(output.prompt_token_ids), skip_special_tokens=True).strip()
        if len(prompt) > PROMPT_CHARACTERS:
            prompt = "..." + prompt[-PROMPT_CHARACTERS:]
        answer = tokenizer.decode(list(output.token_ids), skip_special_tokens=True).strip()
        table.add_row(
            Text(prompt), Text(answer), f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens"
        )
    console.print(table)


def tier_in_words(stats: TierStats) -> str:
    """Return text such as "96 records, 4.5 MiB of 1.0 GiB; 0 evicted, 0 corrupted, 0 errors"."""
    sizes = [] if stats.num_records is None else [f"{stats.num_records:,} records"]
    if stats.num_bytes is not None:
        limit = "" if stats.capacity is None else f" of {bytes_in_words(stats.capacity)}"
        sizes.append(bytes_in_words(stats.num_bytes) + limit)
    counted = f"{stats.evicted:,} evicted, {stats.corrupted:,} corrupted, {stats.errors:,} errors"
    return "; ".join([", ".join(sizes), counted] if sizes else [counted])


def bytes_in_words(num_bytes: int) -> str:
    """Return text such as "4.5 MiB"."""
    size, unit = float(num_bytes), 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{num_bytes} bytes" if unit == 0 else f"{size:.1f} {UNITS[unit]}"
