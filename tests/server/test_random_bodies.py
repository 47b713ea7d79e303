"""Random bodies, drawn from the API's schema: each is answered, or refused by a 400, and leaves nothing behind.

KVPAGE_RANDOM_BODIES sets how many are drawn; KVPAGE_TEST_SEED draws those of an earlier run again.
"""

import asyncio
import json
import os
import time
from collections import Counter

import pytest
from prometheus_client.exposition import generate_latest
from server.test_bad_input import CHATS, COMPLETIONS, check_refused
from support.body_maker import BodyMaker
from support.server_app import TEMPLATE, events_of, running_server
from support.waiting import until

from kvpage.server import ServerConfig
from kvpage.server.protocol.chat_request import ChatRequest
from kvpage.server.protocol.completion_request import CompletionRequest
from kvpage.server.routes.tokens import DetokenizeRequest, TokenizeChat, TokenizeText

NUM_BODIES = int(os.environ.get("KVPAGE_RANDOM_BODIES", "200"))
SEED = int(os.environ.get("KVPAGE_TEST_SEED") or time.strftime("%Y%m%d"))
CALLS = TEMPLATE.replace("\n{% endfor %}{% if add", "{{ message.tool_calls | tojson }}\n{% endfor %}{% if add")
MESSAGES = [{"role": "user", "content": "the fox"}]
KINDS = [
    (CHATS, ChatRequest, {"messages": MESSAGES, "max_tokens": 3}, 45),
    (COMPLETIONS, CompletionRequest, {"prompt": "the fox", "max_tokens": 3}, 35),
    (CHATS + "/render", ChatRequest, {"messages": MESSAGES}, 8),
    ("/tokenize", TokenizeText, {"prompt": "x"}, 4),
    ("/tokenize", TokenizeChat, {"messages": MESSAGES}, 4),
    ("/detokenize", DetokenizeRequest, {"tokens": [1, 2]}, 4),
]  # fmt: skip
"""Paths with the models of their bodies, the fields that nearly all have, and the share in percent."""


def check_answer(answer, path: str) -> None:
    if answer.status_code != 200:
        assert answer.status_code in (400, 404, 408), answer.text[:500]
        status = answer.status_code
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"} and status != 500
        check_refused(answer, status)
    elif answer.headers["content-type"].startswith("text/event-stream"):
        errors = [event["error"] for event in events_of(answer.text) if "error" in event]
        assert all(error["type"] == "invalid_request_error" for error in errors), errors
    else:
        assert answer.json() is not None


@pytest.fixture(scope="module")
def lenient():
    with running_server(ServerConfig(["tiny", "x"], chat_template=CALLS), max_model_len=64) as found:
        yield found


def test_random_bodies_are_answered_or_refused(lenient):
    pytest.importorskip("llguidance")
    print(f"KVPAGE_TEST_SEED={SEED}")
    wrong, statuses = list[str](), Counter[int]()

    async def ask_all(client, path: str, maker: BodyMaker, fields: dict, number: int) -> None:
        for _ in range(number):
            content = json.dumps(maker.body(**fields))
            answer = await client.post(path, content=content, headers={"content-type": "application/json"})
            statuses[answer.status_code] += 1
            try:
                check_answer(answer, path)
            except (AssertionError, ValueError) as error:
                wrong.append(f"{path} {content[:600]}: {error!s:.300}")

    async def ask() -> None:
        async with lenient.client() as client:
            makers = [BodyMaker(kind, SEED + number) for number, (_, kind, _, _) in enumerate(KINDS)]
            works = [
                ask_all(client, path, maker, fields, max(NUM_BODIES * share // 100, 1))
                for maker, (path, _, fields, share) in zip(makers, KINDS, strict=True)
            ]
            await asyncio.gather(*works)

    asyncio.run(ask())
    assert not wrong, f"{len(wrong)} with seed {SEED}:\n" + "\n".join(wrong[:5])
    print(statuses)
    assert statuses[200] > NUM_BODIES // 10 and statuses[400] > NUM_BODIES // 10, "both kinds are tried"
    until(lambda: lenient.live.stats().num_unfinished == 0)
    assert lenient.app.state.service.open_requests.num_open == 0
    lenient.live.call(lambda engine: engine.manager.check()).result()
    assert b'status="500"' not in generate_latest(lenient.app.state.registry)
