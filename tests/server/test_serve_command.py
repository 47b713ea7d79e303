"""`kvpage serve`: options, folders that are none, one process from its start to its end, and what signals do."""

import asyncio
import contextlib
import inspect
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("uvicorn")

import uvicorn  # noqa: E402
from support.models import make_model  # noqa: E402
from support.server_app import events_of, make_tokenizer, running_server  # noqa: E402
from support.state_models import make_state_model  # noqa: E402

from kvpage.server import ServerConfig  # noqa: E402
from kvpage.server.command import draining_server  # noqa: E402
from kvpage.server.command import serve as serve_module  # noqa: E402
from kvpage.server.command.bounded_http import MAX_HEAD_BYTES, BoundedHttp  # noqa: E402
from kvpage.server.command.draining_server import DrainingServer  # noqa: E402
from kvpage.server.command.loading import engine_config, load  # noqa: E402
from kvpage.server.command.open_files import allow_open_files  # noqa: E402
from kvpage.server.command.options import ServeOptions  # noqa: E402
from kvpage.server.command.serve import bound_socket, first_command, server_config, url_of  # noqa: E402
from kvpage.serving import Engine, SamplingParams, StateConfig  # noqa: E402
from kvpage.tools import serve_cli  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small model with its tokenizer."""
    made = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    make_model("llama", vocab_size=len(tokenizer)).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"port": 65536}, r"--port must be in \[0, 65535\], got 65536"),
        ({"dtype": "float8"}, "--dtype must be one of auto, float32, float16, bfloat16, got 'float8'"),
        ({"num_gpu_blocks": 4, "kv_cache_memory": "1GiB"}, "give --num-gpu-blocks or --kv-cache-memory, not both"),
        ({"num_gpu_blocks": 0}, "--num-gpu-blocks must be an integer of at least 1, got 0"),
        ({"gpu_memory_utilization": 1.5}, r"--gpu-memory-utilization must be in \(0, 1\], got 1.5"),
        ({"kv_cache_memory": "much"}, "much"),
        ({"num_window_blocks": "few"}, "--num-window-blocks must be auto, none or a positive integer, got 'few'"),
        ({"num_window_blocks": "0"}, "--num-window-blocks must be auto, none or a positive integer, got '0'"),
        ({"num_window_blocks": "4"}, "--num-window-blocks needs --num-gpu-blocks, the blocks of the other layers"),
        ({"state_memory": "-1"}, "a size must be like 8GiB, .* got '-1'"),
        ({"checkpoint_every": -1}, "--checkpoint-every must be an integer of at least 0, got -1"),
        ({"max_body_bytes": "none"}, "none"),
        ({"max_open_bytes": "many"}, "a size must be like 8GiB, .* got 'many'"),
        ({"stores": ("nowhere",)}, "nowhere"),
        ({"stores": ("nowhere://x",)}, "scheme must be one of .*, got 'nowhere'"),
        ({"drain_timeout": -1.0}, "--drain-timeout must be at least 0 seconds, got -1.0"),
        ({"max_model_len": 0}, "--max-model-len must be an integer of at least 1, got 0"),
        ({"stores": ("memory://",), "tensor_parallel_size": 2}, "--tensor-parallel-size must be 1 with it"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size must be an integer of at least 1, got 0"),
        ({"events_replay": "tcp://127.0.0.1:1"}, "--events-replay needs --events"),
        ({"chat_template": Path("/nowhere.jinja")}, "--chat-template must be a file, /nowhere.jinja is none"),
        ({"api_key_file": Path("/nowhere")}, "--api-key-file must be a file, /nowhere is none"),
        ({"model": Path("/nowhere")}, "MODEL must be a folder .* /nowhere is none; `kvpage demo --save DIR` writes"),
        ({"model": Path(__file__).parent}, "MODEL must be a folder with a config.json, .* has none"),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(folder, fields, message):
    with pytest.raises(ValueError, match=message):
        ServeOptions(**{"model": folder} | fields)


def test_a_folder_without_a_tokenizer_or_with_a_broken_model_is_refused(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="MODEL must hold a tokenizer, .* has none that can be read"):
        load(ServeOptions(tmp_path))
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="MODEL must be a language model of transformers"):
        load(ServeOptions(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="MODEL must"):
        load(ServeOptions(tmp_path))


def test_a_device_that_is_not_there_is_refused(folder):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="--device must be usable, torch finds no CUDA device for 'cuda'"):
        load(ServeOptions(folder, device="cuda"))


def test_keys_come_from_options_the_environment_and_a_file(folder, tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("# of all\nthird ann\n\nfourth *\nfifth\n")
    monkeypatch.setenv("KVPAGE_API_KEY", "second")
    options = ServeOptions(folder, api_keys=("first",), api_key_file=tmp_path / "keys")
    config = server_config(options)
    assert [(key.key, key.tenant) for key in config.api_keys] == [
        ("first", ""), ("second", ""), ("third", "ann"), ("fourth", None), ("fifth", ""),
    ]  # fmt: skip
    assert config.served_model_names == (str(folder),)
    assert "localhost" in config.allowed_hosts
    assert server_config(ServeOptions(folder, host="0.0.0.0")).allowed_hosts == ()


def test_allowed_hosts_are_added_to_the_machines_own(folder):
    for host in ("127.0.0.1", "0.0.0.0"):
        found = server_config(ServeOptions(folder, host=host, allowed_hosts=("my.example",))).allowed_hosts
        assert {"localhost", "127.0.0.1", "[::1]", "my.example"} <= set(found)


def test_a_template_that_is_none_is_refused_before_a_model_is_loaded(folder, tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}\n{% endfro %}")
    with pytest.raises(ValueError, match="--chat-template must be a Jinja template, .* line 2: "):
        server_config(ServeOptions(folder, chat_template=tmp_path / "t.jinja"))
    for text in ("{{ messages[7].content.x.y }}", "{% generation %}{{ messages }}{% endgeneration %}"):
        (tmp_path / "t.jinja").write_text(text)
        assert server_config(ServeOptions(folder, chat_template=tmp_path / "t.jinja")).chat_template == text


def test_a_length_beyond_the_models_is_refused(folder):
    with pytest.raises(ValueError, match="max_model_len must be in .* for this model, got 1000000"):
        load(ServeOptions(folder, max_model_len=1_000_000, num_gpu_blocks=64))


def test_limits_of_requests_are_options(folder):
    limits = {"max_n": 1, "max_prompts": 2, "max_prompt_tokens": 3, "max_batch_tokens": 4, "max_scored_tokens": 5,
              "max_logprobs": 6, "max_open_requests": 7}  # fmt: skip
    config = server_config(ServeOptions(folder, max_body_bytes="1KiB", max_open_bytes="2KiB", **limits))
    assert {name: getattr(config, name) for name in limits} == limits
    assert (config.max_body_bytes, config.max_open_bytes) == (2**10, 2**11)
    names, usual = [*limits, "max_body_bytes", "max_open_bytes"], server_config(ServeOptions(folder))
    assert all(getattr(usual, name) == getattr(ServerConfig(), name) for name in names)
    asked = inspect.signature(serve_cli.serve).parameters
    assert all(asked[name].default == getattr(ServeOptions(folder), name) for name in names)


def test_blocks_are_as_many_as_asked_for_or_as_requests_can_fill(folder):
    def made(**fields) -> Engine:
        return Engine.from_model(make_model("llama"), engine_config(ServeOptions(folder, **fields)))

    assert made(num_gpu_blocks=7).manager.num_blocks == 7
    assert made(max_num_seqs=2, max_model_len=40).manager.num_blocks == 4 * 2 * 3
    assert made(kv_cache_memory="64KiB").manager.num_blocks == 64 // 6  # KiB: K and V of 16 tokens in three layers
    with pytest.raises(ValueError, match="kv_cache_memory must hold a block, got 6143"):
        made(kv_cache_memory="6143")


def test_windows_have_blocks_of_their_own_unless_they_are_not_to(folder):
    def num_window_blocks(**fields) -> int | None:
        config = engine_config(ServeOptions(folder, max_num_seqs=2, max_num_batched_tokens=16, **fields))
        return Engine.from_model(make_model("gemma3"), config).config.num_window_blocks

    assert num_window_blocks() == 4 * 2 * 2 + 1
    assert num_window_blocks(kv_cache_memory="128KiB") == 8  # half of it: 4 KiB in each of two layers
    assert num_window_blocks(num_window_blocks="none") is None
    assert num_window_blocks(num_gpu_blocks=8) is None
    assert num_window_blocks(num_gpu_blocks=8, num_window_blocks="5") == 5


def test_same_bits_are_asked_for(folder):
    assert not engine_config(ServeOptions(folder)).same_bits
    assert engine_config(ServeOptions(folder, same_bits=True)).same_bits
    assert inspect.signature(serve_cli.serve).parameters["same_bits"].default is False


def test_models_with_states_get_checkpoints_and_blocks(folder):
    for kind in ("mamba2", "lfm2"):
        model = make_state_model(kind)
        options = ServeOptions(folder, state_memory="1MiB", checkpoint_every=8, max_num_seqs=2, max_model_len=64)
        config = engine_config(options)
        assert config.states == StateConfig(2**20, 0, 8)
        engine = Engine.from_model(model, config)
        assert engine.manager.num_blocks == 4 * 2 * 4
        assert engine.stats().blocks.slots.num_slots > 2


def test_a_port_in_use_is_an_error_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"--host and --port must be free, 127.0.0.1:{port} cannot be bound"):
            bound_socket("127.0.0.1", port)
    with pytest.raises(OSError, match="--host must be an address of this machine, got 'no.such.host.invalid'"):
        bound_socket("no.such.host.invalid", 0)


def test_the_url_is_one_that_clients_can_use():
    with bound_socket("0.0.0.0", 0) as bound:
        port = bound.getsockname()[1]
        assert url_of("0.0.0.0", bound) == f"http://127.0.0.1:{port}/v1"
        assert url_of("::", bound) == f"http://[::1]:{port}/v1"


# --- the process -----------------------------------------------------------------------------------------------------


def kvpage(*arguments: str, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "kvpage", "serve", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=os.environ | environment)


def test_a_process_serves_from_its_greeting_to_sigterm(folder):
    arguments = ["--port", "0", "--served-model-name", "tiny", "--num-gpu-blocks", "64", "--block-size", "8"]
    process = kvpage(str(folder), *arguments, KVPAGE_API_KEY="secret")
    with contextlib.closing(process.stdout), contextlib.closing(process.stderr):
        try:
            greeting, command = process.stdout.readline(), process.stdout.readline()
            assert re.match(
                r"kvpage serves tiny \(LlamaForCausalLM, .*, cpu; 64 blocks of 8 tokens, \d+ MiB\) at http", greeting
            )
            page = re.search(r"and a page at (http://127.0.0.1:\d+/); try:", greeting).group(1)
            assert "<title>" in httpx.get(page, timeout=300).text
            url, path = re.search(r"curl -N (http://127.0.0.1:\d+)(/v1/\S+)", command).groups()
            assert path == "/v1/chat/completions" and 'Bearer $KVPAGE_API_KEY"' in command
            body = json.loads(re.search(r"-d '(.*)'$", command.strip()).group(1))
            assert httpx.post(url + path, json=body, timeout=300).status_code == 401
            answer = httpx.post(url + path, json=body, headers={"authorization": "Bearer secret"}, timeout=300)
            assert events_of(answer.text)[-1]["choices"][0]["finish_reason"] in ("length", "stop")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, process.stderr.read()
            log = process.stderr.read()
            assert "secret" not in log + greeting + command
            dated = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO kvpage\S+: "
            assert re.search(dated + "SIGTERM: 0 requests have 30 s to end", log), log
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("hidden", ["fastapi", "uvicorn"])
def test_without_the_extra_one_line_says_what_to_install(monkeypatch, folder, hidden):
    from kvpage.tools.serve_cli import serve

    monkeypatch.setattr(sys.modules["kvpage"], "server", sys.modules["kvpage.server"])
    for name in [name for name in sys.modules if name.startswith("kvpage.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, hidden, None)
    with pytest.raises(SystemExit) as caught:
        serve(folder)
    assert str(caught.value).startswith("kvpage serve needs the extra 'serve': pip install 'kvpage[serve]'")


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def draining(monkeypatch):
    """Run a test's coroutine beside a DrainingServer, and return it: (server, url, exits)."""
    exits: list[int] = []
    monkeypatch.setattr(draining_server.os, "_exit", exits.append)

    async def beside(server, work, drain_timeout: float) -> None:
        ready = asyncio.Event()
        with bound_socket("127.0.0.1", 0) as bound:
            settings = uvicorn.Config(server.app, http=BoundedHttp, log_config=None, timeout_graceful_shutdown=5)
            runs = DrainingServer(settings, server.app.state.service, drain_timeout, ready.set)
            serving = asyncio.ensure_future(runs.serve([bound]))
            await ready.wait()
            url = url_of("127.0.0.1", bound).removesuffix("/v1")
            async with httpx.AsyncClient(base_url=url, timeout=300) as client:
                await work(client)
            await serving

    def run(work, drain_timeout: float = 300.0) -> list[int]:
        assert threading.current_thread() is threading.main_thread(), "signals come to the main thread"
        with running_server() as server:
            asyncio.run(beside(server, work, drain_timeout))
            assert server.live.stats().num_unfinished == 0
        return exits

    return run


