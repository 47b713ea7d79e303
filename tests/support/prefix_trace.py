"""A trace of prompts that share prefixes, and what an oracle that keeps everything would find of each.

group 0   [ prefix 0 ][ own tail ]      [ prefix 0 ][ own tail ]   ...
group 1   [ prefix 1 ][ own tail ]      and turns: [ an earlier prompt ][ more ]
"""

import random
from typing import NamedTuple


class Ask(NamedTuple):
    """One prompt, and the salt of its tenant."""

    tokens: tuple[int, ...]
    salt: str | None


def make_trace(
    block_size: int, num_groups: int = 6, num_each: int = 8, seed: int = 0, salts: tuple[str | None, ...] = (None,)
) -> list[Ask]:
    """Return prompts of several groups, mixed. Prefixes have 2 to 8 blocks; a third of the prompts go on from others.

    salts: each group has the next one of these.
    """
    rng = random.Random(seed)
    asks: list[Ask] = []
    prefixes = [_tokens(rng, block_size * rng.randint(2, 8)) for _ in range(num_groups)]
    groups = [group for group in range(num_groups) for _ in range(num_each)]
    rng.shuffle(groups)
    for group in groups:
        salt = salts[group % len(salts)]
        earlier = [ask for ask in asks if ask.salt == salt and ask.tokens[: len(prefixes[group])] == prefixes[group]]
        begin = prefixes[group]
        if earlier and rng.random() < 0.33:  # routers know whole blocks only
            begin = rng.choice(earlier).tokens
            begin = begin[: len(begin) // block_size * block_size]
        asks.append(Ask((*begin, *_tokens(rng, rng.randint(3, 2 * block_size))), salt))
    return asks


def oracle_found(asks: list[Ask], block_size: int) -> list[int]:
    """Return how many leading tokens of each prompt are in whole blocks of an earlier one of the same salt."""
    known: list[Ask] = []
    found = []
    for tokens, salt in asks:
        most = max((_num_common(tokens, one.tokens) for one in known if one.salt == salt), default=0)
        found.append(min(most, len(tokens) - 1))
        known.append(Ask(tokens[: len(tokens) // block_size * block_size], salt))
    return found


def _num_common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(first), len(second)))


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(10, 300) for _ in range(count))
