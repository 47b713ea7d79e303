"""Traces of prompts for hybrid models: who shares which tokens with whom, one request after the other."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
VOCAB = 128_000


@dataclass(frozen=True, slots=True)
class Request:
    """prompt, answer: tokens. system: tokens of the prompt that its author marks, as the end of a system prompt."""

    prompt: Tokens
    answer: Tokens
    system: int

    @property
    def computed(self) -> Tokens:
        """The tokens that have been computed at its end: all but the last one."""
        return np.concatenate([self.prompt, self.answer[:-1]])


def aligned(rng: np.random.Generator) -> list[Request]:
    """64 prompts of 2,200 tokens, of which one of 12 system prompts is 1,600: 16 more than three blocks of 528."""
    return _shared(rng, num_requests=64, sizes=[1600] * 12, num_own=600)


def shifted(rng: np.random.Generator) -> list[Request]:
    """The same, shifted by 100 tokens: the system prompts are 1,500 tokens, which is within the third block."""
    return _shared(rng, num_requests=64, sizes=[1500] * 12, num_own=700)


def short(rng: np.random.Generator) -> list[Request]:
    """96 prompts with one of 12 system prompts, each shorter than an attention block of 2,096 tokens."""
    return _shared(rng, num_requests=96, sizes=[250, 500, 1000, 1500, 1750, 2000] * 2, num_own=300)


def chats(rng: np.random.Generator) -> list[Request]:
    """240 turns of chats, 12 at a time: a system prompt of 800 tokens, and each turn goes on from the one before."""
    systems = _systems(rng, [800] * 3)
    return _interleaved(rng, lambda: _chat(rng, systems[rng.integers(3)]), num_requests=240, num_at_once=12)


def agents(rng: np.random.Generator) -> list[Request]:
    """240 calls of agents, 6 at a time: 3,000 tokens of tools, and each step is tried twice before it goes on."""
    tools = _tokens(rng, 3000)
    return _interleaved(rng, lambda: _agent(rng, tools), num_requests=240, num_at_once=6)


TRACES: dict[str, Callable[[np.random.Generator], list[Request]]] = {
    make.__name__: make for make in (aligned, shifted, short, chats, agents)
}


def _tokens(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(0, VOCAB, count).astype(np.int32)


def _systems(rng: np.random.Generator, sizes: list[int]) -> list[Tokens]:
    """Return system prompts with distinct first tokens: two that share one by chance are no workload of anybody's."""
    systems = [_tokens(rng, size) for size in sizes]
    for number, system in enumerate(systems):
        system[0] = number
    return systems


def _shared(rng: np.random.Generator, num_requests: int, sizes: list[int], num_own: int) -> list[Request]:
    systems = _systems(rng, sizes)
    chosen = [systems[i] for i in rng.integers(0, len(systems), num_requests)]
    return [Request(np.concatenate([one, _tokens(rng, num_own)]), _tokens(rng, 16), len(one)) for one in chosen]


def _chat(rng: np.random.Generator, system: Tokens) -> Iterator[Request]:
    prompt = system
    for _ in range(int(rng.integers(2, 12))):
        prompt = np.concatenate([prompt, _tokens(rng, int(rng.integers(20, 300)))])
        answer = _tokens(rng, int(rng.integers(50, 400)))
        yield Request(prompt, answer, len(system))
        prompt = np.concatenate([prompt, answer])


def _agent(rng: np.random.Generator, tools: Tokens) -> Iterator[Request]:
    prompt = np.concatenate([tools, _tokens(rng, 200)])
    for _ in range(int(rng.integers(3, 10))):
        tries = [Request(prompt, _tokens(rng, int(rng.integers(50, 300))), len(tools)) for _ in range(2)]
        yield from tries
        prompt = np.concatenate([prompt, tries[1].answer, _tokens(rng, int(rng.integers(100, 600)))])


def _interleaved(
    rng: np.random.Generator, begin: Callable[[], Iterator[Request]], num_requests: int, num_at_once: int
) -> list[Request]:
    """Take the next request of one of several sessions. One that ends gives its place to another."""
    sessions = [begin() for _ in range(num_at_once)]
    requests: list[Request] = []
    while len(requests) < num_requests:
        place = int(rng.integers(num_at_once))
        if (request := next(sessions[place], None)) is None:
            sessions[place] = begin()
        else:
            requests.append(request)
    return requests