LONG = {"prompt": "the fox", "max_tokens": 100, "ignore_eos": True, "stream": True, "temperature": 0}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_requests_end_and_takes_no_more(draining, number):
    found = {}
    before = signal.signal(number, signal.default_int_handler)  # under nohup SIGHUP is ignored, and would stay so

    async def work(client) -> None:
        async with client.stream("POST", "/v1/completions", json=LONG) as answer:
            lines = answer.aiter_lines()
            first = await anext(lines)
            os.kill(os.getpid(), number)
            while (await client.get("/health")).status_code == 200:
                await asyncio.sleep(0)
            refused = await client.post("/v1/completions", json={"prompt": "x"})
            found["refused"] = refused.status_code, refused.headers["retry-after"]
            found["text"] = "\n".join([first] + [line async for line in lines])

    try:
        assert draining(work) == []
    finally:
        signal.signal(number, before)
    assert found["refused"] == (503, "6")
    events = events_of(found["text"])
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_loads_ends_with_exit_code_0(folder, monkeypatch, number):
    def load_for_ever(options) -> None:
        os.kill(os.getpid(), number)
        while True:
            time.sleep(0.001)

    monkeypatch.setattr(serve_module, "load", load_for_ever)
    monkeypatch.setattr(serve_module, "prepare_logs", lambda: None)
    monkeypatch.setattr(serve_module, "allow_open_files", lambda: None)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught:
        serve_module.serve(ServeOptions(folder, port=0))
    assert caught.value.code == 0 and signal.getsignal(number) is before


