"""Answers of Redis, cut anywhere, against what was encoded; and answers that are none."""

import random
import socket
import threading
from types import SimpleNamespace

import pytest

redis = pytest.importorskip("redis")

from kvpage.store.remote.redis_parser import BUFFER_BYTES, MAX_BULK_BYTES, BulkParser  # noqa: E402

SIZES = [
    0,
    1,
    100,
    4095,
    4096,
    BUFFER_BYTES - 3,
    BUFFER_BYTES - 2,
    BUFFER_BYTES - 1,
    BUFFER_BYTES,
    3 * BUFFER_BYTES + 1,
]


def encoded(answer) -> bytes:
    if answer is None:
        return b"$-1\r\n"
    if isinstance(answer, int):
        return b":%d\r\n" % answer
    if isinstance(answer, str):
        return b"+%s\r\n" % answer.encode()
    if isinstance(answer, list):
        return b"*%d\r\n" % len(answer) + b"".join(map(encoded, answer))
    return b"$%d\r\n%b\r\n" % (len(answer), answer)


def plain(answer):
    """As `encoded` is given it: text is bytes, memoryviews too."""
    if isinstance(answer, list):
        return [plain(part) for part in answer]
    return bytes(answer) if isinstance(answer, memoryview) else answer.encode() if isinstance(answer, str) else answer


def parser_of(data: bytes, rng: random.Random) -> tuple[BulkParser, socket.socket]:
    """Reads `data`, which comes in pieces, and then the end."""
    near, far = socket.socketpair()

    def send() -> None:
        with far:
            at = 0
            while at < len(data):
                step = rng.choice([1, 2, 7, 1000, BUFFER_BYTES, 10 * BUFFER_BYTES])
                far.sendall(data[at : at + step])
                at += step

    threading.Thread(target=send, daemon=True).start()
    near.settimeout(120)
    parser = BulkParser(1 << 16)
    parser.on_connect(SimpleNamespace(_sock=near))
    return parser, near


def some_answer(rng: random.Random, depth: int = 0):
    kind = rng.randrange(7 if depth < 2 else 5)
    if kind >= 5:
        return [some_answer(rng, depth + 1) for _ in range(rng.randrange(4))]
    return [None, rng.randint(-5, 1 << 62), "x" * rng.choice([0, 1, 4000]), rng.randbytes(rng.choice(SIZES)), b"\r\n"][
        kind
    ]


@pytest.mark.parametrize("seed", range(30))
def test_answers_cut_anywhere(seed):
    rng = random.Random(seed)
    answers = [some_answer(rng) for _ in range(20)]
    parser, sock = parser_of(b"".join(map(encoded, answers)), rng)
    with sock:
        for answer in answers:
            assert plain(parser.read_response()) == plain(answer), seed
        with pytest.raises(redis.ConnectionError, match="closed"):
            parser.read_response()


def test_large_values_are_views():
    parser, sock = parser_of(encoded(bytes(BUFFER_BYTES)) + encoded(bytes(10)), random.Random(0))
    with sock:
        assert isinstance(parser.read_response(), memoryview) and isinstance(parser.read_response(), bytes)


def test_errors_of_the_server_are_given_back():
    parser, sock = parser_of(b"-WRONGTYPE no\r\n-OOM full\r\n*2\r\n-ERR x\r\n:1\r\n-LOADING wait\r\n", random.Random(0))
    with sock:
        assert str(parser.read_response()) == "WRONGTYPE no"
        assert isinstance(parser.read_response(), redis.exceptions.OutOfMemoryError)
        error, one = parser.read_response()
        assert isinstance(error, redis.ResponseError) and one == 1
        with pytest.raises(redis.ConnectionError):  # as redis-py has it
            parser.read_response()


@pytest.mark.parametrize(
    "data",
    [
        b"?what\r\n",
        b"HTTP/1.1 400\r\n",
        b"\r\n",
        b"$-2\r\n",
        b"$%d\r\n" % (MAX_BULK_BYTES + 1),
        b"$99999999999999999999\r\n",
        b"$3\r\nabcde",
        b"$%d\r\n" % BUFFER_BYTES + bytes(BUFFER_BYTES) + b"xx",
        b"+" + b"x" * 5000 + b"\r\n",
    ],
)
def test_answers_that_are_none(data):
    parser, sock = parser_of(data, random.Random(1))
    with sock, pytest.raises(redis.exceptions.InvalidResponse, match="must"):
        parser.read_response()


@pytest.mark.parametrize("data", [b"", b"$5", b"$5\r\nabc", b"$%d\r\nabc" % BUFFER_BYTES, b"*2\r\n:1\r\n", b":1\r"])
def test_answers_that_end_early(data):
    parser, sock = parser_of(data, random.Random(1))
    with sock, pytest.raises(redis.ConnectionError, match="closed"):
        parser.read_response()


def test_can_read():
    near, far = socket.socketpair()
    parser = BulkParser(1 << 16)
    with near, far:
        parser.on_connect(SimpleNamespace(_sock=near))
        assert not parser.can_read()
        far.sendall(b":1\r\n:2\r\n")
        assert parser.can_read(120) and parser.read_response() == 1
        assert parser.can_read() and parser.read_response() == 2  # from what has come already
        assert not parser.can_read(0.001)
        far.close()
        assert parser.can_read(120)  # the end
        parser.on_disconnect()
        with pytest.raises(redis.ConnectionError):
            parser.can_read()
