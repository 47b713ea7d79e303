"""Sessions of adapters: each branch has the blocks of the adapter of its last turn, of which others find nothing."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from server.test_response_sessions import branches, respond
from server.test_sessions import call, tokens_of, turn
from support.lora_files import targets, write_adapter
from support.server_app import NAME, Server, running_server

from kvpage.server import ServerConfig
from kvpage.serving.sessions.branch import BranchAdapter
from kvpage.serving.sessions.record import SessionRecord

B, PROMPT = 4, list(range(20, 45))
ADAPTERS = "sql", "tex", "head"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with three adapters; "head" leaves K and V as they are."""
    folder = tmp_path_factory.mktemp("adapters")
    with running_server(ServerConfig([NAME], adapter_names=ADAPTERS), pin_quota=200, num_cpu_blocks=64) as made:
        model = made.engine.debug.runner.model
        last = model.config.num_hidden_layers - 1
        for seed, name in enumerate(ADAPTERS):
            paths = targets(model, ("down_proj",), (last,)) if name == "head" else targets(model)
            made.live.call(
                lambda engine, name=name, paths=paths, seed=seed: engine.load_adapter(
                    name, write_adapter(folder / name, model, paths, seed)
                )
            ).result()
        yield made


def state_of(server: Server, session_id: str) -> dict[str, Any]:
    status, state = call(server, "GET", f"/v1/sessions/{session_id}")
    assert status == 200
    return state


def num_cached(server: Server, tokens: list[int], adapter: str | None) -> int:
    return server.live.call(lambda engine: engine.explain(tokens, adapter=adapter).num_cached_tokens).result()


def edited_sessions(server: Server, tokens: list[int], adapter: str | None) -> list[str]:
    explained = server.live.call(lambda engine: engine.explain(tokens, adapter=adapter)).result()
    return [cost.session_id for cost in explained.edits]


def num_first(server: Server) -> int:
    """Return how many blocks are evicted before all others."""
    entries = server.live.call(lambda engine: engine.manager.tree.entries(999)).result()
    return sum(len(entry.block_ids) for entry in entries if entry.priority < 0)


def test_a_turn_of_an_adapter_keeps_its_own_blocks_and_the_next_one_finds_them(server):
    retain = {"action": "retain", "ttl_seconds": 60}
    for adapter in (None, "sql"):
        name, model = f"of {adapter}", adapter or NAME
        path = f"/v1/sessions/{name}"
        assert turn(server, name, PROMPT, model=model) == len(PROMPT), "nothing of another adapter is found"
        tokens = tokens_of(server, name)
        num_blocks = (len(tokens) - 1) // B
        assert call(server, "POST", path, retain)[1]["retained_blocks"] == num_blocks
        paused = call(server, "POST", path, {"action": "pause", "expected_seconds": 30})[1]["paused_in"]
        assert paused in ("host", "device"), "as measured speeds of loads have it"
        longer = [*tokens, 7, 8]
        assert num_cached(server, longer, adapter) == num_blocks * B
        assert turn(server, name, longer, model=model) == len(longer) - num_blocks * B
        [branch] = state_of(server, name)["branches"]
        assert branch["adapter"] == adapter and branch["num_retained_blocks"] == (branch["num_tokens"] - 1) // B
        edit = {"action": "edit", "start": 9, "end": 10, "tokens": [5]}
        cost = call(server, "POST", path, edit)[1]["edit"]
        assert cost["num_tokens_to_compute"] == branch["num_tokens"] - 9
        asked = tokens_of(server, name)
        for other in (None, "sql"):
            assert (name in edited_sessions(server, asked, other)) == (other == adapter)
        assert turn(server, name, asked, model=model) == cost["num_tokens_to_compute"]


def test_a_branch_that_turns_to_another_adapter_has_its_blocks_alone(server):
    prompt = [3, *PROMPT]
    turn(server, "turned", prompt, model="sql")
    old, before = tokens_of(server, "turned"), num_first(server)
    turn(server, "turned", prompt, "other", model="sql")
    turn(server, "turned", prompt, model="tex")
    [main, other] = state_of(server, "turned")["branches"]
    assert (main["adapter"], other["adapter"]) == ("tex", "sql")
    assert num_first(server) <= before + 1, "the other branch has the path of the first one"
    call(server, "POST", "/v1/sessions/turned", {"action": "release", "branch": "other"})
    assert num_first(server) >= before + (len(old) - 1) // B, "no branch has a path of this adapter"
    assert num_cached(server, [*prompt, 1], "tex") == len(prompt)
    turn(server, "turned", prompt, model="head")
    assert num_cached(server, [*prompt, 1], None) == len(prompt), "K and V are the base model's"


def test_a_session_outlives_its_adapter(server, tmp_path):
    model = server.engine.debug.runner.model
    folder = write_adapter(tmp_path, model, targets(model), seed=9)
    server.live.call(lambda engine: engine.load_adapter("brief", folder)).result()

    def live(engine: Any) -> tuple[int, int]:
        session = engine.session("outlives")
        engine.manager.tree.clear()
        session.supersede(PROMPT, adapter="brief")
        with pytest.raises(ValueError, match="adapter must be one that is loaded"):
            session.supersede([1], adapter="none")
        assert session.tokens().tolist() == PROMPT and session.num_turns == 1
        engine.unload_adapter("brief")
        with pytest.raises(ValueError, match="adapter must be one that is loaded"):
            session.supersede([1], adapter="brief")
        session.branch("more", num_tokens=5)
        assert [branch.adapter for branch in session.state().branches] == ["brief", "brief"]
        return session.pause(3.0), session.close()

    assert server.live.call(live).result() == ("device", 0)


def test_a_chain_of_responses_has_a_branch_for_each_adapter(server):
    first, num_one = respond(server)
    second, num_two = respond(server, first, model="sql")
    third, num_three = respond(server, second)
    assert branches(server, first) == {"main": num_three, second: num_two}
    fourth, num_four = respond(server, third, model="sql")
    assert branches(server, first) == {"main": num_three, second: num_four}
    assert [branch["adapter"] for branch in state_of(server, fourth)["branches"]] == [None, "sql"]
    assert call(server, "DELETE", f"/v1/responses/{fourth}")[0] == 200
    assert branches(server, first) == {"main": num_three, second: num_two}
    assert num_one < num_three


@pytest.mark.parametrize("count", [0, B])
def test_a_record_has_the_adapters(count):
    tokens = {"main": np.arange(3, dtype=np.int32), "b": np.arange(count, dtype=np.int32)}
    record = SessionRecord(tokens, None, 2, {"b": BranchAdapter("sql", "digest")})
    read = SessionRecord.decoded(record.encoded())
    assert read is not None and read.adapters == record.adapters and len(read.branches["b"]) == count
