"""/health, /ping, /version, /metrics, /v1/models, /tokenize, /detokenize: for those beside the clients."""

import asyncio
from importlib.metadata import version

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.test_bad_input import check_refused
from server.test_completions import ask
from support.server_app import NAME, running_server
from support.waiting import until

from kvpage.server import ServerConfig

MESSAGES = [{"role": "user", "content": "the fox"}]


def get(server, path: str):
    return asyncio.run(server.get(path))


def metrics(server) -> dict[str, float]:
    families = text_string_to_metric_families(get(server, "/metrics").text)
    return {sample.name: sample.value for family in families for sample in family.samples if "le" not in sample.labels}


def test_health_ends_with_the_draining():
    with running_server() as server:
        assert get(server, "/health").status_code == get(server, "/ping").status_code == 200
        assert asyncio.run(server.post("/ping")).status_code == 200
        server.app.state.service.begin_drain()
        for answer in (get(server, "/health"), get(server, "/ping")):
            assert check_refused(answer, 503)["code"] == "not_healthy"
        error = check_refused(asyncio.run(server.post("/v1/completions", {"prompt": "x"})), 503)
        assert error["code"] == "server_busy"


def test_the_version_is_ours(server):
    assert get(server, "/version").json() == {"version": version("kvpage")}


def test_models_are_listed_by_each_name():
    with running_server(ServerConfig(["one", "org/two"])) as server:
        cards = get(server, "/v1/models").json()["data"]
        assert [(card["id"], card["object"], card["root"]) for card in cards] == [
            ("one", "model", "one"),
            ("org/two", "model", "one"),
        ]
        assert cards[0]["max_model_len"] == server.engine.max_model_len
        assert get(server, "/v1/models/org/two").json() == cards[1]
        assert ask(server, prompt="x", model="org/two", max_tokens=1).json()["model"] == "org/two"
        assert ask(server, prompt="x", model=None, max_tokens=1).json()["model"] == "one"


def test_metrics_have_vllms_names_beside_ours():
    with running_server() as server:
        before = metrics(server)
        num_tokens = len(server.tokens("a prompt"))
        ask(server, prompt="a prompt", max_tokens=4)
        ask(server, prompt="a prompt", max_tokens=3, stream=True)
        found = metrics(server)
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert 0 <= found["vllm:kv_cache_usage_perc"] <= 1
    assert found["vllm:prompt_tokens_total"] == 2 * num_tokens and found["vllm:generation_tokens_total"] == 7
    assert found["vllm:request_success_total"] == 2
    for name in ("time_to_first_token", "e2e_request_latency", "request_time_per_output_token"):
        assert found[f"vllm:{name}_seconds_count"] == 2 and before[f"vllm:{name}_seconds_count"] == 0
    assert found["vllm:cache_config_info"] == 1
    assert any(name.startswith("kvpage_") for name in found)


def test_the_time_between_outputs_is_a_metric():
    with running_server() as server:

        def streams_in_parts() -> bool:
            ask(server, prompt="a prompt", max_tokens=32, stream=True)
            return metrics(server)["vllm:inter_token_latency_seconds_count"] > 0

        until(streams_in_parts)  # a busy machine may give all tokens of a stream at once


def test_the_configuration_of_the_cache_is_a_metric(server):
    families = text_string_to_metric_families(get(server, "/metrics").text)
    [sample] = [sample for family in families for sample in family.samples if sample.name == "vllm:cache_config_info"]
    assert sample.labels["block_size"] == "4" and sample.labels["num_gpu_blocks"] == "256"
    assert sample.labels["model_name"] == NAME and sample.labels["enable_prefix_caching"] == "True"


def test_a_text_is_tokenized_and_back(server):
    text = "the quick brown fox, na\u00efve caf\u00e9 \U0001f600"
    body = ask_plain(server, "/tokenize", prompt=text, return_token_strs=True)
    assert body["tokens"] == server.tokens(text) and body["count"] == len(body["tokens"])
    assert body["max_model_len"] == server.engine.max_model_len and len(body["token_strs"]) == body["count"]
    assert ask_plain(server, "/detokenize", tokens=body["tokens"]) == {"prompt": text}
    assert ask_plain(server, "/detokenize", tokens=[]) == {"prompt": ""}


def test_a_chat_is_tokenized_as_it_would_be_computed(server):
    rendered = ask_plain(server, "/v1/chat/completions/render", messages=MESSAGES)
    assert ask_plain(server, "/tokenize", messages=MESSAGES)["tokens"] == rendered["token_ids"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "x" * 10**6}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
    ],
)
def test_wrong_texts_and_tokens_are_refused(server, path, body, param):
    answer = asyncio.run(server.post(path, body))
    check_refused(answer, 404 if param == "model" else 400, param)


def ask_plain(server, path: str, **fields):
    answer = asyncio.run(server.post(path, fields))
    assert answer.status_code == 200, answer.text
    return answer.json()
