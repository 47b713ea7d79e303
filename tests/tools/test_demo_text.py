"""The demo's words: what a tier holds, and the first answers, over a tokenizer of letters."""

import io
from types import SimpleNamespace

import pytest

pytest.importorskip("rich")

from rich.console import Console

from kvpage.store.tiers.tier import TierStats
from kvpage.tools.demo_text import NUM_SHOWN, bytes_in_words, show_answers, tier_in_words


class Letters:
    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, token_ids))


def output(prompt: str, answer: str, num_cached: int) -> SimpleNamespace:
    return SimpleNamespace(
        prompt_token_ids=tuple(map(ord, prompt)), token_ids=list(map(ord, answer)), num_cached_tokens=num_cached
    )


def test_answers_are_shown_as_text() -> None:
    console = Console(file=io.StringIO(), width=200)
    outputs = [output("who? [bold]", "me", 3), output("x" * 400 + " the end", "yes", 0)]
    show_answers(outputs + [output("hidden", "hidden", 0)] * NUM_SHOWN, Letters(), console)
    text = console.file.getvalue()
    assert "who? [bold]" in text and "3 of 11 tokens" in text
    assert "the end" in text and "x" * 161 not in text
    assert text.count("hidden") == 2 * (NUM_SHOWN - 2)


@pytest.mark.parametrize(
    "stats, words",
    [
        (TierStats("disk", 96, 3 << 19, 1 << 30), "96 records, 1.5 MiB of 1.0 GiB; 0 evicted, 0 corrupted, 0 errors"),
        (TierStats("redis", None, None, None, 1, 2, 3), "1 evicted, 2 corrupted, 3 errors"),
        (TierStats("s3", 1200, 10, None), "1,200 records, 10 bytes; 0 evicted, 0 corrupted, 0 errors"),
    ],
)
def test_a_tier_in_words(stats: TierStats, words: str) -> None:
    assert tier_in_words(stats) == words


@pytest.mark.parametrize(
    "num_bytes, words",
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (1 << 50, "1024.0 TiB"), (5 << 50, "5120.0 TiB")],
)
def test_bytes_in_words(num_bytes: int, words: str) -> None:
    assert bytes_in_words(num_bytes) == words