def test_a_signal_that_nohup_ignores_is_left_alone():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in draining_server.taken_signals()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.SIGHUP in draining_server.taken_signals()


def test_what_has_not_ended_in_time_is_aborted_with_an_error(draining):
    found = []

    async def work(client) -> None:
        async with client.stream("POST", "/v1/completions", json=LONG) as answer:
            async for line in answer.aiter_lines():
                if not found:
                    os.kill(os.getpid(), signal.SIGTERM)
                found.append(line)

    draining(work, drain_timeout=0.001)
    assert events_of("\n".join(found))[-1]["error"]["code"] == "request_aborted"


def test_a_second_signal_ends_the_process_at_once(draining, capsys):
    async def work(client) -> None:
        async with client.stream("POST", "/v1/completions", json=LONG) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0.01)

    assert draining(work) == [128 + signal.SIGINT]
    assert "kvpage serve: ended before its requests" in capsys.readouterr().out


def test_the_first_command_fits_the_server(folder):
    loaded = load(ServeOptions(folder, num_gpu_blocks=64))
    try:
        config = server_config(ServeOptions(folder))
        assert "/v1/chat/completions" in first_command("http://host/v1", config, loaded)
        loaded.tokenizer.chat_template = None
        assert "/v1/completions -H" in first_command("http://host/v1", config, loaded)
        output = asyncio.run(loaded.engine.generate([5, 6], SamplingParams(max_tokens=2)))
        assert output.samples[0].text is not None
    finally:
        loaded.close()


