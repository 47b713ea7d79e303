"""pydantic-ai at a server, over OpenAI's APIs. `tests/integrations/run.sh agents` runs this."""

import asyncio

import pytest

pytest.importorskip("pydantic_ai", reason="needs tests/integrations/run.sh agents")
pytest.importorskip("fastapi")

import pydantic_ai
from integrations.agents.script import ANSWER, CITY, QUESTION, THOUGHT, scripted
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from support.server_app import NAME

pytestmark = pytest.mark.routers


def agent_of(kind, url: str, cities: list[str]):
    agent = pydantic_ai.Agent(kind(NAME, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="x")))

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Tell the weather of a city."""
        cities.append(city)
        return "rain"

    return agent


@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
def test_an_agent_calls_its_tool_and_answers(kind):
    cities: list[str] = []
    with scripted() as (url, _):
        result = agent_of(kind, url, cities).run_sync(QUESTION)
    assert result.output == ANSWER and cities == [CITY]
    thoughts = [
        part.content for message in result.all_messages() for part in message.parts if part.part_kind == "thinking"
    ]
    assert kind is OpenAIResponsesModel or thoughts[0] == THOUGHT


@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
def test_an_agent_streams(kind):
    cities: list[str] = []

    async def text(url: str) -> str:
        async with agent_of(kind, url, cities).run_stream(QUESTION) as run:
            return "".join([piece async for piece in run.stream_text(delta=True)])

    with scripted() as (url, _):
        assert asyncio.run(text(url)) == ANSWER
    assert cities == [CITY]
