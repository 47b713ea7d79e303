"""LangChain's client at a server. `tests/integrations/run.sh langchain` runs this; elsewhere it skips."""

from collections.abc import Iterator

import pytest

pytest.importorskip("langchain_openai", reason="needs tests/integrations/run.sh langchain")
pytest.importorskip("fastapi")

import langchain_openai
from server.test_clients import FIRST, KEY, SECOND, chat_tokens, oracle
from support.http_server import listening_server
from support.server_app import NAME, Server

from kvpage.server import ApiKey, ServerConfig

pytestmark = pytest.mark.routers


@pytest.fixture
def served() -> Iterator[tuple[str, Server]]:
    with listening_server(ServerConfig([NAME], [ApiKey(KEY, "ann")])) as found:
        yield found
        assert found[1].live.stats().num_unfinished == 0


def test_langchain_chats_streams_and_batches(served):
    url, server = served
    model = langchain_openai.ChatOpenAI(
        base_url=f"{url}/v1", api_key=KEY, model=NAME, temperature=0, max_tokens=6, max_retries=0, stream_usage=True
    )
    asked = [[(one["role"], one["content"]) for one in turns] for turns in (FIRST, SECOND)]
    wanted = [
        server.tokenizer.decode(tokens)
        for tokens in oracle([chat_tokens(server, turns) for turns in (FIRST, SECOND)], max_tokens=6)
    ]
    assert model.invoke(asked[0]).content == wanted[0]
    chunks = list(model.stream(asked[1]))
    assert "".join(chunk.content for chunk in chunks) == wanted[1] and len(chunks) > 2
    usage = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata][-1]
    assert usage["input_token_details"]["cache_read"] > 0 and usage["output_tokens"] == 6
    assert [one.content for one in model.batch(asked * 3)] == wanted * 3