def test_a_folder_that_is_none_is_refused_before_anything_large_is_imported():
    code = (
        "import sys; from kvpage.tools.serve_cli import serve; from pathlib import Path\ntry: serve(Path('/nowhere'))\n"
    )
    code += "except SystemExit as error: print(error); assert 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("kvpage serve: MODEL must be a folder")


def check_next_turn(loaded, messages: list) -> None:
    """Check that answers of the demo's model are read as the very tokens that it wrote: the next turn finds them."""

    def tokens_of(turns: list) -> list[int]:
        text = loaded.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return loaded.tokenizer(text, add_special_tokens=False)["input_ids"]

    for temperature in (0.0, 1.0, 3.0):
        params = SamplingParams(max_tokens=80, temperature=temperature, seed=1)
        output = asyncio.run(loaded.engine.generate(tokens_of(messages), params))
        messages = [
            *messages,
            {"role": "assistant", "content": output.samples[0].text},
            {"role": "user", "content": "a"},
        ]
        turns = tokens_of(messages)
        both = [*output.prompt_token_ids, *output.token_ids]
        assert turns[: len(both)] == both


def test_the_small_model_of_the_demo_chats(tmp_path):
    from kvpage.tools.demo_model import save_model

    save_model(tmp_path / "new")
    loaded = load(ServeOptions(tmp_path / "new", num_gpu_blocks=64))
    try:
        messages = [{"role": "user", "content": "Hello, na\u00efve caf\u00e9"}]
        text = loaded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token_ids = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert loaded.tokenizer.decode(token_ids) == text == "<|user|>Hello, na\u00efve caf\u00e9<|end|><|assistant|>"
        output = asyncio.run(loaded.engine.generate(token_ids, SamplingParams(max_tokens=6)))
        assert len(output.token_ids) == 6 and len(set(output.token_ids)) > 1
        check_next_turn(loaded, messages)
    finally:
        loaded.close()
    with pytest.raises(ValueError, match="--save must name a new folder, .* holds a model"):
        save_model(tmp_path / "new")


