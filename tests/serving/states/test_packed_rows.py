"""Packed rows of models with states: logits are those of the model's own forward over each whole sequence."""

from collections.abc import Sequence

import pytest
import torch
from support.state_loop import BLOCK_SIZE, Portion, StateLoop, assert_near, own_logits, random_tokens
from support.state_models import SERVED, make_state_model

CHUNK = 7


def portions_of(prompt: int, length: int) -> list[tuple[int, int]]:
    """Chunks of the prompt, and then one token at a time."""
    cuts = [*range(0, prompt, CHUNK), *range(prompt, length + 1)]
    return list(zip(cuts, cuts[1:], strict=False))


@pytest.mark.parametrize("kind", SERVED)
def test_chunks_decodes_and_marks_in_one_row(kind: str) -> None:
    prompts, lengths = (14, 9, 3, 1, 8), (18, 15, 8, 6, 10)
    model, sequences = make_state_model(kind), random_tokens(*lengths)
    slots, unused = (9, 4, 5, 2, 11), 7
    loop = StateLoop(model, sequences, num_slots=13)
    queues = [portions_of(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(queues):
        step = [Portion(seq, *queue.pop(0), slots[seq]) for seq, queue in enumerate(queues) if queue]
        step[0] = step[0]._replace(marks=((step[0].end, 0),))
        before = loop.states.slots.clone()
        for one, logits in zip(step, loop.step(step), strict=True):
            found[one.seq].append(logits)
        check_untouched(loop, before, {one.slot for one in step} | {0})
        assert torch.equal(loop.states.slots[0], loop.states.slots[step[0].slot])
    assert (loop.states.slots[unused] == 0xFF).all()
    for tokens, parts in zip(sequences, found, strict=True):
        assert_near(torch.cat(parts), own_logits(model, tokens))


def check_untouched(loop: StateLoop, before: torch.Tensor, written: set[int]) -> None:
    others = [slot for slot in range(loop.states.num_slots) if slot not in written]
    assert torch.equal(loop.states.slots[others], before[others])


@pytest.mark.parametrize("kind", SERVED)
def test_restart_at_each_offset(kind: str) -> None:
    length = 3 * BLOCK_SIZE + 2
    model, (tokens, other) = make_state_model(kind), random_tokens(length, 5)
    marks = tuple((position, position) for position in range(1, 3 * BLOCK_SIZE + 1))
    loop = StateLoop(model, [tokens, other], num_slots=length + 2)
    expected = own_logits(model, tokens)
    first = loop.step([Portion(1, 0, 5, length + 1), Portion(0, 0, length, 0, marks)])
    assert_near(first[0], own_logits(model, other))
    assert_near(first[1], expected)
    for position, mark in marks:
        kept = loop.states.slots[mark].clone()
        loop.states.copy(torch.tensor([[mark, length]]))
        assert_near(loop.step([Portion(0, position, length, length)])[0], expected[position:])
        assert torch.equal(loop.states.slots[mark], kept)


def greedy(loop: StateLoop, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """Chunks of the prompts, the decodes of all in one row, each with its slot."""
    slots = [2 * seq + 1 for seq in range(len(prompts))]
    starts = [0] * len(prompts)
    while min(map(len, loop.sequences)) < max(map(len, prompts)) + num_tokens:
        step = []
        for seq, tokens in enumerate(loop.sequences):
            if len(tokens) < len(prompts[seq]) + num_tokens:
                step.append(Portion(seq, starts[seq], min(starts[seq] + CHUNK, len(tokens)), slots[seq]))
        if not step:
            break
        for one, logits in zip(step, loop.step(step), strict=True):
            starts[one.seq] = one.end
            if one.end == len(loop.sequences[one.seq]):
                loop.sequences[one.seq].append(int(logits[-1].argmax()))
    return [tokens[len(prompt) :] for tokens, prompt in zip(loop.sequences, prompts, strict=True)]


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "lfm2", "jamba", "mamba2", "zamba2", "recurrent_gemma"])
def test_greedy_tokens_are_those_of_generate(kind: str) -> None:
    model, prompts = make_state_model(kind), random_tokens(12, 1, 5)
    found = greedy(StateLoop(model, prompts, num_slots=6), prompts, 32)
    for prompt, tokens in zip(prompts, found, strict=True):
        row = torch.tensor([prompt])
        expected = model.generate(row, max_new_tokens=32, do_sample=False, pad_token_id=0)
        assert tokens == expected[0, len(prompt) :].tolist()
