"""Explanation: how far each group of a cache reaches into a prompt, and why it ends there.

    prompt       [ . . . . . . . . . . . . . . . . ]
    attention    |----------------------x                token 23 differs from what is cached
    state        |------------^         x                no checkpoint after token 14
                              the prompt begins here

Nothing is pinned by asking, and nothing counts as used.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, get_args

from kvpage._C import PrefixTree
from kvpage.blocks.namespaces import OF_WEIGHTS, WeightsName, past_version
from kvpage.blocks.sequence_state import Ids
from kvpage.blocks.space import BlockSpace

MOST_NAMESPACES = 1024  # that are searched for a longer match
MOST_VERSIONS = 1024  # whose namespaces of one caller are searched


EditMode = Literal["exact", "erratum"]
MODES: tuple[str, ...] = get_args(EditMode)

Searched = Literal["all", "own", "none"]
"""Where a longer match is searched: in all namespaces; in those of the caller's own, by other weights; nowhere."""


@dataclass(frozen=True, slots=True)
class EditCost:
    """What an edit of a branch costs.

    Attributes:
        session_id: Of the session.
        branch: The branch.
        mode: "exact" or "erratum".
        start: The first token of the span.
        end: The token after the span.
        num_tokens: Tokens of the branch now.
        num_tokens_to_compute: Of these, those that are not cached: what the next request computes of the branch. Where
            no block is free, it may share no part of a block, and compute up to a block more.
        num_released_tokens: Tokens of cached blocks that only the old text needed. They are evicted before all others.
    """

    session_id: str
    branch: str
    mode: EditMode
    start: int
    end: int
    num_tokens: int
    num_tokens_to_compute: int
    num_released_tokens: int

    def __str__(self) -> str:
        return (
            f"an edit ({self.mode}) of tokens {self.start} to {self.end} of session {self.session_id!r}, branch "
            f"{self.branch!r}: {self.num_tokens_to_compute} of {self.num_tokens} tokens were to compute, blocks of "
            f"{self.num_released_tokens} tokens were released"
        )


class Ending(str, Enum):
    """Why a group reaches no further."""

    PROMPT = "the prompt ends"
    DIFFERENT = "the prompt differs from what is cached"
    NOT_CACHED = "nothing more is cached: it was never computed, or evicted"
    KV_EVICTED = "more was cached, and evicted"
    NO_CHECKPOINT = "no usable checkpoint is kept further on"
    GONE = "K and V further on were evicted, and any checkpoint on them"
    EVICTED = "a checkpoint further on was evicted"
    NO_KV = "a checkpoint further on lacks K and V before it"
    GAP = "a chunk is missing before others that are there: it was evicted, removed, or never written"
    NOT_WORTH_LOADING = "the host has more, which is expected to be computed faster than loaded"
    OFF = "prefix caching is off"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class GroupReach:
    """How far one group reaches.

    Attributes:
        group: "attention", "state", or the name of a window.
        num_tokens: Tokens that it has.
        ending: Why not more.
        differs_at: The first token of the prompt that differs from the cached token; None where no such token is known.
        token: That token.
        cached_token: The cached token.
        below: State: the last checkpoint's position, at which the prompt can begin; None without one.
        above: State: the next position that has or had a checkpoint and cannot be used; None where none is known. Of a
            GAP, where it ends.
        eviction: KV_EVICTED: the policy of eviction, where it is known.
    """

    group: str
    num_tokens: int
    ending: Ending
    differs_at: int | None = None
    token: int | None = None
    cached_token: int | None = None
    below: int | None = None
    above: int | None = None
    eviction: str | None = None

    def __str__(self) -> str:
        text = f"{self.group}: {self.num_tokens} tokens, then {self.ending}"
        if self.ending is Ending.DIFFERENT:
            text += f" (token {self.differs_at} is {self.token}, cached is {self.cached_token})"
        if self.ending is Ending.KV_EVICTED and self.eviction is not None:
            text += f" (eviction: {self.eviction})"
        if self.ending is Ending.GAP:
            text += f" (at token {self.above} on)"
        if self.group == "state":
            text += f" (nearest checkpoint below: {_or_none(self.below)}, above: {_or_none(self.above)})"
        return text