def test_a_head_that_does_not_end_is_refused(draining):
    found = {}

    async def work(client) -> None:
        address = client.base_url
        for target in ("http://evil.example/health", "ftp:/x"):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert (await reader.read(12)) == b"HTTP/1.1 400"
            writer.close()
        body = {"nonsense": "x" * 2 * MAX_HEAD_BYTES}
        for _ in range(3):  # bodies, and the heads of several requests of a connection, do not count
            answer = await client.post("/v1/completions", json=body | {"prompt": "x", "max_tokens": 1})
            assert answer.headers["x-ignored-fields"] == "nonsense"
        assert (await client.get("/version", headers={"x-long": "x" * 10_000})).status_code == 200
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"GET /health HTTP/1.1\r\nX-Long: ")
        with contextlib.suppress(ConnectionError):
            for found["pieces"] in range(1024):
                writer.write(b"x" * 2**16)
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            found["answer"] = await reader.read(12)
        writer.close()
        os.kill(os.getpid(), signal.SIGTERM)

    draining(work)
    assert found["pieces"] < 512 and found.get("answer", b"HTTP/1.1 400") in (b"HTTP/1.1 400", b"")


def test_the_limit_of_open_files_is_raised():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 1, before[1]))
        allow_open_files()
        found = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert found[0] >= min(before[0] - 1, 65536) and found[1] == before[1]
        assert found[0] == min(before[1], 65536) or found[0] == before[0] - 1 >= 65536
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
