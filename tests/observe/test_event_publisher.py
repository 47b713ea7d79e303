"""The publisher over real ZeroMQ on loopback: order, replay, late subscribers, losses, closing."""

import gc
import threading
import time
from collections.abc import Iterator

import msgpack
import pytest
import zmq
from support.mirror_router import MirrorRouter
from support.waiting import until

from kvpage import BlockPool, PrefixTree
from kvpage.observe.events import EventConfig, publisher
from kvpage.observe.events.publisher import EventPublisher
from kvpage.observe.events.schema import BlockStored
from kvpage.observe.events.stream import EventStream
from kvpage.observe.tree_watch import TreeWatch

FREE = "tcp://127.0.0.1:*"
TIMEOUT_MS = 20_000


def stored(i: int) -> list:
    return [BlockStored([i + 1], i or None, [i], 1, None, "GPU", None)]


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def subscriber(context: zmq.Context, endpoint: str, topic: bytes = b"") -> zmq.Socket:
    socket = context.socket(zmq.SUB)
    socket.rcvtimeo = TIMEOUT_MS
    socket.subscribe(topic)
    socket.connect(endpoint)
    return socket


def joined(publisher: EventPublisher, socket: zmq.Socket) -> int:
    """Publishes until the subscription has arrived; takes the first batch that is seen, and returns its number."""
    for num_sent in range(2000):
        assert publisher.publish(stored(num_sent))
        if socket.poll(10):
            return int.from_bytes(socket.recv_multipart()[1], "big")
    raise AssertionError("the subscriber saw nothing")


def replayed(context: zmq.Context, endpoint: str, start: int, topic: bytes = b"") -> list[tuple[int, bytes]]:
    socket = context.socket(zmq.DEALER)
    socket.rcvtimeo = TIMEOUT_MS
    socket.connect(endpoint)
    socket.send_multipart([b"", start.to_bytes(8, "big")])
    batches = []
    while True:
        empty, its_topic, seq, payload = socket.recv_multipart()
        assert empty == b""
        if seq == b"\xff" * 8:
            assert payload == its_topic == b""
            socket.close()
            return batches
        assert its_topic == topic
        batches.append((int.from_bytes(seq, "big"), payload))


def test_a_subscriber_sees_every_batch_in_order(context):
    stream = EventPublisher(EventConfig(FREE, topic="kv@pod@model"))
    socket = subscriber(context, stream.endpoint, b"kv@")
    first = joined(stream, socket)
    begin = time.time()
    for i in range(500):
        assert stream.publish(stored(i))
    seqs, hashes = [], []
    while len(hashes) < 500:
        topic, seq, payload = socket.recv_multipart()
        assert topic == b"kv@pod@model" and len(seq) == 8
        ts, [event], rank = msgpack.unpackb(payload)
        seqs.append(int.from_bytes(seq, "big"))
        assert rank == 0 and begin - 60 < ts <= time.time()
        hashes.append(event["block_hashes"][0])
    skipped = [i for i, h in enumerate(hashes) if h == 1][-1]  # what was sent while joining, if any
    while len(hashes) < skipped + 500:
        _, seq, payload = socket.recv_multipart()
        seqs.append(int.from_bytes(seq, "big"))
        hashes.append(msgpack.unpackb(payload)[1][0]["block_hashes"][0])
    assert seqs == list(range(first + 1, first + 1 + len(seqs)))
    assert hashes[skipped:] == list(range(1, 501))
    assert stream.num_lost == 0
    stream.close()


def test_other_topics_are_not_delivered(context):
    stream = EventPublisher(EventConfig(FREE, topic="a"))
    ours, other = subscriber(context, stream.endpoint, b"a"), subscriber(context, stream.endpoint, b"b")
    joined(stream, ours)
    assert not other.poll(100)
    stream.close()


