"""The scheduler step by step: counters, windows, reuse, requests that are held, blocks that others hold."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.scheduler_steps import B, counters, plan, request_of, scheduler_of, step

from kvpage import OutOfBlocks
from kvpage.blend.segments import Reuse
from kvpage.blend.spans import Span
from kvpage.blocks.manager import BlockManager
from kvpage.serving.blending.blended_prompt import BlendedPrompt
from kvpage.serving.engine import Engine
from kvpage.serving.loop.request import Request
from kvpage.serving.loop.scheduler import Scheduler
from kvpage.serving.params.sampling import SamplingParams

# --- counters ---


@pytest.mark.parametrize("num_host_blocks", [0, 4])
def test_preemptions_swaps_and_first_admissions_are_counted(num_host_blocks):
    scheduler = scheduler_of(5, num_host_blocks=num_host_blocks, enable_prefix_caching=False)
    assert counters(scheduler) == (0, 0, 0, 0)
    for number, num_tokens in ((0, 8), (1, 6)):
        scheduler.add(request_of(number, num_tokens, max_tokens=5))
    assert step(scheduler) == [("r0", 0, 8), ("r1", 0, 6)]
    assert step(scheduler) == [("r0", 8, 9), ("r1", 6, 7)]
    assert step(scheduler) == [("r0", 9, 10), ("r1", 7, 8)]
    assert counters(scheduler) == (0, 0, 14, 0)
    assert step(scheduler) == [("r0", 10, 11)]  # r1 needs a third block
    assert counters(scheduler) == (1, num_host_blocks > 0, 14, 0)
    (waiting,) = scheduler.waiting
    assert waiting.num_computed == waiting.num_committed == waiting.num_room == 0
    assert scheduler.manager.is_swapped("r1") == (num_host_blocks > 0)
    assert step(scheduler) == [("r0", 11, 12)]
    assert step(scheduler) == [("r1", 8 if num_host_blocks else 0, 9)]
    assert counters(scheduler) == (1, num_host_blocks > 0, 14, 0)


def test_what_is_computed_and_not_committed_comes_back_too():
    """A block that is not full is committed when its request is preempted."""
    scheduler = scheduler_of(8, num_host_blocks=4)
    scheduler.add(request_of(0, 8, max_tokens=5))
    scheduler.add(request_of(1, 6, max_tokens=5))
    step(scheduler)
    step(scheduler)
    scheduler.preempt_last()
    assert step(scheduler) == [("r0", 9, 10), ("r1", 7, 8)]


def test_cached_tokens_are_counted_at_first_admissions_only():
    scheduler = scheduler_of(16)
    scheduler.add(request_of(0, 8, max_tokens=1, first=1))
    step(scheduler)
    scheduler.add(request_of(1, 9, max_tokens=4, first=1))
    assert step(scheduler) == [("r1", 8, 9)]
    assert counters(scheduler) == (0, 0, 17, 8) and scheduler.running[0].group.num_cached_tokens == 8
    scheduler.requeue(scheduler.running[:])
    assert step(scheduler) == [("r1", 8, 10)]
    assert counters(scheduler) == (0, 0, 17, 8) and scheduler.running[0].group.num_cached_tokens == 8


def test_tokens_that_come_from_the_host_are_counted():
    scheduler = scheduler_of(8, num_host_blocks=8)
    scheduler.add(request_of(0, 2 * B + 1, max_tokens=1, first=1))
    step(scheduler)
    scheduler.add(request_of(1, 8 * B, max_tokens=1))
    step(scheduler)
    again = request_of(2, 2 * B + 1, max_tokens=1, first=1)
    scheduler.add(again)
    assert step(scheduler) == [("r2", 2 * B, 2 * B + 1)]
    assert again.group.num_loaded_tokens == 2 * B


# --- queues ---


@pytest.mark.parametrize("n, fits", [(1, True), (3, True), (4, False)])
def test_more_samples_than_places(n, fits):
    scheduler = scheduler_of(max_num_seqs=3)
    if fits:
        scheduler.add(request_of(0, 4, n=n))
        assert step(scheduler) == [("r0", 0, 4)]
    else:
        with pytest.raises(ValueError, match="n must be at most max_num_seqs=3, got 4"):
            scheduler.check(request_of(0, 4, n=n))


@pytest.mark.parametrize("n, num_admitted", [(1, 3), (2, 2), (3, 1)])
def test_samples_that_are_yet_to_come_have_their_places(n, num_admitted):
    scheduler = scheduler_of(max_num_seqs=3)
    scheduler.add(request_of(0, 4, n=n))
    scheduler.add(request_of(1, 4))
    scheduler.add(request_of(2, 4))
    assert len(scheduler.schedule().portions) == num_admitted


def test_requeue_takes_those_that_run_and_leaves_the_others():
    scheduler = scheduler_of()
    requests = [request_of(number, 5) for number in range(3)]
    scheduler.add(requests[0])
    step(scheduler)
    scheduler.add(requests[1])
    scheduler.requeue(requests)
    assert scheduler.waiting == requests[:2] and not scheduler.running
    for request in requests:
        assert request.num_computed == request.num_committed == request.num_room == 0 and not request.reuse
    assert scheduler.manager.num_free_blocks == 64
    assert step(scheduler) == [("r0", 4, 6), ("r1", 0, 5)]


@pytest.mark.parametrize("num_host_blocks", [0, 4])
def test_a_request_that_waits_can_end(num_host_blocks):
    scheduler = scheduler_of(8, num_host_blocks=num_host_blocks, enable_prefix_caching=False)
    scheduler.add(request_of(0, 6))
    step(scheduler)
    scheduler.preempt_last()
    (waiting,) = scheduler.waiting
    assert scheduler.manager.is_swapped("r0") == (num_host_blocks > 0)
    scheduler.finish(waiting)
    assert not scheduler.waiting and not scheduler.manager.is_swapped("r0")
    assert scheduler.manager.num_free_blocks == 8 and scheduler.manager.space.host_pool.num_free == num_host_blocks
    assert step(scheduler) == []


@pytest.mark.parametrize("num_held, admitted", [(0, "r0"), (1, "r1"), (2, "r2"), (3, None)])
def test_held_requests_are_passed_over_up_to_a_number(num_held, admitted):
    """As many as may run, so that a step looks at a bounded number."""
    scheduler = scheduler_of(max_num_seqs=2, budget=4, is_held=lambda request: request.group.arrival < num_held)
    for number in range(5):
        scheduler.add(request_of(number, 4))
    assert plan(scheduler.schedule()) == ([(admitted, 0, 4)] if admitted else [])
    assert [request.group.arrival for request in scheduler.waiting] == [i for i in range(5) if f"r{i}" != admitted]


@pytest.mark.parametrize(
    "num_blocks, num_tokens, is_admitted", [(5, 8, True), (4, 8, False), (4, 4, True), (3, 4, False)]
)
@pytest.mark.parametrize("num_host_blocks", [0, 8])
def test_a_block_is_left_over_for_each_that_runs(num_blocks, num_tokens, is_admitted, num_host_blocks):
    scheduler = scheduler_of(num_blocks, num_host_blocks=num_host_blocks, enable_prefix_caching=False)
    scheduler.add(request_of(0, 7, max_tokens=2))
    assert step(scheduler) == [("r0", 0, 7)]
    scheduler.add(request_of(1, num_tokens, max_tokens=1))
    assert step(scheduler) == [("r0", 7, 8)] + [("r1", 0, num_tokens)] * is_admitted
    assert step(scheduler) == ([] if is_admitted else [("r1", 0, num_tokens)])
    assert scheduler.manager.num_free_blocks == num_blocks


def test_a_swapped_request_without_room_stays_on_the_host():
    """It is not moved to find that out."""
    scheduler = scheduler_of(5, num_host_blocks=8, enable_prefix_caching=False)
    for number in (0, 1):
        scheduler.add(request_of(number, 7, max_tokens=3))
    step(scheduler)
    scheduler.preempt_last()
    scheduler.manager.allocate("holder", [1])
    before = scheduler.manager.stats()
    assert step(scheduler) == [("r0", 7, 8)]
    assert scheduler.manager.is_swapped("r1") and scheduler.preemptions == (1, 1)
    assert scheduler.manager.stats() == before
    scheduler.manager.release("holder")
    done = [portion for _ in range(4) for portion in step(scheduler)]
    assert ("r1", 7, 8) in done and ("r1", 8, 9) in done and scheduler.preemptions == (1, 1)
    assert not scheduler.running and not scheduler.waiting


# --- blocks that others hold ---


def test_reclaimers_give_way_to_the_first_request():
    scheduler = scheduler_of(4)
    scheduler.manager.allocate("holder", list(range(2 * B)))
    asked = []

    def reclaim() -> bool:
        asked.append(scheduler.manager.num_free_blocks)
        if len(asked) > 1:
            return False
        scheduler.manager.release("holder")
        return True

    scheduler.reclaimers[:] = [lambda: False, reclaim]
    scheduler.add(request_of(0, 3 * B, max_tokens=1))
    assert step(scheduler) == [("r0", 0, 3 * B)] and asked == [2]


def test_too_much_that_others_hold_is_an_error_that_changes_nothing():
    scheduler = scheduler_of(4)
    scheduler.manager.allocate("holder", list(range(2 * B)))
    for _ in range(2):
        scheduler.reclaimers.append(lambda: False)
    request = request_of(0, 3 * B, max_tokens=1)
    scheduler.add(request)
    with pytest.raises(OutOfBlocks) as error:
        scheduler.schedule()
    assert (error.value.needed, error.value.free) == (3, 2)
    assert scheduler.waiting == [request] and not scheduler.running
    scheduler.manager.release("holder")
    assert step(scheduler) == [("r0", 0, 3 * B)]


@pytest.mark.parametrize("can_reclaim", [True, False])
def test_a_decode_alone_asks_the_reclaimers(can_reclaim):
    scheduler = scheduler_of(3)
    scheduler.add(request_of(0, 2 * B, max_tokens=3))
    assert step(scheduler) == [("r0", 0, 2 * B)]
    scheduler.manager.allocate("holder", [1])
    scheduler.reclaimers.append(lambda: can_reclaim and scheduler.manager.release("holder") is None)
    if can_reclaim:
        assert step(scheduler) == [("r0", 8, 9)] and scheduler.preemptions.num == 0
    else:
        with pytest.raises(OutOfBlocks):
            scheduler.schedule()
        assert [request.num_room for request in scheduler.running] == [8]


# --- windows ---


@pytest.mark.parametrize("window", [1, B - 1, B, B + 1, B + 2, 2 * B + 1, 3 * B, 3 * B + 1, 50])
def test_what_no_later_token_looks_at_is_free(window):
    scheduler = scheduler_of(8, window=window, enable_prefix_caching=False)
    scheduler.add(request_of(0, 3 * B))
    step(scheduler)
    assert scheduler.manager.num_free_blocks == 8 - 3 + max(3 * B - window + 1, 0) // B


# --- reuse of segments ---


def with_reuse(number: int, num_tokens: int, start: int, first: int = 0) -> Request:
    plain = request_of(number, num_tokens, first=first)
    blending = BlendedPrompt(plain.request_id, plain.prompt, b"", [Span(start, num_tokens - 1)], may_reuse=True)
    blending.set_found([Reuse(None, 0, start, num_tokens - start - 1)], [])
    return Request(plain.request_id, plain.prompt, plain.params, number, blending=blending)


def test_what_was_computed_exactly_is_cached_and_nothing_after_it():
    scheduler = scheduler_of()
    scheduler.add(with_reuse(0, 3 * B, B + 1, first=1))
    batch = scheduler.schedule()
    (request,) = scheduler.running
    assert len(request.reuse) == 1
    scheduler.complete(batch)
    assert request.reuse == [] and request.blending.reusable is None and request.num_computed == 3 * B
    request.append(7, now=0.0)
    step(scheduler)
    assert scheduler.manager.allocate("next", list(range(1, 3 * B + 2))).num_cached_tokens == B


@pytest.mark.parametrize(
    "num_before, budget, together",
    [(0, 10, True), (3, 20, True), (3, 15, True), (1, 10, True), (2, 10, False), (3, 14, False)],
)
def test_a_prompt_that_reuses_is_one_step(num_before, budget, together):
    """Whatever the budget; where it exceeds that, beside decodes only."""
    scheduler = scheduler_of(budget=budget)
    if num_before:
        scheduler.add(request_of(0, num_before))
    scheduler.add(with_reuse(1, 3 * B, B))
    before = [("r0", 0, num_before)] if num_before else []
    assert step(scheduler) == before + [("r1", 0, 3 * B)] * together
    if not together:
        assert step(scheduler) == [("r0", num_before, num_before + 1), ("r1", 0, 3 * B)]


def test_a_prompt_that_reuses_waits_for_a_prefill_beside_decodes():
    scheduler = scheduler_of(budget=10)
    scheduler.add(request_of(0, 1))
    step(scheduler)
    scheduler.add(request_of(1, 2))
    scheduler.add(with_reuse(2, 3 * B, B))
    assert step(scheduler) == [("r0", 1, 2), ("r1", 0, 2)]
    assert step(scheduler) == [("r0", 2, 3), ("r1", 2, 3), ("r2", 0, 3 * B)]


def test_a_prompt_whose_step_failed_reuses_nothing_while_it_waits():
    scheduler = scheduler_of()
    request = with_reuse(0, 3 * B, B)
    scheduler.add(request)
    scheduler.schedule()
    assert len(request.reuse) == 1
    scheduler.requeue([request])
    assert request.reuse == [] and step(scheduler) == [("r0", 0, 3 * B)]


def test_a_prompt_that_might_reuse_and_finds_nothing_is_cached_whole():
    scheduler, request = scheduler_of(), with_reuse(0, 3 * B, B)
    request.blending.set_found([], [])
    scheduler.add(request)
    assert step(scheduler) == [("r0", 0, 3 * B)]
    assert scheduler.manager.num_cached([*request.prompt.tolist(), 1]) == 3 * B


@pytest.mark.parametrize("reuses", [False, True])
def test_nobody_waits_for_a_prompt_that_reuses(reuses):
    """It caches nothing that they could share."""
    scheduler = scheduler_of()
    scheduler.add(with_reuse(0, 3 * B, B, first=1) if reuses else request_of(0, 3 * B, first=1))
    scheduler.add(request_of(1, 3 * B, first=1))
    assert len(step(scheduler)) == 1 + reuses


# --- prefixes that are being computed ---


@pytest.mark.parametrize(
    "num_equal, num_more, waits",
    [(B, 0, False), (B, 1, True), (B - 1, B, False), (B + 1, B, True), (2 * B, 0, True), (3 * B, 1, True)],
)
def test_whoever_shares_a_whole_block_that_is_yet_to_come_waits(num_equal, num_more, waits):
    scheduler = scheduler_of()
    scheduler.add(request_of(0, 3 * B, first=1))
    second = request_of(1, num_equal + num_more, first=1)
    second.tokens[num_equal : num_equal + num_more] = 99
    scheduler.add(second)
    assert step(scheduler) == [("r0", 0, 3 * B)] + ([] if waits else [("r1", 0, num_equal + num_more)])


@pytest.mark.parametrize("num_equal, num_more, num_cached", [(B, 1, B), (B, 2 * B, B), (2 * B, 0, B), (2 * B, 1, None)])
def test_nobody_waits_for_blocks_that_are_there(num_equal, num_more, num_cached):
    """The first has computed one block by now, and has two to go."""
    scheduler = scheduler_of(budget=B, share_parts=False)
    scheduler.add(request_of(0, 3 * B, first=1))
    assert step(scheduler) == [("r0", 0, B)]
    second = request_of(1, num_equal + num_more, first=1)
    second.tokens[num_equal : num_equal + num_more] = 99
    scheduler.add(second)
    scheduler.max_num_batched_tokens = 64
    expected = [] if num_cached is None else [("r1", num_cached, num_equal + num_more)]
    assert step(scheduler) == [("r0", B, 3 * B), *expected]


def test_without_caching_nobody_waits():
    scheduler = scheduler_of(enable_prefix_caching=False)
    for number in (0, 1):
        scheduler.add(request_of(number, 3 * B, first=1))
    assert len(step(scheduler)) == 2


# --- the budget ---


def test_nobody_is_admitted_without_a_token():
    scheduler = scheduler_of(budget=B)
    for number in (0, 1):
        scheduler.add(request_of(number, B))
    step(scheduler)
    assert [request.group.arrival for request in scheduler.running] == [0]
    assert [request.group.arrival for request in scheduler.waiting] == [1]


def test_no_more_decodes_than_the_budget():
    scheduler = scheduler_of(budget=2)
    request = request_of(0, 2, n=3)
    scheduler.add(request)
    batch = scheduler.schedule()
    forks = request.forks()
    scheduler.complete(batch)
    scheduler.fork(request, forks)
    for each in (request, *forks):
        each.append(7, now=0.0)
    batch = scheduler.schedule()
    scheduler.manager.take_moves()
    assert batch.num_tokens == 2 and [portion.request for portion in batch.portions] == [request, forks[0]]
    assert [each.num_room for each in (request, *forks)] == [3, 3, 2]


@pytest.mark.parametrize("priority", [0, 5])
def test_what_a_request_of_a_higher_priority_caches_stays_longer(priority):
    scheduler = scheduler_of(4)
    scheduler.add(request_of(0, B, max_tokens=1, first=1, retain_priority=priority))
    step(scheduler)
    scheduler.add(request_of(1, B, max_tokens=1, first=50))
    step(scheduler)
    scheduler.manager.tree.evict(1)
    found = [scheduler.manager.tree.match([*range(first, first + B), 0]).num_tokens for first in (1, 50)]
    assert found == ([B, 0] if priority else [0, B])


# --- whoever does not fit ---


def test_nobody_overtakes_a_request_that_does_not_fit():
    scheduler = scheduler_of(5, num_host_blocks=8)
    for number, num_tokens in ((0, 7), (1, 3 * B), (2, B)):
        scheduler.add(request_of(number, num_tokens, max_tokens=2))
        if number == 0:
            step(scheduler)
    assert step(scheduler) == [("r0", 7, 8)]
    assert [request.group.arrival for request in scheduler.waiting] == [1, 2] and scheduler.preemptions.num_swaps == 0
    assert not scheduler.manager.is_swapped("r1")


@pytest.mark.parametrize("num_blocks, is_admitted", [(5, False), (6, True)])
def test_a_block_is_left_over_for_each_sample_to_come(num_blocks, is_admitted):
    scheduler = scheduler_of(num_blocks)
    scheduler.add(request_of(0, 7, max_tokens=3))
    step(scheduler)
    scheduler.add(request_of(1, B, max_tokens=1, n=3))
    assert step(scheduler) == [("r0", 7, 8)] + [("r1", 0, B)] * is_admitted


def test_a_long_prompt_takes_what_is_left_of_the_budget_beside_another():
    scheduler = scheduler_of(budget=10)
    scheduler.add(request_of(0, 3))
    scheduler.add(request_of(1, 3 * B))
    assert step(scheduler) == [("r0", 0, 3), ("r1", 0, 7)]


def test_a_prefill_without_budget_has_no_portion():
    scheduler = scheduler_of(budget=2)
    request = request_of(0, 1, n=2)
    scheduler.add(request)
    scheduler.add(request_of(1, 3 * B))
    batch = scheduler.schedule()
    assert plan(batch) == [("r0", 0, 1), ("r1", 0, 1)]
    forks = request.forks()
    scheduler.complete(batch)
    scheduler.fork(request, forks)
    for each in (request, *forks):
        each.append(7, now=0.0)
    assert [portion.request for portion in scheduler.schedule().portions] == [request, *forks]


def test_blocks_of_one_token_within_the_window_stay():
    scheduler = Scheduler(BlockManager(8, 1, False), 8, 64, 50)
    scheduler.add(request_of(0, 3, max_tokens=4))
    step(scheduler)
    assert scheduler.manager.num_free_blocks == 5


# --- cached blocks that are forgotten, reclaimers ---


def test_a_request_forgets_its_cached_tokens_in_its_namespace_alone():
    scheduler = scheduler_of(16)
    drop = scheduler.manager.space.drop
    tokens = np.arange(2 * B, dtype=np.int32)
    for number, namespace in enumerate((b"", b"other")):
        request = Request(f"r{number}", tokens, SamplingParams(max_tokens=1), number, namespace=namespace)
        scheduler.add(request)
        step(scheduler)
    scheduler.forget_cached(request)
    assert drop(tokens, b"other") == 0 and drop(tokens) == 2 * B


def test_a_reclaimer_is_removed_once():
    scheduler = scheduler_of()
    first, second = object(), object()
    scheduler.reclaimers[:] = [first, second]
    for _ in range(2):
        Engine.remove_reclaimer(SimpleNamespace(scheduler=scheduler), first)
        assert scheduler.reclaimers == [second]
