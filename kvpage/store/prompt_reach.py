"""PromptReach: how many tokens of a prompt a tier has, and why it ends there, told from the tier alone.

    heads of all records ─► the metadata of each model and namespace there ─► keys of the prompt's chunks
                            or the headers of an engine, to its Door       ─► keys as the engine makes them
                                                       each record, verified ─► there, absent or refused

No model is needed: a record carries all that its key is made of, but for the tokens. Nothing is changed or dropped.
`kvpage explain --store URL --tokens FILE`.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvpage.blocks.explain import Ending
from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.store.bytes.byte_jobs import ByteKeys
from kvpage.store.bytes.header import Value, decode_header
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

State = tuple[str, str]
"""The reason and the details of a miss."""


class Refusal(NamedTuple):
    """A record that is there, and is not given: the token at which its chunk begins, the reason, and the details."""

    token: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PromptReach:
    """How far one model's chunks of one namespace reach into a prompt, in one tier.

    Attributes:
        name: of the model and its chunks.
        facts: the metadata of the records, by name.
        num_tokens: leading tokens that are whole.
        ending: why not more.
        num_further: tokens of whole chunks after the end.
        refused: records of the prompt that are there and wrong.
    """

    name: str
    facts: dict[str, Any] = field(repr=False)
    num_tokens: int
    ending: str
    num_further: int
    refused: tuple[Refusal, ...] = ()

    def __str__(self) -> str:
        lines = [printable(f"{self.num_tokens} tokens of {self.name}: then {self.ending}")]
        extra = self.facts.get("extra")
        lines += [f"other facts: {printable(extra.decode('utf-8', 'replace'))}"] if extra else []
        lines += (
            [f"{self.num_further} tokens further on are there: of use to windows alone"] if self.num_further else []
        )
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


class DoorPart(NamedTuple):
    """One kind of an engine's chunks of a prompt.

    name: of the kind. ends: the token after each chunk. keys: the engine's, of each chunk. is_usual: whether it is told
    of even where no chunk is there. obstacle: why no key can be made; None where keys are.
    """

    name: str
    ends: Sequence[int]
    keys: Sequence[bytes]
    is_usual: bool = True
    obstacle: str | None = None


class Door(Protocol):
    """An engine that keeps a prompt's chunks in a ByteStore, under keys of its own."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""

    def is_mine(self, facts: Mapping[str, Value]) -> bool:
        """Return whether a store's header is this engine's, and of the model that was asked for."""

    def parts(self, facts: Mapping[str, Value], read: Callable[[bytes], bytes | None]) -> Sequence[DoorPart]:
        """Return the chunks of the prompt, as a store with these facts names them.

        read: returns the bytes of a small record by the engine's key; None if it is not there, or refused.

        Raises ValueError where the facts or a record are not as the engine writes them.
        """


