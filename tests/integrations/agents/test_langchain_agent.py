"""A tool loop by LangChain at a server. `tests/integrations/run.sh agents` runs this."""

import pytest

pytest.importorskip("langchain_openai", reason="needs tests/integrations/run.sh agents")
pytest.importorskip("fastapi")

import langchain_openai
from integrations.agents.script import ANSWER, CITY, QUESTION, scripted
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from support.server_app import NAME

pytestmark = pytest.mark.routers


@tool
def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"rain in {city}"


@pytest.mark.parametrize("uses_responses", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_a_tool_is_called_and_its_result_answered(uses_responses, streams):
    with scripted() as (url, _):
        model = langchain_openai.ChatOpenAI(
            base_url=f"{url}/v1", api_key="x", model=NAME, max_retries=0, use_responses_api=uses_responses
        ).bind_tools([get_weather])

        def said(messages):
            if not streams:
                return model.invoke(messages)
            chunks = list(model.stream(messages))
            assert len(chunks) > 3
            return sum(chunks[1:], chunks[0])

        messages = [HumanMessage(QUESTION)]
        call = said(messages)
        assert [(made["name"], made["args"]) for made in call.tool_calls] == [("get_weather", {"city": CITY})]
        messages += [call, *(get_weather.invoke(made) for made in call.tool_calls)]
        assert said(messages).text == ANSWER
