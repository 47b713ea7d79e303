"""EventPublisher: batches of events over ZeroMQ, from a thread of its own, for which the serving loop never waits.

    publish ─► packed ─► | high_water_mark | ─► thread: PUB [topic, seq, payload] ─► subscribers
               dropped and counted if full              ROUTER [start] ─► [topic, seq, payload] ... [b"", -1, b""]

The thread knows bytes only. A subscriber that is too slow loses messages at the PUB socket, as ZeroMQ does it. It sees
a gap in the sequence numbers, and requests the missing batches at the replay endpoint.
"""

import threading
import time
import weakref
from functools import partial
from typing import Any

import zmq

from kvpage.checks.close_later import close_later
from kvpage.observe.events.config import EventConfig
from kvpage.observe.events.schema import Event, EventBatch, pack
from kvpage.observe.events.window import EventWindow

END_SEQ = (-1).to_bytes(8, "big", signed=True)  # after the last batch of a replay, with an empty payload
LINGER_MS = 1000  # how long closing waits for messages under way


class EventPublisher:
    """Sends batches from its making until `close`, or until it is forgotten. Only one thread may use it.

    Attributes:
        num_lost: Number of batches that were dropped because the thread did not keep up.

    Raises:
        zmq.ZMQError: An endpoint cannot be bound. Then no socket is open.
    """

    def __init__(self, config: EventConfig) -> None:
        self.config = config
        self.num_lost = 0
        context = zmq.Context()
        try:
            self._queue, taker = _queue(context, config.high_water_mark)
            self._sender = _Sender(context, taker, config)
        except BaseException:
            context.destroy(linger=0)
            raise
        self.endpoint = self._sender.endpoint
        self.replay_endpoint = self._sender.replay_endpoint
        self._end = partial(_close, context, self._queue, self._sender)
        self._finalizer = weakref.finalize(self, close_later, self._end)
        self._sender.start()

    def publish(self, events: list[Event]) -> bool:
        """Send the events as one batch, with the next sequence number. It never waits.

        Returns:
            False if high_water_mark batches wait already. Then the batch is lost, and counted.

        Raises:
            RuntimeError: The publisher is closed.
        """
        if not self._finalizer.alive:
            raise RuntimeError("publish must not be called after close")
        batch = EventBatch(time.time(), events, self.config.data_parallel_rank)
        try:
            self._queue.send(pack(batch, self.config.encoding), zmq.NOBLOCK)
        except zmq.Again:
            self.num_lost += 1
            return False
        return True

    def close(self) -> None:
        """Send the waiting batches and close the sockets. Messages that are not taken in a second are lost.

        A second call does nothing.
        """
        if self._finalizer.detach():
            self._end()


def _queue(context: zmq.Context[Any], high_water_mark: int) -> tuple[zmq.Socket[Any], zmq.Socket[Any]]:
    """Return both ends of a queue between two threads. The marks of its ends add up."""
    taker = context.socket(zmq.PULL)
    taker.rcvhwm = 1
    taker.bind("inproc://batches")
    giver = context.socket(zmq.PUSH)
    giver.sndhwm = high_water_mark
    giver.sndtimeo = LINGER_MS
    giver.connect("inproc://batches")
    return giver, taker


def _close(context: zmq.Context[Any], queue: zmq.Socket[Any], sender: "_Sender") -> None:
    try:
        queue.send(b"")
    except zmq.Again:  # the thread is stuck; batches that it has not sent are lost
        pass
    else:
        sender.join()
    queue.close(linger=0)
    if not sender.is_alive():
        context.term()


class _Sender(threading.Thread):
    """The thread, and the sockets to the outside."""

    def __init__(self, context: zmq.Context[Any], batches: zmq.Socket[Any], config: EventConfig) -> None:
        super().__init__(name="kvpage-events", daemon=True)
        self._batches = batches
        self._topic = config.topic.encode()
        # Consumers that read arrays are older than the topic in replays.
        self._replay_topic = [self._topic] if config.encoding == "map" else []
        self._num_sent = 0
        self._pub = context.socket(zmq.PUB)
        self._pub.sndhwm = config.high_water_mark
        (self._pub.connect if config.connect else self._pub.bind)(config.endpoint)
        self.endpoint = self._pub.last_endpoint.decode()
        self.replay_endpoint: str | None = None
        self._window: EventWindow | None = None
        if config.replay_endpoint is not None:
            self._window = EventWindow(config.window, config.encoding)
            self._router = context.socket(zmq.ROUTER)
            # A ROUTER drops messages above its mark: room for a whole answer while an earlier one is being read.
            self._router.sndhwm = 4 * (config.window + 2)
            self._router.bind(config.replay_endpoint)
            self.replay_endpoint = self._router.last_endpoint.decode()

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._batches, zmq.POLLIN)
        if self._window is not None:
            poller.register(self._router, zmq.POLLIN)
        try:
            is_open = True
            while is_open:
                for socket, _ in poller.poll():
                    if socket is self._batches:
                        is_open = self._send(self._batches.recv())
                    else:
                        self._replay(self._router.recv_multipart())
        finally:
            self._batches.close(linger=0)
            self._pub.close(linger=LINGER_MS)
            if self._window is not None:
                self._router.close(linger=LINGER_MS)

    def _send(self, payload: bytes) -> bool:
        """Send a batch. Return False for the empty one, which means the end."""
        if not payload:
            return False
        self._pub.send_multipart([self._topic, self._num_sent.to_bytes(8, "big"), payload])
        if self._window is not None:
            self._window.add(self._num_sent, payload)
        self._num_sent += 1
        return True

    def _replay(self, frames: list[bytes]) -> None:
        """Answer [identity, (empty,) start]. Other messages are not answered."""
        assert self._window is not None
        *envelope, start = frames
        if len(frames) not in (2, 3) or len(start) != 8:
            return
        for seq, payload in self._window.since(int.from_bytes(start, "big")):
            self._router.send_multipart([*envelope, *self._replay_topic, seq.to_bytes(8, "big"), payload])
        end_topic = [b"" for _ in self._replay_topic]
        self._router.send_multipart([*envelope, *end_topic, END_SEQ, b""])
