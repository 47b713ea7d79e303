"""litellm at a server, over the APIs of OpenAI and of Anthropic. `tests/integrations/run.sh agents` runs this."""

import json
import os

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks a server for prices otherwise
pytest.importorskip("litellm", reason="needs tests/integrations/run.sh agents")
pytest.importorskip("fastapi")

import litellm
from integrations.agents.script import ANSWER, CITY, QUESTION, THOUGHT, scripted
from support.server_app import NAME

pytestmark = pytest.mark.routers
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.mark.parametrize(("kind", "path"), [("openai", "/v1"), ("hosted_vllm", "/v1"), ("anthropic", "")])
@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_is_called_and_its_result_answered(kind, path, streams):
    with scripted() as (url, _):

        def said(messages):
            fields = {
                "model": f"{kind}/{NAME}",
                "api_base": url + path,
                "api_key": "x",
                "tools": [TOOL],
                "max_tokens": 200,
            }
            answer = litellm.completion(messages=messages, stream=streams, **fields)
            return litellm.stream_chunk_builder(list(answer)) if streams else answer

        messages = [{"role": "user", "content": QUESTION}]
        first = said(messages).choices[0]
        [call] = first.message.tool_calls
        assert first.finish_reason == "tool_calls" and json.loads(call.function.arguments) == {"city": CITY}
        assert first.message.reasoning_content == THOUGHT
        messages += [first.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        assert said(messages).choices[0].message.content == ANSWER