def test_replay_gives_the_window_and_what_was_before(context):
    stream = EventPublisher(EventConfig(FREE, FREE, window=5))
    for i in range(12):
        stream.publish(stored(i))
    deadline = time.monotonic() + 120
    while not (batches := replayed(context, stream.replay_endpoint, 11)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [seq for seq, _ in batches] == [11]
    assert [seq for seq, _ in replayed(context, stream.replay_endpoint, 8)] == [8, 9, 10, 11]
    assert replayed(context, stream.replay_endpoint, 12) == []
    batches = replayed(context, stream.replay_endpoint, 0)
    assert [seq for seq, _ in batches] == [6, 7, 8, 9, 10, 11]
    _, (cleared, whole), _ = msgpack.unpackb(batches[0][1])
    assert cleared == {"type": "AllBlocksCleared"} and whole["block_hashes"] == [1, 2, 3, 4, 5, 6, 7]
    stream.close()


def test_a_replayed_batch_has_its_topic_but_for_consumers_older_than_that(context):
    stream = EventPublisher(EventConfig(FREE, FREE, topic="kv@pod@model"))
    stream.publish(stored(0))
    until(lambda: len(replayed(context, stream.replay_endpoint, 0, b"kv@pod@model")) == 1)
    stream.close()
    stream = EventPublisher(EventConfig(FREE, FREE, topic="kv@pod@model", encoding="array"))
    socket = context.socket(zmq.DEALER)
    socket.rcvtimeo = TIMEOUT_MS
    socket.connect(stream.replay_endpoint)
    socket.send_multipart([b"", b"\0" * 8])
    assert socket.recv_multipart() == [b"", b"\xff" * 8, b""]
    stream.close()


def test_more_batches_than_zeromq_queues_by_itself_are_replayed(context):
    stream = EventPublisher(EventConfig(FREE, FREE, window=5000))
    for i in range(5000):
        assert stream.publish(stored(i))
    deadline = time.monotonic() + 120
    while not replayed(context, stream.replay_endpoint, 4999) and time.monotonic() < deadline:
        time.sleep(0.01)
    for _ in range(2):
        assert [seq for seq, _ in replayed(context, stream.replay_endpoint, 0)] == list(range(5000))
    stream.close()


def test_requests_that_are_none_do_no_harm(context):
    stream = EventPublisher(EventConfig(FREE, FREE))
    stream.publish(stored(0))
    bad = context.socket(zmq.DEALER)
    bad.connect(stream.replay_endpoint)
    for frames in ([b""], [b"", b"1234567"], [b"x"], [b"", b"", b"\0" * 8], [b"", b"\0" * 9]):
        bad.send_multipart(frames)
    bad.send_multipart([b"", b"\0" * 8])
    bad.rcvtimeo = TIMEOUT_MS
    answers = [bad.recv_multipart()]
    while answers[-1][-2:] != [b"\xff" * 8, b""]:
        answers.append(bad.recv_multipart())
    assert len(answers) <= 2 and not bad.poll(50)  # one answer, with or without the batch
    stream.close()


def test_a_request_without_the_empty_frame_is_answered_likewise(context):
    stream = EventPublisher(EventConfig(FREE, FREE))
    socket = context.socket(zmq.DEALER)
    socket.rcvtimeo = TIMEOUT_MS
    socket.connect(stream.replay_endpoint)
    socket.send(b"\0" * 8)
    assert socket.recv_multipart() == [b"", b"\xff" * 8, b""]
    stream.close()


def test_a_late_subscriber_catches_up(context):
    """As a router does it: subscribe, ask for all that was before, go on with what is newer than that."""
    pool = BlockPool(64)
    tree = PrefixTree(pool, 1)
    watch = TreeWatch(tree)
    stream = EventStream(watch, 1, EventConfig(FREE, FREE, window=4))
    for i in range(20):
        tree.release(tree.insert([i, i], pool.allocate(2)))
        watch.poll()
    socket = subscriber(context, stream.publisher.endpoint)
    for i in range(20, 2000):
        tree.release(tree.insert([i], pool.allocate(1)))
        tree.evict(1)
        watch.poll()
        if socket.poll(10):
            break
    router = MirrorRouter()
    batches = replayed(context, stream.publisher.replay_endpoint, 0)
    router.last_seq = batches[0][0] - 1
    for batch in batches:
        router.take(*batch)
    while socket.poll(200):
        _, seq, payload = socket.recv_multipart()
        if int.from_bytes(seq, "big") > router.last_seq:
            router.take(int.from_bytes(seq, "big"), payload)
    assert len(router.held["GPU"]) == tree.num_cached == 40
    stream.close()


class Stuck(publisher._Sender):
    """Takes nothing until it is told to."""

    may_go = threading.Event()

    def run(self) -> None:
        self.may_go.wait(120)
        super().run()


@pytest.fixture
def stuck(monkeypatch) -> Iterator[threading.Event]:
    monkeypatch.setattr(publisher, "_Sender", Stuck)
    Stuck.may_go.clear()
    yield Stuck.may_go
    Stuck.may_go.set()


def test_losses_are_counted_and_nobody_waits(stuck, context):
    stream = EventPublisher(EventConfig(FREE, FREE, high_water_mark=7))
    results = [stream.publish(stored(i)) for i in range(50)]
    num_taken = results.index(False)
    assert 7 <= num_taken <= 8 and not any(results[num_taken:])
    assert stream.num_lost == 50 - num_taken
    stuck.set()
    deadline = time.monotonic() + 120
    while not stream.publish(stored(99)) and time.monotonic() < deadline:
        time.sleep(0.01)
    batches = []
    while len(batches) <= num_taken and time.monotonic() < deadline:
        batches = replayed(context, stream.replay_endpoint, 0)
    assert [seq for seq, _ in batches] == list(range(num_taken + 1))  # numbers have no gap
    assert msgpack.unpackb(batches[-1][1])[1][0]["block_hashes"] == [100]
    stream.close()


def test_after_a_loss_everything_is_stored_anew(stuck, context):
    pool = BlockPool(64)
    tree = PrefixTree(pool, 1)
    watch = TreeWatch(tree)
    stream = EventStream(watch, 1, EventConfig(FREE, FREE, high_water_mark=3))
    for i in range(20):
        tree.release(tree.insert([i, i], pool.allocate(2)))
        watch.poll()
    assert stream.publisher.num_lost > 10
    stuck.set()
    router, deadline = MirrorRouter(), time.monotonic() + 120
    while len(router.held["GPU"]) < 40 and time.monotonic() < deadline:
        watch.poll()
        router = MirrorRouter()
        for batch in replayed(context, stream.publisher.replay_endpoint, 0):
            router.take(*batch)
    assert len(router.held["GPU"]) == tree.num_cached == 40 and router.num_clears == 2
    stream.close()


def num_event_threads() -> int:
    return sum(thread.name == "kvpage-events" for thread in threading.enumerate())


def can_bind(endpoint: str) -> bool:
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        try:
            socket.bind(endpoint)
        except zmq.ZMQError:
            return False
        return True


def test_closing_sends_what_waits_and_frees_the_ports(context):
    stream = EventPublisher(EventConfig(FREE, FREE))
    socket = subscriber(context, stream.endpoint)
    first = joined(stream, socket)
    for i in range(200):
        stream.publish(stored(i))
    assert num_event_threads() == 1 and not can_bind(stream.endpoint)
    stream.close()
    stream.close()
    seqs = []
    while socket.poll(200):
        seqs.append(int.from_bytes(socket.recv_multipart()[1], "big"))
    assert len(seqs) >= 200 and seqs == list(range(first + 1, first + 1 + len(seqs)))
    assert num_event_threads() == 0 and can_bind(stream.endpoint) and can_bind(stream.replay_endpoint)
    with pytest.raises(RuntimeError, match="publish must not be called after close"):
        stream.publish(stored(0))


def test_a_forgotten_publisher_closes_itself():
    stream = EventPublisher(EventConfig(FREE))
    endpoint = stream.endpoint
    del stream
    gc.collect()
    until(lambda: num_event_threads() == 0 and can_bind(endpoint))


def test_the_garbage_collector_waits_for_no_publisher(monkeypatch):
    """It may run where a lock is held that the thread's end needs."""
    stream, lock, send = EventPublisher(EventConfig(FREE)), threading.Lock(), publisher._Sender._send

    def send_later(sender: publisher._Sender, payload: bytes) -> bool:
        with lock:
            return send(sender, payload)

    monkeypatch.setattr(publisher._Sender, "_send", send_later)
    with lock:
        del stream
        gc.collect()
        assert num_event_threads() == 1
    until(lambda: num_event_threads() == 0)


def test_an_endpoint_in_use_is_refused_and_nothing_stays_open():
    stream = EventPublisher(EventConfig(FREE))
    with pytest.raises(zmq.ZMQError, match="Address already in use"):
        EventPublisher(EventConfig(FREE, stream.endpoint))
    with pytest.raises(zmq.ZMQError, match="Address already in use"):
        EventPublisher(EventConfig(stream.endpoint))
    assert num_event_threads() == 1
    stream.close()


def test_connecting_to_a_router_that_has_bound(context):
    socket = context.socket(zmq.SUB)
    socket.rcvtimeo = TIMEOUT_MS
    socket.subscribe(b"")
    socket.bind(FREE)
    stream = EventPublisher(EventConfig(socket.last_endpoint.decode(), connect=True, encoding="array"))
    joined(stream, socket)
    stream.close()
