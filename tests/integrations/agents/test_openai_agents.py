"""OpenAI's Agents SDK at a server, over both of OpenAI's APIs. `tests/integrations/run.sh agents` runs this."""

import asyncio

import pytest

pytest.importorskip("agents", reason="needs tests/integrations/run.sh agents")
pytest.importorskip("fastapi")

import agents
import openai
from integrations.agents.script import ANSWER, CITY, QUESTION, scripted
from support.server_app import NAME

pytestmark = pytest.mark.routers


def agent_of(url: str, uses_responses: bool, cities: list[str]):
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    kind = agents.OpenAIResponsesModel if uses_responses else agents.OpenAIChatCompletionsModel
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def get_weather(city: str) -> str:
        """Tell the weather of a city."""
        cities.append(city)
        return "rain"

    return agents.Agent("agent", instructions="Be brief.", tools=[get_weather], model=kind(NAME, client))


@pytest.mark.parametrize("uses_responses", [True, False])
def test_an_agent_calls_its_tool_and_answers(uses_responses):
    cities: list[str] = []
    with scripted() as (url, _):
        result = asyncio.run(agents.Runner.run(agent_of(url, uses_responses, cities), QUESTION))
    assert result.final_output == ANSWER and cities == [CITY]


@pytest.mark.parametrize("uses_responses", [True, False])
def test_an_agent_streams(uses_responses):
    cities: list[str] = []

    async def texts(url: str) -> str:
        run = agents.Runner.run_streamed(agent_of(url, uses_responses, cities), QUESTION)
        pieces = [
            event.data.delta
            async for event in run.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert run.final_output == ANSWER and len(pieces) > 3
        return "".join(pieces)

    with scripted() as (url, _):
        assert asyncio.run(texts(url)) == ANSWER
    assert cities == [CITY]


def test_a_second_turn_follows_the_first_response():
    cities: list[str] = []
    with scripted(times=2) as (url, server):

        async def turns() -> str:
            agent = agent_of(url, True, cities)
            first = await agents.Runner.run(agent, QUESTION)
            second = await agents.Runner.run(agent, "And now?", previous_response_id=first.last_response_id)
            return second.final_output

        assert asyncio.run(turns()) == ANSWER
        assert len(server.app.state.service.responses) == 4
    assert cities == [CITY] * 2
