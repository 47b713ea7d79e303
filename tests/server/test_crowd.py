"""Two hundred streams at once over HTTP, of which a third go away: nothing of them is left behind."""

import asyncio
import gc
import json
import socket
import struct
import threading
from collections import Counter
from typing import Any

import httpx
import pytest
from support.http_server import listening_server
from support.live_engines import check_nothing_left
from support.server_app import NAME, make_engine
from support.waiting import until

from kvpage.serving import SamplingParams

openai = pytest.importorskip("openai")
NUM_STREAMS, NUM_TOKENS, NUM_ROUNDS, MAX_RUNNING = 200, 8, 2, 32
PROMPTS = ["the quick brown fox", "jumps over the lazy dog. ", "def f(x):\n    return x + 1", "0123456789", "日本語"]


async def one_stream(client: Any, number: int, wanted: list[list[int]]) -> bool:
    """Read a stream, or leave it; return whether it was read to its end."""
    leaves_after = number % 4 if number % 3 == 0 else None
    got: list[int] = []
    stream = await client.completions.create(
        model=NAME, prompt=PROMPTS[number % len(PROMPTS)], max_tokens=NUM_TOKENS, temperature=0, stream=True,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    async with stream:
        async for event in stream:
            if leaves_after is not None and len(got) >= leaves_after:
                return False
            got += getattr(event.choices[0], "token_ids", None) or []
    assert got == wanted[number % len(PROMPTS)]
    return True


async def one_round(url: str, wanted: list[list[int]]) -> int:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        return sum(await asyncio.gather(*(one_stream(client, number, wanted) for number in range(NUM_STREAMS))))


def leave_rudely(url: str) -> None:
    """Reset connections: amid the headers, amid the body, and after a whole request whose answer nobody reads."""
    body = json.dumps({"model": NAME, "prompt": PROMPTS[0], "max_tokens": 200, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n" % len(body)
    for sent in (head[:20], head + body[:10], head + body, head + body.replace(b"true", b"false")):
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as client:
            client.sendall(sent)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def held() -> Counter[str]:
    """How many objects there are of each type of the server's, and how many tasks."""
    gc.collect()
    kinds = (type(one) for one in gc.get_objects())
    names = ("kvpage.", "uvicorn.", "starlette.", "fastapi.")
    found = Counter(kind.__name__ for kind in kinds if str(kind.__module__).startswith(names))
    del found["Ended"]  # the page's lanes: a bounded number
    return found


def test_two_hundred_streams_of_which_a_third_go_away_leave_nothing_behind(caplog):
    with listening_server(max_num_seqs=MAX_RUNNING) as (url, server):
        prompts = [server.tokens(prompt) for prompt in PROMPTS]
        outputs = make_engine().generate(prompts, SamplingParams(max_tokens=NUM_TOKENS))
        wanted, counts, threads = [output.token_ids for output in outputs], [], []
        for _ in range(NUM_ROUNDS):
            stayed = asyncio.run(one_round(url, wanted))
            assert 2 * NUM_STREAMS // 3 <= stayed < NUM_STREAMS - 20
            leave_rudely(url)
            until(lambda: held()["HttpToolsProtocol"] == 0)
            until(lambda: server.app.state.service.open_requests.num_open == 0)
            check_nothing_left(server.live)
            counts.append(held())
            threads.append(threading.active_count())
        assert threads[-1] <= threads[0]
        more = counts[-1] - counts[-2]  # the loop holds the requests of its last step until the next one
        assert max(more.values(), default=0) <= MAX_RUNNING, more
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
