"""The script of the agents' tests: one tool, its call, and the answer after it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

from support.agent_server import AgentServer, agent_server, forced
from support.http_server import serving

QUESTION, ANSWER, THOUGHT = "How is the weather in Bonn?", "It rains in Bonn.", "I look it up."
CITY = "Bonn"
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps({"city": CITY})}}}\n</tool_call>'
TURNS = [f"<think>\n{THOUGHT}\n</think>\n\n{CALL}", f"<think>\nso\n</think>\n\n{ANSWER}"]


@contextmanager
def scripted(times: int = 1) -> Iterator[tuple[str, AgentServer]]:
    """Yield the address of a server that answers by the script, and its parts."""
    with (
        agent_server("hermes", thinks=True) as server,
        serving(server.app, server.live) as url,
        forced(server, TURNS * times),
    ):
        yield url, server