class StoreVerdict(str, Enum):
    """What an engine does with what its store has of a prompt."""

    LOADS = "a request would load them"
    NO_MORE = "not a block more than is cached"
    NOT_WORTH_LOADING = "expected to be computed faster than loaded"
    LATE = "it has not answered in time"
    FAILED = "it has failed"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class StoreReach:
    """How far an engine's store reaches into a prompt.

    Attributes:
        num_tokens: Tokens up to which a request could load; 0 where there is no answer.
        verdict: What a request would do.
        groups: What each group has, where the store explains itself.
        error: What went wrong, as text; None otherwise.
    """

    num_tokens: int
    verdict: StoreVerdict
    groups: tuple[GroupReach, ...] = ()
    error: str | None = None

    def __str__(self) -> str:
        text = f"the store has {self.num_tokens} tokens: {self.verdict}"
        if self.error is not None:
            text += f" ({self.error})"
        return "\n    ".join([text, *map(str, self.groups)])


@dataclass(frozen=True, slots=True)
class Explanation:
    """How much of a prompt is cached, and why not more.

    Attributes:
        num_tokens: Tokens of the prompt.
        num_cached_tokens: Tokens that a request would not compute: those that every group has. One is left at least.
        groups: What each group has.
        elsewhere: The namespace with the longest match, and its tokens, where it is longer than in the prompt's own.
        lacks_room: Whether the part of a block that the prompt shares is not used: no block is left to copy it to. A
            request for which pins end may use it all the same.
        version: The version of the weights with the longest match in the caller's own namespace, and its tokens, where
            this is a longer one. A new version finds nothing of it.
        store: What an engine's store has; None without one.
        edits: The last edits of sessions whose text the prompt goes on from, and what they cost.
    """

    num_tokens: int
    num_cached_tokens: int
    groups: tuple[GroupReach, ...]
    elsewhere: tuple[bytes, int] | None = None
    store: StoreReach | None = None
    edits: tuple[EditCost, ...] = ()
    version: tuple[str, int] | None = None
    lacks_room: bool = False

    def __str__(self) -> str:
        lines = [f"{self.num_cached_tokens} of {self.num_tokens} tokens are cached", *map(str, self.groups)]
        if self.lacks_room:
            lines.append("a part of a block is not shared: no block is left to copy it to")
        if self.version is not None:
            lines.append(f"the weights have changed: {_of_version(self.version[0])} has {self.version[1]} tokens")
        elif self.elsewhere is not None:
            lines.append(f"another namespace, {self.elsewhere[0]!r}, has {self.elsewhere[1]} tokens")
        if self.store is not None:
            lines.append(str(self.store))
        lines += map(str, self.edits)
        return "\n  ".join(lines)


def explain_attention(
    space: BlockSpace, tokens: Ids, namespace: bytes, shares_parts: bool, searched: Searched
) -> Explanation:
    """Return how much of a prompt is cached where attention is the only group."""
    reach = reach_of_attention(space, tokens, namespace, shares_parts)
    most = most_found(len(tokens), space.block_size, shares_parts)
    num_cached = min(reach.num_tokens, most)
    lacks_room = num_cached % space.block_size > 0 and _lacks_room(space, tokens, namespace)
    if lacks_room:
        num_cached -= num_cached % space.block_size
    elsewhere, version = longest_elsewhere(space.tree, tokens, namespace, reach.num_tokens, searched)
    return Explanation(len(tokens), num_cached, (reach,), elsewhere, version=version, lacks_room=lacks_room)


