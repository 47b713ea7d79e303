"""A server of kvpage's own for bench_serve, which also answers without HTTP: by the Engine, and by the AsyncEngine.

POST /bench/engine and /bench/live take {"prompts": [[token id]], "max_tokens": [int]}, one each, and give {"seconds":
float, "texts": [str]}. All three ways use one engine on one thread, so that only the way differs.

    python benchmarks/serve_own.py MODEL_DIR PORT NUM_THREADS DTYPE NUM_BLOCKS MAX_NUM_SEQS
"""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from transformers import AutoTokenizer

from kvpage import CacheConfig
from kvpage.benchmarks.serve_model import load_model
from kvpage.server import ServerConfig, create_app
from kvpage.serving import AsyncEngine, Engine, EngineConfig, SamplingParams

BLOCK_SIZE = 16
Asked = dict[str, Any]


def params_of(asked: Asked) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=most, ignore_eos=True, temperature=0.0) for most in asked["max_tokens"]]


async def by_engine(live: AsyncEngine, asked: Asked) -> list[list[int]]:
    """The engine's own loop runs all of it, on the stepping thread."""
    work = live.call(lambda engine: engine.generate(asked["prompts"], params_of(asked)))
    return [output.token_ids for output in await asyncio.wrap_future(work)]


async def by_streams(live: AsyncEngine, asked: Asked) -> list[list[int]]:
    """A coroutine reads each request, token by token."""

    async def read(prompt: list[int], params: SamplingParams) -> list[int]:
        request = live.submit(prompt, params)
        return [one.token_id async for outputs in request for one in outputs if one.token_id is not None]

    return await asyncio.gather(*map(read, asked["prompts"], params_of(asked)))


def make_app(live: AsyncEngine, folder: str) -> Any:
    """Return kvpage's application with the two ways beside it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    app = create_app(live, tokenizer, ServerConfig(served_model_names=["model"]))

    def add(name: str, run: Any) -> None:
        async def timed(request: Request) -> Response:
            asked = await request.json()
            begin = time.perf_counter()
            answers = await run(live, asked)
            taken = time.perf_counter() - begin
            return JSONResponse({"seconds": taken, "texts": tokenizer.batch_decode(answers, skip_special_tokens=True)})

        app.add_api_route(f"/bench/{name}", timed, methods=["POST"])

    async def forget(request: Request) -> Response:
        await asyncio.wrap_future(live.call(Engine.reset_prefix_cache))
        return JSONResponse({})

    add("engine", by_engine)
    add("live", by_streams)
    app.add_api_route("/bench/forget", forget, methods=["POST"])
    return app


def main() -> None:
    folder, port, num_threads, dtype, num_blocks, max_num_seqs = sys.argv[1:]
    torch.set_num_threads(int(num_threads))
    cache = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=int(num_blocks))
    engine = Engine.from_model(load_model(Path(folder), dtype), EngineConfig(cache, int(max_num_seqs)))
    with AsyncEngine(engine) as live:
        app = make_app(live, folder)
        uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
