"""PromptReach: how many tokens of a prompt a tier has, and why it ends there, told from the tier alone.

    heads of all records ─► the metadata of each model and namespace there ─► keys of the prompt's chunks
                                                       each record, verified ─► there, absent or refused

No model is needed: a record carries all that its key is made of, but for the tokens. Nothing is changed or dropped.
`kvpage explain --store URL --tokens FILE`.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvpage.blocks.explain import Ending
from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.store.records.keys import chain_keys, decode_meta
from kvpage.store.records.record import (
    BYTES_CODEC,
    INDEX_CODEC,
    SEALED_CODEC,
    STATE_CODEC,
    CorruptRecord,
    UnreadableRecord,
    is_bytes,
)
from kvpage.store.records.record_io import read_head, verify_record
from kvpage.store.tiers.tier import Key, Reader, RecordGone, Tier, TierError


class Refusal(NamedTuple):
    """A record that is there, and is not given: the token at which its chunk begins, the reason, and the details."""

    token: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PromptReach:
    """How far one model's chunks of one namespace reach into a prompt, in one tier.

    Attributes:
        facts: the metadata of the records, by name.
        num_tokens: leading tokens that are whole.
        ending: why not more.
        num_further: tokens of whole chunks after the end.
        refused: records of the prompt that are there and wrong.
    """

    facts: dict[str, Any] = field(repr=False)
    num_tokens: int
    ending: str
    num_further: int
    refused: tuple[Refusal, ...] = ()

    def __str__(self) -> str:
        facts = self.facts
        rank = f"rank {facts['worker_id']} of {facts['world_size']}"
        extra = facts["extra"].decode("utf-8", "replace") if facts["extra"] else ""
        name = f"model {facts['model_name']!r}, namespace {facts['namespace']!r}"
        lines = [
            printable(
                f"{self.num_tokens} tokens of {name} ({facts['kv_dtype']}, {rank}, chunks of {facts['chunk_size']}): "
                f"then {self.ending}"
            )
        ]
        lines += [f"other facts: {printable(extra)}"] if extra else []
        lines += [f"{self.num_further} tokens further on are there, and of no use"] if self.num_further else []
        lines += [f"refused at token {token}: {reason} ({message})" for token, reason, message in self.refused]
        return "\n    ".join(lines)


@dataclass(frozen=True, slots=True)
class TierReach:
    """What a tier has of a prompt.

    Attributes:
        tier: its name.
        reaches: of each model and namespace with chunks there, the longest first.
        others: records that are no chunks, or cannot be read, by kind.
    """

    tier: str
    reaches: tuple[PromptReach, ...]
    others: dict[str, int]


FACTS = {"chunk_size", "extra", "kv_dtype", "model_name", "namespace", "worker_id", "world_size"}
ANOTHER_VERSION = "of another version"
OTHERS = {
    BYTES_CODEC: "of other engines, which name them themselves: see log_requests of their tier",
    SEALED_CODEC: "sealed: the URL names no keys, see seal_key_file",
    STATE_CODEC: "states",
    INDEX_CODEC: "indexes of states",
    "key": "sealed with a key that is not here",
}


def tier_reach(tier: Tier, tokens: Tokens, model: str | None = None, namespace: bytes | None = None) -> TierReach:
    """Return what a `tier` has of a prompt's `tokens`. Each record's head is read, and those of the prompt whole.

    Args:
        model: tells of this model's records alone; None for all.
        namespace: tells of this namespace alone; None for all.

    Raises:
        TierError: the tier cannot list its records.
        ValueError, TypeError: the tokens are not tokens, or none.
    """
    array = as_tokens(tokens)
    if not len(array):
        raise ValueError("tokens must be at least one, got none")
    metas, others = _metas(tier)
    reaches = []
    for meta in metas:
        facts = decode_meta(meta)
        if model in (None, facts["model_name"]) and namespace in (None, facts["namespace"]):
            reaches.append(_reach(tier, array, meta, facts))
    reaches.sort(key=lambda reach: -reach.num_tokens)
    return TierReach(tier.name, tuple(reaches), dict(others))


def _metas(tier: Tier) -> tuple[list[bytes], Counter[str]]:
    """Return the metadata of all chunks, each once, and the number of other records by kind."""
    metas: dict[bytes, None] = {}
    others: Counter[str] = Counter()
    for info in list(tier.infos()):
        for reader in tier.open([info.key]):
            if reader is not None:
                with reader, suppress(RecordGone):
                    kind, meta = _kind(reader)
                    if kind is None:
                        metas[meta] = None
                    else:
                        others[OTHERS.get(kind, kind)] += 1
    return list(metas), others


def _kind(reader: Reader) -> tuple[str | None, bytes]:
    """Return None and the metadata of a chunk's record, or the kind of another one. Raises RecordGone."""
    try:
        head, _ = read_head(reader)
        if is_bytes(head.codec):
            return BYTES_CODEC, b""
        if head.codec in OTHERS:
            return head.codec, b""
        facts = decode_meta(head.meta)
        size = facts["chunk_size"]
        if not facts.keys() >= FACTS or not size.isascii() or not size.isdigit() or not 0 < int(size) < 2**31:
            return ANOTHER_VERSION, b""
        return None, head.meta
    except (CorruptRecord, UnreadableRecord) as error:
        return error.reason, b""
    except (ValueError, KeyError):
        return ANOTHER_VERSION, b""


def _reach(tier: Tier, tokens: Any, meta: bytes, facts: dict[str, Any]) -> PromptReach:
    size = int(facts["chunk_size"])
    keys = chain_keys(hashlib.sha256(meta).digest(), size, tokens)
    states = list(_states(tier, keys))
    num_whole = next((index for index, state in enumerate(states) if state is not None), len(states))
    lengths = [min(size, len(tokens) - index * size) for index in range(len(keys))]
    further = [length for length, state in zip(lengths, states, strict=True) if state is None][num_whole:]
    refused = [
        Refusal(index * size, *state) for index, state in enumerate(states) if state is not None and state != ABSENT
    ]
    ending = _ending(states, num_whole)
    return PromptReach(facts, sum(lengths[:num_whole]), ending, sum(further), tuple(refused))


ABSENT = ("absent", "")


def _ending(states: Sequence[tuple[str, str] | None], num_whole: int) -> str:
    if num_whole == len(states):
        return Ending.PROMPT.value
    if states[num_whole] != ABSENT:
        return "a record is refused"
    return Ending.GAP.value if None in states[num_whole:] else Ending.NOT_CACHED.value


def _states(tier: Tier, keys: Sequence[Key]) -> Iterator[tuple[str, str] | None]:
    """Yield for each key None for a whole record, or the reason and details of a miss."""
    for key in keys:
        (reader,) = tier.open([key])
        if reader is None:
            yield ABSENT
            continue
        with reader:
            try:
                verify_record(reader, key)
                yield None
            except RecordGone:
                yield ABSENT
            except (CorruptRecord, UnreadableRecord) as error:
                yield error.reason, str(error)
            except TierError as error:
                yield "tier", str(error)


def printable(text: str) -> str:
    """Return the text without characters that are not printable."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