def _lacks_room(space: BlockSpace, tokens: Ids, namespace: bytes) -> bool:
    """Return whether the blocks that a prompt takes are too few beside those that it would read a part of."""
    size = space.block_size
    num_on_device = int((space.tree.look(tokens[: (len(tokens) - 1) // size * size], namespace)[0][0] >= 0).sum())
    num_taken = -(-len(tokens) // size) - num_on_device
    return num_taken > space.num_free - space.tree.num_held(tokens, namespace)


def most_found(num_tokens: int, block_size: int, shares_parts: bool) -> int:
    """Return how many tokens of a prompt can be found at most. One is left to compute at least."""
    most = max(num_tokens - 1, 0)
    return most if shares_parts else most // block_size * block_size


def reach_of_attention(space: BlockSpace, tokens: Ids, namespace: bytes, shares_parts: bool) -> GroupReach:
    """Return how far K and V are cached."""
    size = space.block_size
    ids, num_common, cached, was_evicted = space.tree.look(tokens, namespace)
    device_ids = ids[0, : max(len(tokens) - 1, 0) // size]  # one token is left over
    num_host = int((device_ids < 0).sum())
    if not space.should_load(num_host):
        return GroupReach("attention", (len(device_ids) - num_host) * size, Ending.NOT_WORTH_LOADING)
    reach = num_common if shares_parts else ids.shape[1] * size
    ending = Ending.NOT_CACHED if cached is None else Ending.DIFFERENT
    if was_evicted:
        ending = Ending.KV_EVICTED
    if reach >= most_found(len(tokens), size, shares_parts):
        ending = Ending.PROMPT
    eviction = space.tree.eviction if ending is Ending.KV_EVICTED else None
    if cached is None or num_common == len(tokens):
        return GroupReach("attention", reach, ending, eviction=eviction)
    return GroupReach("attention", reach, ending, num_common, int(tokens[num_common]), cached, eviction=eviction)


def longest_elsewhere(
    tree: PrefixTree, tokens: Ids, namespace: bytes, num_tokens: int, searched: Searched
) -> tuple[tuple[bytes, int] | None, tuple[str, int] | None]:
    """Return the other namespace that has most of the tokens, and how many, if that is more than `num_tokens`.

    And the same among other versions of the weights alone, whose names tell the caller's own namespaces. How long that
    takes tells how many versions there are, and nothing of other callers.
    """
    if searched == "none":
        return None, None
    versions = versions_of(tree, namespace)
    num_of_version, version = max(
        ((tree.look(tokens, name)[1], made_by) for made_by, name in versions), default=(0, "")
    )
    of_version = (version, num_of_version) if num_of_version > num_tokens else None
    if searched == "own":
        return None, of_version
    names = {name for name in tree.names(MOST_NAMESPACES) if name != namespace} | {name for _, name in versions}
    most, name = max(((tree.look(tokens, name)[1], name) for name in names), default=(0, b""))
    return (name, most) if most > num_tokens else None, of_version


def versions_of(tree: PrefixTree, namespace: bytes) -> list[tuple[str, bytes]]:
    """Return the other versions that have cached blocks, with a caller's namespace in each, for the same adapter.

    Names of one version stand together, so a look at each version's first one finds the next.
    """
    weights, caller = WeightsName.split(namespace)
    versions, begin = [""], OF_WEIGHTS
    while begin and len(versions) < MOST_VERSIONS and (names := tree.names(1, begin)):
        if not names[0].startswith(OF_WEIGHTS):
            break
        versions.append(WeightsName.split(names[0])[0].version)
        begin = past_version(names[0])
    named = {version: replace(weights, version=version).within(caller) for version in versions}
    return [(version, name) for version, name in named.items() if name != namespace]


def _of_version(version: str) -> str:
    return f"version {version!r}" if version else "the version before any update"


def _or_none(position: int | None) -> str:
    return "none" if position is None else str(position)
