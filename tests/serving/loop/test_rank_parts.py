"""The parts of ranks that need no other process: messages, refused settings, the end of one that waits in vain."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.models import make_model

from kvpage import CacheConfig, KVScales
from kvpage.blend import BlendConfig
from kvpage.serving import Engine, EngineConfig, RankLost
from kvpage.serving.loop.ranks.answers import Answers
from kvpage.serving.loop.ranks.channel import FIRST, Channel
from kvpage.serving.loop.ranks.follower import step_of
from kvpage.serving.loop.ranks.message import HEADER, PARTS, Kind, Message
from kvpage.serving.loop.ranks.rank_watch import RankWatch
from kvpage.serving.loop.ranks.ranks import Ranks
from kvpage.serving.loop.ranks.sharding import scales_of_this_rank
from kvpage.serving.model.native.layers import NativeLayers

CONFIG = EngineConfig(CacheConfig(block_size=4, num_gpu_blocks=8))


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
        (9, 8, "as long as its parts"),
    ):
        before, numbers[at] = int(numbers[at]), value
        with pytest.raises(ValueError, match=rule):
            Message.decode(data)
        numbers[at] = before
    for length in (0, HEADER - 1, HEADER, len(data) - 8):
        with pytest.raises(ValueError, match="a message"):
            Message.decode(data[:length])


@pytest.mark.parametrize(
    ("index", "value", "rule"),
    [
        (0, [0], "fit together"),
        (0, [0, 3], "fit together"),
        (1, [1, 2], "fit together"),
        (2, [0, 4], "must compute 3 tokens"),
        (3, [3, 4], "must compute 3 tokens"),
        (4, [3], "indices of 3 tokens"),
        (4, [-1], "indices of 3 tokens"),
        (5, [0, 1], "fit together"),
        (6, [1], "fit together"),
    ],
)
def test_a_step_whose_parts_do_not_fit_is_refused(index: int, value: list[int], rule: str) -> None:
    parts = [[0, 2], [7, 8, 9], [0, 3], [2, 4], [1, 2], [0, 1, 7], [0, 0, 1, 0]]
    packed, slots, tables = step_of(Message(Kind.STEP, 0, [np.array(part) for part in parts]))
    assert packed.token_ids.tolist() == [7, 8, 9] and slots.tolist() == [0, 1, 7]
    assert tables.tolist() == [[0, 0], [1, 0]] and not packed.is_decode
    with pytest.raises(ValueError, match=rule):
        step_of(Message(Kind.STEP, 0, [np.array(value if at == index else part) for at, part in enumerate(parts)]))


@pytest.mark.parametrize("size", [0, FIRST - HEADER - 8, FIRST - HEADER, FIRST, 3 * FIRST])
def test_long_messages_are_sent_in_two_pieces(alone: None, size: int) -> None:
    channel = Channel(5.0)
    channel.send(Kind.COPY, np.zeros(size // 8, np.int64))
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
            assert ended.wait(10)
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