MAX_SMALL_BYTES = 1 << 20
FACTS = {"chunk_size", "extra", "kv_dtype", "model_name", "namespace", "worker_id", "world_size"}
ANOTHER_VERSION, OF_OTHER_DOORS = "of another version", "of another engine or model"
OTHERS = {
    BYTES_CODEC: "of other engines: see --door",
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
    metas, headers, others = _metas(tier)
    others += Counter({OTHERS[BYTES_CODEC]: headers.total()})
    reaches = []
    for meta in metas:
        facts = decode_meta(meta)
        if model in (None, facts["model_name"]) and namespace in (None, facts["namespace"]):
            reaches.append(_reach(tier, array, meta, facts))
    return _told(tier, reaches, others)


def door_reach(tier: Tier, door: Door) -> TierReach:
    """Return what a `tier` has of the prompt of an engine's `door`. Records are read as by `tier_reach`.

    Raises:
        TierError: the tier cannot list its records.
    """
    _, headers, others = _metas(tier)
    reaches: list[PromptReach] = []
    for meta, num_records in headers.items():
        try:
            facts = decode_header(meta)
            if door.is_mine(facts):
                reaches += _door_reaches(tier, door, meta, facts)
            else:
                others[OF_OTHER_DOORS] += num_records
        except ValueError:
            others[ANOTHER_VERSION] += num_records
    return _told(tier, reaches, others)


def _told(tier: Tier, reaches: list[PromptReach], others: Counter[str]) -> TierReach:
    reaches.sort(key=lambda reach: -reach.num_tokens)
    return TierReach(tier.name, tuple(reaches), dict(others))


def _metas(tier: Tier) -> tuple[list[bytes], Counter[bytes], Counter[str]]:
    """Return the metadata of all chunks, the number of records by a ByteStore's header, and of others by kind."""
    chunks: dict[bytes, None] = {}
    headers: Counter[bytes] = Counter()
    others: Counter[str] = Counter()
    for info in list(tier.infos()):
        for reader in tier.open([info.key]):
            if reader is not None:
                with reader, suppress(RecordGone):
                    kind, meta = _kind(reader)
                    if kind is None:
                        chunks[meta] = None
                    elif kind == BYTES_CODEC:
                        headers[meta] += 1
                    else:
                        others[OTHERS.get(kind, kind)] += 1
    return list(chunks), headers, others


def _kind(reader: Reader) -> tuple[str | None, bytes]:
    """Return None and the metadata of a chunk's record, or the kind of another one and its meta. Raises RecordGone."""
    try:
        head, _ = read_head(reader)
        if is_bytes(head.codec):
            return BYTES_CODEC, head.meta
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
    ends = [min(size * number, len(tokens)) for number in range(1, len(keys) + 1)]
    rank = f"rank {facts['worker_id']} of {facts['world_size']}"
    model = f"model {facts['model_name']!r}, namespace {facts['namespace']!r}"
    name = f"{model} ({facts['kv_dtype']}, {rank}, chunks of {facts['chunk_size']})"
    return _reach_of(list(_states(tier, keys)), ends, len(tokens), name, facts)


def _door_reaches(tier: Tier, door: Door, meta: bytes, facts: dict[str, Value]) -> Iterator[PromptReach]:
    names = ByteKeys(meta)
    for part in door.parts(facts, lambda key: _small(tier, *names.of([key]))):
        if part.obstacle is not None:
            yield PromptReach(part.name, facts, 0, part.obstacle, 0)
            continue
        states = list(_states(tier, names.of(part.keys)))
        if part.is_usual or any(state != ABSENT for state in states):
            yield _reach_of(states, part.ends, door.num_tokens, part.name, facts)


def _small(tier: Tier, key: Key) -> bytes | None:
    """Return the payload of a small record; None if it is not there, or refused."""
    (reader,) = tier.open([key])
    if reader is None:
        return None
    with reader:
        try:
            verify_record(reader, key)
            head, _ = read_head(reader)
            is_small = is_bytes(head.codec) and head.payload_bytes == head.raw_bytes <= MAX_SMALL_BYTES
            return bytes(reader.piece(head.payload_begin, head.payload_end)) if is_small else None
        except (CorruptRecord, UnreadableRecord, TierError):
            return None


def _reach_of(
    states: Sequence[State | None], ends: Sequence[int], num_tokens: int, name: str, facts: dict[str, Any]
) -> PromptReach:
    """Return the reach of chunks into a prompt of `num_tokens`. ends: the token after each."""
    num_whole = next((index for index, state in enumerate(states) if state is not None), len(states))
    begins = [0, *ends]
    further = sum(ends[index] - begins[index] for index in range(num_whole, len(ends)) if states[index] is None)
    refused = [
        Refusal(begins[index], *state) for index, state in enumerate(states) if state is not None and state != ABSENT
    ]
    is_cut = num_whole == len(ends) and begins[-1] < num_tokens
    ending = "the rest is shorter than a chunk" if is_cut else _ending(states, num_whole)
    return PromptReach(name, facts, begins[num_whole], ending, further, tuple(refused))


ABSENT = ("absent", "")


def _ending(states: Sequence[State | None], num_whole: int) -> str:
    if num_whole == len(states):
        return Ending.PROMPT.value
    if states[num_whole] != ABSENT:
        return "a record is refused"
    return Ending.GAP.value if None in states[num_whole:] else Ending.NOT_CACHED.value


def _states(tier: Tier, keys: Sequence[Key]) -> Iterator[State | None]:
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
