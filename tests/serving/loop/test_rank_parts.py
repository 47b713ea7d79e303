"""The parts of ranks that need no other process: messages, refused settings, the end of one that waits in vain."""

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.models import make_model
from support.state_models import make_state_model
from transformers import PreTrainedModel

from kvpage import CacheConfig, KVScales
from kvpage.blend import BlendConfig
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.state_cache import StateCache
from kvpage.layout.config import ModelConfig
from kvpage.layout.groups import StateLayout, StatePart
from kvpage.serving import Engine, EngineConfig, RankLost
from kvpage.serving.assembly.parts import check_servable
from kvpage.serving.loop.ranks.answers import Answers
from kvpage.serving.loop.ranks.channel import FIRST, Channel
from kvpage.serving.loop.ranks.follower import move_of
from kvpage.serving.loop.ranks.message import HEADER, PARTS, Kind, Message
from kvpage.serving.loop.ranks.rank_caches import RankCaches
from kvpage.serving.loop.ranks.rank_watch import RankWatch
from kvpage.serving.loop.ranks.ranks import Ranks
from kvpage.serving.loop.ranks.sharding import scales_of_this_rank
from kvpage.serving.loop.ranks.step_plan import StepPlan
from kvpage.serving.model.native.layers import NativeLayers
from kvpage.serving.model.states.state_pass import StateRow

CONFIG = EngineConfig(CacheConfig(block_size=4, num_gpu_blocks=8))
SHAPE = ModelConfig(1, 4, ("full_attention", "sliding_attention"), torch.float32)


@pytest.fixture
def caches() -> RankCaches:
    """Eight blocks of a full layer and of a window, and eight slots."""
    full, window = (CacheEngine(CONFIG.cache_config, SHAPE.with_caches_of([layer])) for layer in (0, 1))
    return RankCaches(full, [window], StateCache(StateLayout((StatePart(1, "conv", 0, (4,), torch.float32),)), 8))


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def arrays(kind: Kind, size: int) -> list[np.ndarray]:
    return [np.arange(size + index).astype(dtype) for index, dtype in enumerate(PARTS[kind])]


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9])
def test_a_message_comes_back(kind: Kind, size: int) -> None:
    parts = arrays(kind, size)
    found = Message.decode(Message(kind, 5, parts).encode())
    assert (found.kind, found.number) == (kind, 5)
    for part, expected in zip(found.parts, parts, strict=True):
        assert part.dtype == expected.dtype
        np.testing.assert_array_equal(part, expected)


def test_other_bytes_are_refused() -> None:
    data = Message(Kind.LOAD, 0, arrays(Kind.LOAD, 3)).encode()
    numbers = data[:HEADER].view(np.int64)
    for at, value, rule in (
        (0, 1, "must begin with"),
        (1, 99, "must be of a known kind"),
        (3, -8, "as long as its parts"),
        (3, 1 << 40, "as long as its parts"),
        (4, 15, "whole elements"),
        (10, 8, "as long as its parts"),
    ):
        before, numbers[at] = int(numbers[at]), value
        with pytest.raises(ValueError, match=rule):
            Message.decode(data)
        numbers[at] = before
    for length in (0, HEADER - 1, HEADER, len(data) - 8):
        with pytest.raises(ValueError, match="a message"):
            Message.decode(data[:length])


def plan_of(parts: list[list[int]]) -> StepPlan:
    arrays = [np.array(part, dtype) for part, dtype in zip(parts, PARTS[Kind.STEP], strict=True)]
    return StepPlan.of_message(Message.decode(Message(Kind.STEP, 0, arrays).encode()))


STEP = [[0, 2, 1], [7, 8, 9], [0, 3], [2, 4], [1, 2], [0, 1, 7, 5, 4, 3], [0, 0, 1, 0, 6, 5]]
STATES = [3, -1, 2, 4, 3, 0, 1, 8, 2, 9]  # two marks of the first sequence; the other one's token is an answer's


@pytest.mark.parametrize(
    ("index", "value", "rule"),
    [
        (0, [0], "fit together"),
        (0, [0, 3], "fit together"),
        (0, [0, 2, 0], "fit together"),
        (0, [0, 4, -1], "fit together"),
        (0, [0, 2, 1, 0], "fit together"),
        (1, [1, 2], "fit together"),
        (1, [], "fit together"),
        (2, [0, 4], "must compute 3 tokens"),
        (2, [], "fit together"),
        (3, [3, 4], "must compute 3 tokens"),
        (3, [2, 4, 5], "fit together"),
        (4, [3], "indices of 3 tokens"),
        (4, [-1], "indices of 3 tokens"),
        (5, [0, 1], "fit together"),
        (5, [0, 1, 7], "fit together"),
        (6, [1], "fit together"),
        (6, [0, 0, 1, 0, 6], "fit together"),
        (7, [3], "states must be of 2 sequences"),
        (7, STATES[:6], "states must be of 2 sequences"),
        (7, STATES[:-1], "states must be of 2 sequences"),
        (7, [*STATES, 1, 2], "states must be of 2 sequences"),
        (7, [3, -1, -1, 4, 3, 1], "states must be of 2 sequences"),
        (7, [3, -1, 1 << 62, 4, 3, 1 << 62], "states must be of 2 sequences"),
    ],
)
def test_a_step_whose_parts_do_not_fit_is_refused(index: int, value: list[int], rule: str) -> None:
    parts = [*STEP, STATES]
    packed, blocks, states = plan_of(parts)
    assert packed.token_ids.tolist() == [7, 8, 9] and not packed.is_decode
    assert [(slots.tolist(), tables.tolist()) for slots, tables in blocks] == [
        ([0, 1, 7], [[0, 0], [1, 0]]),
        ([5, 4, 3], [[6], [5]]),
    ]
    assert states == [StateRow(3, 0, 2, [(1, 8), (2, 9)], None), StateRow(4, 3, 4, [], 3)]
    with pytest.raises(ValueError, match=rule):
        plan_of([value if at == index else part for at, part in enumerate(parts)])


