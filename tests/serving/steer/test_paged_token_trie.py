"""PagedTokenTrie: the log-probabilities of a full forward pass, with each token computed once."""

import random

import pytest
import torch
from support.engines import B, make_engine
from support.models import VOCAB, make_prompts

from kvpage import OutOfBlocks
from kvpage.serving import Engine, PagedTokenTrie, SamplingParams


def full_logprobs(engine: Engine, token_lists: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        rows = [engine.debug.runner.model(torch.tensor([tokens])).logits[0, -1] for tokens in token_lists]
    return torch.stack(rows).log_softmax(dim=-1)


def check(trie: PagedTokenTrie, token_lists: list[list[int]]) -> int:
    """Compares; returns how many tokens were computed for it."""
    before = trie.engine.stats().num_computed_tokens
    found = trie.next_token_logprobs(token_lists)
    assert found.dtype == torch.float32 and found.shape == (len(token_lists), VOCAB)
    torch.testing.assert_close(found, full_logprobs(trie.engine, token_lists), rtol=1e-4, atol=1e-4)
    trie.engine.manager.check()
    return trie.engine.stats().num_computed_tokens - before


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("kind", ["llama", "mistral", "deepseek_v3"])
def test_particles_compute_one_token_each(kind: str, enable_prefix_caching: bool) -> None:
    rng = random.Random(1)
    with PagedTokenTrie(make_engine(kind=kind, enable_prefix_caching=enable_prefix_caching)) as trie:
        (prompt,) = make_prompts([3 * B + 1])
        assert check(trie, [prompt]) == len(prompt)
        particles = [prompt] * 6
        for _ in range(2 * B):
            particles = [rng.choice(particles) + [rng.randrange(VOCAB)] for _ in particles]
            assert check(trie, particles) == len({tuple(tokens) for tokens in particles})
            assert check(trie, particles) == 0
        blocks = trie.engine.stats().num_used_blocks
        assert blocks < 6 * 6 and trie.num_branches <= 6 + 2 * B * 6
    assert trie.engine.stats().num_used_blocks == 0 and trie.num_branches == trie.num_logprobs == 0


@pytest.mark.parametrize("budget", [3, 64])
def test_lists_asked_for_together_share_what_they_have_in_common(budget: int) -> None:
    trie = PagedTokenTrie(make_engine(max_num_batched_tokens=budget))
    (stem,) = make_prompts([5 * B + 1])
    forks = [[*stem, 1], [*stem, 2, 3], [*stem, 2, 4], [*stem, 5]]
    assert check(trie, forks) <= len(stem) + 1 + (1 + 2) + 2 + 1
    assert check(trie, forks[::-1]) == 0


def test_all_beginnings_of_a_list_are_read_off_one_pass() -> None:
    trie = PagedTokenTrie(make_engine())
    (tokens,) = make_prompts([3 * B + 2])
    beginnings = [tokens[:end] for end in range(1, len(tokens) + 1)]
    assert check(trie, beginnings) == len(tokens)
    assert trie.num_branches == 1 and trie.num_logprobs == len(tokens)
    assert check(trie, [tokens[:2], tokens[:2], tokens]) == 0
    assert check(trie, [[*tokens[:5], VOCAB - 1]]) <= 2  # the rest of the second block, and the token


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_random_lists_with_few_blocks_branches_and_logprobs(seed: int, enable_prefix_caching: bool) -> None:
    rng = random.Random(seed)
    engine = make_engine(rng.choice([8, 16, 40]), enable_prefix_caching=enable_prefix_caching)
    trie = PagedTokenTrie(engine, max_branches=rng.choice([1, 3, 50]), max_logprobs=rng.choice([1, 5, 100]))
    known: list[list[int]] = [[0]]
    for _ in range(25):
        asked = []
        for _ in range(rng.randint(1, 6)):
            base = rng.choice(known)
            tokens = base[: rng.randint(0, len(base))] + [rng.randrange(3) for _ in range(rng.randint(1, B))]
            asked.append(tokens[: 7 * B])
        check(trie, asked)
        known += asked
        assert trie.num_branches <= trie.max_branches and trie.num_logprobs <= trie.max_logprobs
        nodes, todo = [], [trie._root]
        while todo:
            nodes.append(todo.pop())
            todo += nodes[-1].children.values()
        leaves = [node for node in nodes if not node.children and node.parent]
        assert all(node.logprobs is not None or node.branch in trie._by_use for node in leaves), "a leaf of no use"
    trie.clear()
    assert engine.stats().num_used_blocks == 0
    check(trie, known[-3:])


def test_requests_and_tries_share_blocks_and_give_way() -> None:
    engine = make_engine(12)
    (prompt,) = make_prompts([5 * B])
    params = SamplingParams(max_tokens=2 * B)
    tokens = engine.generate([prompt], params)[0].token_ids
    before = [*engine.scheduler.reclaimers]
    trie = PagedTokenTrie(engine)
    assert check(trie, [[*prompt, tokens[0]]]) <= 2
    other = make_prompts([3 * B, 3 * B], seed=7)
    check(trie, other)
    assert trie.num_branches == 3
    assert engine.generate([prompt, make_prompts([4 * B], seed=8)[0]], params)[0].token_ids == tokens
    assert trie.num_branches < 3, "a request that lacks blocks gets those of idle branches"
    engine.add_request(prompt, params, "one")
    engine.step()
    check(trie, [*other, *make_prompts([8 * B], seed=9)])
    assert engine.stats().num_preemptions > 0
    trie.close()
    trie.close()
    assert engine.scheduler.reclaimers == before
    found = []
    while engine.has_unfinished:
        found += [one.token_id for one in engine.step()]
    assert found == tokens[1:]


def test_namespaces_share_nothing() -> None:
    engine = make_engine()
    (prompt,) = make_prompts([4 * B])
    for namespace in (b"a", b"b"):
        with PagedTokenTrie(engine, namespace) as trie:
            assert check(trie, [prompt]) == len(prompt)
    with PagedTokenTrie(engine, b"a") as trie:
        assert check(trie, [prompt]) <= B


def test_logprobs_own_their_memory() -> None:
    trie = PagedTokenTrie(make_engine())
    trie.next_token_logprobs(make_prompts([3, 4, 5]))
    for node in trie._cached:
        assert node.logprobs.untyped_storage().nbytes() == 4 * VOCAB


def test_errors_leave_everything_usable() -> None:
    engine = make_engine(8)
    num_before = len(engine.scheduler.reclaimers)
    trie = PagedTokenTrie(engine)
    (prompt,) = make_prompts([B])
    check(trie, [prompt])
    for tokens, message in (([], "at least one token"), ([VOCAB], "ids in"), ([1] * 257, "max_model_len=256")):
        with pytest.raises(ValueError, match=message):
            trie.next_token_logprobs([[1], tokens])
    assert trie.num_logprobs == 1
    with pytest.raises(OutOfBlocks):
        trie.next_token_logprobs([[1] * (8 * B + 1)])
    check(trie, [prompt, [1, 2]])

    def fail(module: object, args: tuple) -> None:
        handle.remove()
        raise RuntimeError("boom")

    handle = engine.debug.runner.model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="boom"):
        trie.next_token_logprobs([[*prompt, 3], [*prompt, 4]])
    engine.manager.check()
    check(trie, [prompt, [*prompt, 3], [*prompt, 4]])
    assert trie.next_token_logprobs([]).shape == (0, VOCAB)
    for fields in ({"max_branches": 0}, {"max_logprobs": 1.5}):
        with pytest.raises(ValueError, match="must be a positive integer"):
            PagedTokenTrie(engine, **fields)
    with pytest.raises(TypeError, match="namespace must be bytes"):
        PagedTokenTrie(engine, "tenant")
    assert len(engine.scheduler.reclaimers) == 1 + num_before
