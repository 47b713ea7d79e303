"""The application for Ray Serve without Ray: settings, deployments, a gateway over replicas made here, the router."""

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from support import fake_ray
from support.models import generate_each, make_model, make_prompts
from support.ray_cluster import save_model

from kvpage.integrations.ray import AppSettings, app, build_app, prefix_routing
from kvpage.integrations.ray.gateway import Gateway, ServeWorkers
from kvpage.integrations.ray.prefix_routing import PrefixRouting
from kvpage.integrations.ray.replica import Replica
from kvpage.integrations.remote import GenerateCall
from kvpage.integrations.routing import DigestReport
from kvpage.observe.events.block_hashes import block_hashes
from kvpage.serving import SamplingParams

B = 4
FIELDS = {"block_size": B, "num_gpu_blocks": 256, "served_model_name": "tiny"}


@pytest.fixture
def ray(monkeypatch):
    fake_ray.installed(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("model")))


# --- settings and deployments ----------------------------------------------------------------------------------------


def test_settings_are_read_as_the_command_line_gives_them() -> None:
    settings = AppSettings(model="m", num_replicas="2", store="redis://a:1/0 memory://?size=1MiB")
    assert (settings.num_replicas, settings.store) == (2, ("redis://a:1/0", "memory://?size=1MiB"))
    assert settings.name == "m" and AppSettings(model="m", served_model_name="n").name == "n"
    assert "secret" not in repr(AppSettings(model="m", api_key="secret"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": ""}, {"modle": "x"}, {"dtype": "8"}, {"num_replicas": 0}, {"num_prefill_replicas": 1},
        {"store": ["nowhere"]}, {"num_replicas": 3, "max_replicas": 2}, {"block_size": 0}, {"router": "best"},
        {"patience": -1}, {"downscale_delay": float("nan")}, {"max_model_len": 0}, {"layers_per_record": 0},
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(wrong) -> None:
    with pytest.raises(ValueError):
        AppSettings(**{"model": "x", **wrong})


def test_roles_have_engines_of_their_own() -> None:
    settings = AppSettings(model="m", store="memory://?size=1MiB")
    both, prefill, decode = (settings.engine_config(role) for role in ("both", "prefill", "decode"))
    assert (both.load_or_compute, prefill.load_or_compute, decode.load_or_compute) == (True, False, False)
    assert (both.save_portions, prefill.save_portions, decode.save_portions) == (False, True, False)
    disk = AppSettings(model="m", store="disk:///tmp/{replica}?size=1MiB")
    assert disk.store_config("r7").tiers == ("disk:///tmp/r7?size=1MiB",)


def test_an_application_is_a_gateway_over_replicas(ray) -> None:
    made = build_app(model="m", num_replicas=2, digest_period=0.5, imbalance=3, block_size=B, num_gpus=1)
    settings, replicas = made.bound
    assert made.options["name"] == "Gateway" and settings["model"] == "m"
    options = replicas.options
    assert (options["name"], options["num_replicas"], replicas.target) == ("kvpage", 2, Replica)
    assert options["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": 1.0}
    router = options["request_router_config"]
    assert router.request_router_class == "kvpage.integrations.ray.router:PrefixRouter"
    assert router.request_router_kwargs == {"block_size": B, "imbalance": 3}
    assert router.request_routing_stats_period_s == 0.5


def test_prefill_and_decode_are_two_deployments(ray) -> None:
    made = app(AppSettings(model="m", num_replicas=3, num_prefill_replicas=2, store="redis://a:1/0"))
    _, decode, prefill = made.bound
    assert (decode.options["name"], decode.options["num_replicas"], decode.bound[1]) == ("kvpage-decode", 3, "decode")
    assert (prefill.options["name"], prefill.options["num_replicas"], prefill.bound[1]) == (
        "kvpage-prefill", 2, "prefill")  # fmt: skip


def test_replicas_between_two_numbers(ray) -> None:
    _, replicas = build_app(model="m", max_replicas=4, downscale_delay=9, router="power_of_two").bound
    scaling = replicas.options["autoscaling_config"]
    assert "num_replicas" not in replicas.options
    assert (scaling["min_replicas"], scaling["max_replicas"], scaling["downscale_delay_s"]) == (1, 4, 9)
    assert replicas.options["request_router_config"].request_router_class == "pow_2"


def test_without_ray_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'kvpage\[ray\]'"):
        build_app(model="m")


# --- a gateway over replicas -----------------------------------------------------------------------------------------


class ReplicaHere(Replica):
    def __del__(self) -> None:
        """Serve would await the class's own, Python would not."""


class GatewayHere(Gateway):
    def __del__(self) -> None:
        """The same."""


@pytest.fixture(params=[None, 1])
def replica(request, ray, model):
    store = {"store": "memory://?size=1MiB", "chunk_size": 8, "layers_per_record": request.param}
    made = ReplicaHere(AppSettings(model=model, **store, **FIELDS).model_dump())
    yield made
    asyncio.run(made.close())


def with_gateway(model: str, handle: fake_ray.Handle, run, **fields: object):
    """Return what `run` returns for a client of a gateway's API."""

    async def running():
        gateway = GatewayHere(AppSettings(model=model, **FIELDS, **fields).model_dump(), handle)
        transport = httpx.ASGITransport(gateway.__serve_build_asgi_app__())
        try:
            gateway.check_health()
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                return await run(client)
        finally:
            await gateway.close()

    return asyncio.run(running())


async def complete(client: httpx.AsyncClient, prompt: list[int], **fields: object) -> dict:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True, **fields}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_the_api_gives_the_tokens_of_the_engine(replica, model) -> None:
    prompts = make_prompts([3 * B + 1, B, 1])
    expected = generate_each(make_model("llama", max_position_embeddings=2048), prompts, 6)
    handle = fake_ray.Handle([replica])

    async def run(client):
        found = [(await complete(client, prompt))["token_ids"] for prompt in prompts]
        first = (await complete(client, prompts[0]))["text"]
        stopped = await complete(client, prompts[0], stop=[first[1:3]])
        assert stopped["text"] == first[: first.index(first[1:3])] and stopped["finish_reason"] == "stop"
        for _ in range(500):
            if "kvpage" in (metrics := (await client.get("/metrics")).text) and "num_requests" in metrics:
                break
            await asyncio.sleep(0.01)
        refused = await client.post("/v1/completions", json={"model": "tiny", "prompt": [10**6]})
        assert refused.status_code == 400
        return found

    assert with_gateway(model, handle, run) == expected
    assert len(handle.calls) == 5 and all(response.is_cancelled for response in handle.responses)


def test_a_replica_that_ray_has_lost_is_not_noticed(replica, model) -> None:
    (prompt,) = make_prompts([2 * B])
    expected = generate_each(make_model("llama", max_position_embeddings=2048), [prompt], 6)[0]
    errors = [fake_ray.RayError("died"), fake_ray.RayServeException("draining"), None]

    async def lost(stream):
        error = errors.pop(0)
        async for items in stream:
            if error is not None:
                yield items[:1]  # a stream under load gives all its tokens at once, the last token among them
                raise error
            yield items

    handle = fake_ray.Handle([replica], lost)
    found = with_gateway(model, handle, lambda client: complete(client, prompt))
    assert found["token_ids"] == expected and not errors


def test_errors_of_the_request_itself_are_not_tried_again(ray) -> None:
    class TaskError(fake_ray.RayError, ValueError):
        """As Ray raises what a replica has raised."""

    class Refusing:
        async def generate(self, call):
            raise TaskError("no such thing")
            yield []

    async def read(error: type[Exception]) -> None:
        handle = fake_ray.Handle([Refusing()])
        with pytest.raises(error, match="no such thing"):
            async for _ in ServeWorkers(handle).stream(GenerateCall("a", np.ones(3, np.int32), SamplingParams())):
                pass
        assert handle.responses[0].is_cancelled

    asyncio.run(read(TaskError))


def test_a_replica_reports_what_it_caches(replica) -> None:
    prompt = make_prompts([5 * B])[0]

    async def run() -> None:
        call = GenerateCall("a", np.array(prompt, np.int32), SamplingParams(max_tokens=2))
        assert [items async for items in replica.generate(call)][-1][-1].output.error is None
        assert (await replica.stats()).num_prompt_tokens == 5 * B
        replica.check_health()

    asyncio.run(run())
    report = DigestReport.from_wire(replica.record_routing_stats())
    assert set(block_hashes(prompt, B)) <= report.hashes


# --- the router ------------------------------------------------------------------------------------------------------


class ServesRouter:
    """As Serve's RequestRouter with its LocalityMixin. lengths: the queues that it knows."""

    def __init__(self) -> None:
        self.replica_queue_len_cache: dict[str, int] = {}
        self.replicas: list[Any] = []

    def update_replicas(self, replicas) -> None:
        self.replicas = replicas

    def apply_locality_routing(self, pending_request):
        return {one.replica_id for one in self.replicas}


class Router(PrefixRouting, ServesRouter):
    """The router of replicas with these names."""

    def __init__(self, *names: str, **arguments: int) -> None:
        super().__init__()
        self.initialize_state(block_size=B, **arguments)
        self.update_replicas([replica_info(name) for name in names])

    def choose(self, tokens: list[int] | None, request_id: str = "r") -> list[list[str]]:
        args = [] if tokens is None else [GenerateCall("c", np.array(tokens, np.int32), SamplingParams())]
        pending = request(request_id, *args)
        ranks = asyncio.run(self.choose_replicas(self.replicas, pending))
        return [[one.replica_id for one in rank] for rank in ranks]

    def send(self, tokens: list[int], request_id: str) -> str:
        """Route a request, as Serve does; return its replica."""
        name = self.choose(tokens, request_id)[0][0]
        call = GenerateCall("c", np.array(tokens, np.int32), SamplingParams())
        self.on_request_routed(request(request_id, call), name, None)
        return name


def request(request_id: str, *args: object) -> SimpleNamespace:
    return SimpleNamespace(args=list(args), metadata=SimpleNamespace(internal_request_id=request_id))


def replica_info(name: str, tokens: list[int] = ()) -> SimpleNamespace:  # type: ignore[assignment]
    report = DigestReport(B, 1, frozenset(block_hashes(tokens, B)))
    return SimpleNamespace(replica_id=name, routing_stats=report.to_wire() if tokens else {})


LONG, OTHER = list(range(1, 4 * B)), list(range(100, 100 + 4 * B))


def test_reports_lead_prompts_to_their_replica() -> None:
    router = Router("a", "b", "c")
    router.update_replicas([replica_info("a"), replica_info("b", LONG[: 2 * B]), replica_info("c", LONG[:B])])
    assert router.choose(LONG)[:3] == [["b"], ["c"], ["a"]]
    assert len(router.choose(LONG)[3]) == 2  # Serve's own choice, where these are full


def test_routed_prompts_lead_the_next_ones() -> None:
    router = Router("a", "b", "c", "d")
    first = router.send(LONG, "1")
    assert [router.send([*LONG, i], f"x{i}") for i in range(5)] == [first] * 5
    router.update_replicas([replica_info(name) for name in "abcd" if name != first])
    assert router.send(LONG, "2") != first


def test_unknown_prompts_go_where_fewest_are() -> None:
    router = Router("a", "b")
    first, second = router.send(LONG, "1"), router.send(OTHER, "2")
    assert {first, second} == {"a", "b"}
    router.replica_queue_len_cache[first] = 5  # of another router
    assert router.send(list(range(50, 70)), "3") == second


def test_a_busy_replica_gets_no_more_for_its_prefix() -> None:
    router = Router("a", "b", imbalance=3)
    sent = [router.send([*LONG, i], str(i)) for i in range(12)]
    assert 3 <= sent.count("a") <= 9
    for i, name in enumerate(sent):
        router.on_request_completed(name, str(i))
    assert set(router._loads().values()) <= {0}


def test_ends_are_counted_once_in_any_order() -> None:
    router = Router("a", "b")
    call = GenerateCall("c", np.array(LONG, np.int32), SamplingParams())
    router.on_request_completed("a", "early")  # Serve may tell the end first
    router.on_request_routed(request("early", call), "a", None)
    router.on_request_completed("a", "refused")
    router.on_request_routed(request("refused", call), "b", None)
    assert router._loads() == {"b": 1}
    router.on_request_completed("b", "refused")
    assert not router._loads()
    for i in range(prefix_routing.MAX_EARLY_ENDS + 10):
        router.on_request_completed("a", f"refused {i}")
    assert len(router._early_ends) == prefix_routing.MAX_EARLY_ENDS


def test_calls_without_a_prompt_go_to_two_at_random() -> None:
    router = Router("a", "b", "c")
    for tokens in (None, LONG[: B - 1]):
        (rank,) = router.choose(tokens)
        assert len(rank) == 2
    assert Router("a").choose(None) == [["a"]]
    assert asyncio.run(Router("a", "b").choose_replicas([], None)) == [[]]