@pytest.mark.parametrize("states", [[], STATES])
def test_a_plan_comes_back(states: list[int]) -> None:
    parts = [*STEP, states]
    for part, expected in zip(plan_of(parts).parts(), parts, strict=True):
        assert part.tolist() == expected


@pytest.mark.parametrize(
    ("parts", "rule"),
    [
        ([[], [0, 1]], "a move must have a group and pairs, got sizes 0 and 2"),
        ([[0, 1], [0, 1]], "a move must have a group and pairs, got sizes 2 and 2"),
        ([[0], [0, 1, 2]], "a move must have a group and pairs, got sizes 1 and 3"),
        ([[-1], [0, 1]], re.escape("group must be in [0, 3), got -1")),
        ([[3], [0, 1]], re.escape("group must be in [0, 3), got 3")),
    ],
)
def test_a_move_of_no_group_is_refused(caches: RankCaches, parts: list[list[int]], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        caches.do_move(*move_of(Message(Kind.COPY, 0, [np.array(part, np.int64) for part in parts])))


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_move_is_of_one_group(caches: RankCaches, group: int) -> None:
    blocks = [cache.gpu_cache[0].transpose(0, 1) for cache in (caches.full, *caches.windows)]
    tensors = [*blocks, caches.states.slots]
    for cache in tensors:
        cache.copy_(torch.arange(8).view(-1, *[1] * (cache.dim() - 1)).expand_as(cache))
    caches.do_move(*move_of(Message(Kind.COPY, 0, [np.array([group]), np.array([3, 5, 1, 0])])))
    for number, cache in enumerate(tensors):
        assert cache.flatten(1)[:, 0].tolist() == ([1, 1, 2, 3, 4, 3, 6, 7] if number == group else list(range(8)))
        assert bool((cache.flatten(1) == cache.flatten(1)[:, :1]).all())


def test_a_step_of_other_groups_is_refused(caches: RankCaches) -> None:
    plan = plan_of([*STEP, STATES])
    with pytest.raises(ValueError, match="groups of a step must be those of the caches, 3, got 1 with blocks and 2"):
        caches.step(plan._replace(blocks=plan.blocks[:1]))
    with pytest.raises(ValueError, match="groups of a step must be those of the caches, 3, got 2 with blocks and 0"):
        caches.step(plan._replace(states=()))
    for others in (replace(caches, states=None), replace(caches, windows=())):
        with pytest.raises(ValueError, match="must be those of the caches, 2, got 2 with blocks and 2 states"):
            others.step(plan)
    with pytest.raises(ValueError, match=re.escape("slots must be in [0, 8), got [8, 9]")):
        caches.step(plan)


def test_states_of_padding_are_made_for_it(caches: RankCaches) -> None:
    plan = plan_of([*STEP, [-1, -1, 0, -1, -1, 0]])
    caches.states.slots.fill_(7)
    caches.step(plan).states._states.slots.fill_(1)
    assert bool((caches.states.slots == 7).all())
    with pytest.raises(ValueError, match=re.escape("slots must be in [0, 8), got [-1]")):
        caches.step(plan_of([*STEP, [-1, -1, 0, 2, -1, 0]]))


@pytest.mark.parametrize("size", [0, FIRST - HEADER - 8, FIRST - HEADER, FIRST, 3 * FIRST])
def test_long_messages_are_sent_in_two_pieces(alone: None, size: int) -> None:
    channel = Channel(5.0)
    channel.send(Kind.COPY, np.zeros(0, np.int64), np.zeros(size // 8, np.int64))
    channel.send(Kind.BEAT)
    assert channel.gather([4, 5]) == [[4, 5]]
    channel.drop()
    with pytest.raises(RankLost, match="let go"):
        channel.send(Kind.BEAT)


class CountedChannel(Channel):
    """A channel of one rank; its own answer comes in the third round."""

    num_rounds = 0

    def gather(self, values: list[int], seconds: float | None = None) -> list[list[int]]:
        self.num_rounds += 1
        if self.num_rounds == 2:
            self.answer.set_result(7)
        return super().gather(values, seconds)

    answer: "Future[int]"


def test_ranks_say_that_they_live_while_a_store_works(alone: None) -> None:
    channel = CountedChannel(5.0)
    channel.answer = Future()
    answers = Answers(channel, 0.01)
    assert answers.least(channel.answer) == 7 and channel.num_rounds == 3
    for value in (None, True, -1, "7", 7.0):
        other: Future[int] = Future()
        other.set_result(value)  # type: ignore[arg-type]
        assert answers.least(other) == 0
    failed: Future[int] = Future()
    failed.set_exception(OSError("no disk"))
    assert answers.least(failed) == 0
    answers.drop()
    with pytest.raises(RankLost, match="let go"):
        answers.least(failed)


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_process_that_cannot_close_its_groups_is_ended(
    alone: None, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """NCCL may wait there for a rank that is gone."""
    ended, reasons = threading.Event(), []
    watch = RankWatch(0, 1, 1.0, torch.device("cpu"), end=lambda why: reasons.append(why) or ended.set(), grace=0.05)
    watch.lost = "rank 1 is gone"
    ranks = Ranks.__new__(Ranks)
    ranks.watch, ranks.control, ranks.finds, ranks.keeps = watch, *(Channel(1.0) for _ in range(3))  # type: ignore
    destroy = dist.destroy_process_group

    def destroy_late(group: object = None) -> None:
        if group is None and is_slow:
            assert ended.wait(120)
        destroy(group)  # type: ignore[arg-type]

    monkeypatch.setattr(dist, "destroy_process_group", destroy_late)
    watch._grace = 0.05 if is_slow else 30.0
    ranks.abandon()
    assert reasons == (["rank 1 is gone"] if is_slow else [])
    assert not dist.is_initialized()


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_process_that_waits_for_a_lost_rank_is_ended(alone: None, is_waiting: bool) -> None:
    reasons: list[str] = []
    watch = RankWatch(0, 1, 1.0, torch.device("cpu"), end=reasons.append, grace=0.0)
    if is_waiting:
        with watch.waiting():
            watch._lose("rank 1 is gone")
    else:
        watch.leave()
        watch._lose("rank 1 is gone")
    assert reasons == (["rank 1 is gone"] if is_waiting else [])
    with pytest.raises(RankLost, match="rank 1 is gone"):
        watch.check()


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be"),
        ({"tensor_parallel_size": 2, "blend": BlendConfig()}, "blend must be None with several ranks"),
        ({"tensor_parallel_size": 2, "compile_model": True}, "compile_model must be False with several ranks"),
        ({"tensor_parallel_size": 2, "async_scheduling": True}, "async_scheduling must be None or False with several"),
        ({"rank_timeout": 0.0}, "rank_timeout must be in"),
        ({"rank_timeout": float("nan")}, "rank_timeout must be in"),
    ],
)
def test_settings_that_ranks_exclude_are_refused(fields: dict[str, object], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        replace(CONFIG, **fields)


def test_a_whole_model_needs_one_rank() -> None:
    model = make_model("llama")
    with pytest.raises(ValueError, match="tensor_parallel_size must be 1, over which LlamaForCausalLM is sharded"):
        Engine.from_model(model, replace(CONFIG, tensor_parallel_size=2))
    with pytest.raises(ValueError, match="follow needs tensor_parallel_size of 2 or more, got 1"):
        Engine.follow(model, CONFIG)


@pytest.mark.parametrize("make", [partial(make_model, "llama"), partial(make_state_model, "lfm2")])
def test_a_part_of_a_head_is_refused_before_the_model_computes(make: Callable[[], PreTrainedModel]) -> None:
    """With such a shard its own forward fails."""
    model = make()
    model.register_forward_pre_hook(lambda *_: pytest.fail("it must not compute"))
    with pytest.raises(ValueError, match=f"must divide the 2 KV heads of {type(model).__name__}, got 4"):
        check_servable(model, replace(CONFIG, tensor_parallel_size=4))


def test_scales_are_those_of_the_ranks_heads(alone: None) -> None:
    each, one = KVScales.of([1.0, 2.0, 3.0, 4.0], 5.0), KVScales.of(6.0, [7.0, 8.0, 9.0, 10.0])
    found = scales_of_this_rank([each, one], 2, 4)
    assert [(scales.key.tolist(), scales.value.tolist()) for scales in found] == [([1, 2], [5]), ([6], [7, 8])]
    assert scales_of_this_rank([each], 4, 4) == [each]
    assert scales_of_this_rank("calibrate", 2, 4) == "calibrate" and scales_of_this_rank(None, 2, 4) is None


def test_layers_with_shards_are_left_to_the_model(alone: None) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    mesh, layer = init_device_mesh("cpu", (1,)), torch.nn.Linear(8, 8)
    native = NativeLayers()
    assert native._make(layer) is not None
    layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.data, mesh, [Replicate()]))
    assert native._make(layer) is None
