"""Branches: what is computed in pieces and forks gives the logits of one whole forward pass."""

import random

import numpy as np
import pytest
import torch
from support.engines import B, make_engine
from support.models import VOCAB, make_prompts

from kvpage import OutOfBlocks
from kvpage.serving import Branch, Branches, Engine, SamplingParams


def whole_logits(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """After the last token, by the model's own forward."""
    with torch.no_grad():
        return engine.debug.runner.model(torch.tensor([tokens])).logits[0, -1]


def check_logits(engine: Engine, branches: list[Branch], logits: torch.Tensor) -> None:
    assert logits.shape == (len(branches), VOCAB)
    for branch, row in zip(branches, logits, strict=True):
        torch.testing.assert_close(row, whole_logits(engine, branch.token_ids.tolist()), rtol=1e-4, atol=1e-4)


def state(engine: Engine) -> tuple:
    return engine.manager.num_free_blocks, engine.manager.stats().num_sequences, engine.stats().num_computed_tokens


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("budget", [2, 64])
def test_random_forks_and_appends(enable_prefix_caching: bool, budget: int) -> None:
    rng = random.Random(budget)
    engine = make_engine(64, enable_prefix_caching=enable_prefix_caching, max_num_batched_tokens=budget)
    branches, live, num_forks = Branches(engine), [], 0
    for _ in range(60):
        if len(live) < 3:
            live.append(branches.start([rng.randrange(3) for _ in range(rng.randint(1, 3 * B))]))
        elif len(live) > 6:
            branches.release([live.pop(rng.randrange(len(live)))])
        else:
            parent = rng.choice(live)
            if parent.num_computed == len(parent):
                fewest = branches.first_forkable(parent)
                live.append(branches.fork(parent, rng.choice([None, rng.randint(fewest, len(parent))])))
                num_forks += 1
        due = [branch for branch in live if branch.num_computed < len(branch)]
        for branch in rng.sample(live, min(len(live), 2)):
            branch.append([rng.randrange(3) for _ in range(rng.randint(1, 3))])
            due += [branch] * (branch not in due)
        check_logits(engine, due, branches.compute(due))
        engine.manager.check()
    assert num_forks > 10 and len(branches) == len(live)
    branches.close()
    assert len(branches) == 0 and engine.stats().num_used_blocks == 0


def test_requests_and_branches_find_what_the_other_computed() -> None:
    engine = make_engine()
    prompt = make_prompts([4 * B + 1])[0]
    tokens = engine.generate([prompt], SamplingParams(max_tokens=2))[0].token_ids
    with Branches(engine) as branches:
        branch = branches.start(prompt)
        assert branch.num_computed == 4 * B
        assert branches.compute([branch]).argmax().item() == tokens[0]
        branch.append([tokens[0], *range(10, 20)])
        branches.compute([branch])
        tokens = branch.token_ids.tolist()
    assert engine.generate([[*tokens, 1]], SamplingParams(max_tokens=1))[0].num_cached_tokens == len(tokens) // B * B
    assert Branches(engine).start(tokens, b"tenant").num_computed == 0


def test_blocks_of_requests_are_taken_and_given_back() -> None:
    engine = make_engine(12)
    prompts = make_prompts([9, 10])
    expected = [output.token_ids for output in engine.generate(prompts, SamplingParams(max_tokens=8))]
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=8))
    found = {one.request_id: [one.token_id] for one in engine.step()}
    with Branches(engine) as branches:
        branch = branches.start(make_prompts([10 * B], seed=3)[0])
        check_logits(engine, [branch], branches.compute([branch]))
        assert engine.stats().num_preemptions >= 1
    while engine.has_unfinished:
        for one in engine.step():
            found.setdefault(one.request_id, []).append(one.token_id)
    assert list(found.values()) == expected


def test_a_step_that_finds_no_blocks_beside_branches_says_so_and_can_be_repeated() -> None:
    engine = make_engine(8)
    (prompt,) = make_prompts([3 * B])
    expected = engine.generate([prompt], SamplingParams(max_tokens=6))[0].token_ids
    branches = Branches(engine)
    branch = branches.start(make_prompts([6 * B], seed=3)[0])
    engine.add_request(prompt, SamplingParams(max_tokens=6), "one")
    with pytest.raises(OutOfBlocks):
        engine.step()
    assert (engine.stats().num_waiting, engine.stats().num_running) == (1, 0)
    asked: list[bool] = []

    def give_back() -> bool:
        asked.append(len(branches) > 0)
        branches.close()
        return asked[-1]

    engine.add_reclaimer(give_back)
    tokens = []
    while engine.has_unfinished:
        tokens += [one.token_id for one in engine.step()]
    assert tokens == expected and asked == [True]
    with pytest.raises(KeyError):
        branches.release([branch])


def test_a_decode_that_finds_no_blocks_beside_branches_says_so() -> None:
    engine = make_engine(6)
    branches = Branches(engine)
    branches.start(make_prompts([2 * B], seed=3)[0])
    (prompt,) = make_prompts([3 * B])
    engine.add_request(prompt, SamplingParams(max_tokens=8), "one")
    tokens = []
    with pytest.raises(OutOfBlocks):
        while True:
            tokens += [one.token_id for one in engine.step()]
    assert engine.stats().num_running == 1
    branches.close()
    while engine.has_unfinished:
        tokens += [one.token_id for one in engine.step()]
    assert tokens == make_engine().generate([prompt], SamplingParams(max_tokens=8))[0].token_ids


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@pytest.mark.parametrize("wanted", [None, [[2, 3], [1, 6]]])
def test_what_the_model_raises_loses_nothing(nth: int, wanted: list[list[int]] | None) -> None:
    """In any of its passes, of 4, 2 + 2, 4 and 2 tokens: the same call again gives what it would have given."""
    engine = make_engine(max_num_batched_tokens=4)
    branches = Branches(engine)
    both = [branches.start(prompt) for prompt in make_prompts([6, 8])]
    calls: list[int] = []

    def fail_once(module: object, args: tuple) -> None:
        calls.append(1)
        if len(calls) == nth:
            raise RuntimeError("boom")

    hook = engine.debug.runner.model.model.register_forward_pre_hook(fail_once)
    with pytest.raises(RuntimeError, match="boom"):
        branches.compute(both, wanted)
    with pytest.raises(ValueError, match="fork needs all 6 tokens to be computed, 0 are"):
        branches.fork(both[0])
    engine.manager.check()
    logits = branches.compute(both, wanted)
    hook.remove()
    assert len(calls) == nth + 4
    if wanted is None:
        check_logits(engine, both, logits)
    else:
        alone = Branches(make_engine())
        again = alone.compute([alone.start(prompt) for prompt in make_prompts([6, 8])], wanted)
        torch.testing.assert_close(logits, again, rtol=1e-4, atol=1e-5)


def test_bad_calls_change_nothing() -> None:
    engine = make_engine(8)
    branches = Branches(engine)
    branch, ended = branches.start([1, 2, 3]), branches.start([4])
    branches.compute([branch])
    branches.release([ended])
    before = state(engine)
    other = Branches(engine)
    cases = [
        (lambda: branches.start([]), ValueError, "at least one token"),
        (lambda: branches.start([VOCAB]), ValueError, "ids in"),
        (lambda: branches.start([1], "tenant"), TypeError, "namespace must be bytes"),
        (lambda: branches.start([1] * (8 * B)), OutOfBlocks, ""),
        (lambda: branches.compute([]), ValueError, "at least one, got none"),
        (lambda: branches.compute([branch]), ValueError, "tokens left to compute, one of 3 has none"),
        (lambda: branches.compute([branch, branch]), ValueError, "distinct"),
        (lambda: branches.compute([ended]), KeyError, "has not ended"),
        (lambda: other.compute([branch]), KeyError, "has not ended"),
        (lambda: branches.fork(ended), KeyError, "has not ended"),
        (lambda: branches.fork(branch, 4), ValueError, r"num_tokens must be in \[1, 3\], got 4"),
        (lambda: branches.release([ended]), KeyError, ""),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
        assert state(engine) == before and len(branches) == 1
    branch.append(np.array([5]))
    for wanted, error, message in (
        ([[torch.tensor([4, 5]), 4]], TypeError, "wanted must be an integer, got tensor"),
        ([[4.0]], TypeError, "wanted must be an integer, got 4.0"),
        ([4], TypeError, "wanted must be a sequence, got int"),
        ([[5]], ValueError, r"wanted must be ascending, in \[4, 4\] for this branch, got \[5\]"),
        ([], ValueError, "argument 2 is shorter"),
    ):
        with pytest.raises(error, match=message):
            branches.compute([branch], wanted)
        assert state(engine) == before and branch.num_computed == 3
    branch.append([VOCAB])
    with pytest.raises(ValueError, match="ids in"):
        branches.compute([branch])
    branches.close()
    long = branches.start([1] * 5)
    long.append([1] * 252)
    with pytest.raises(ValueError, match="max_model_len=256, got 257"):
        branches.compute([long])
    engine.manager.check()


def test_releasing_one_twice_releases_none() -> None:
    with Branches(make_engine()) as branches:
        first, second = branches.start([1, 2]), branches.start([3])
        with pytest.raises(ValueError, match="distinct"):
            branches.release([second, first, second])
        branches.release([first])
        with pytest.raises(KeyError):
            branches.release([second, first])
        assert second in branches and len(branches) == 1
