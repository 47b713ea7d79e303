"""A server of kvpage's own for bench_serve, which also answers without HTTP: by the Engine, and by the AsyncEngine.

POST /bench/engine and /bench/live take {"prompts": [[token id]], "max_tokens": [int]}, one each, and give {"seconds":
float, "texts": [str]}. All three ways use one engine on one thread, so that only the way differs.

    python benchmarks/serve_own.py MODEL_DIR PORT NUM_THREADS DTYPE NUM_BLOCKS MAX_NUM_SEQS
"""

import asyncio
import sys
import time
from typing import Any

import torch
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from transformers import AutoTokenizer

from kvpage import CacheConfig
from kvpage.benchmarks.serve_model import load_model
from kvpage.benchmarks.serving_workloads import DTYPES
from kvpage.server import ServerConfig, create_app
from kvpage.serving import AsyncEngine, Engine, EngineConfig, SamplingParams

BLOCK_SIZE = 16
Prompts = list[list[int]]


async def by_engine(live: AsyncEngine, prompts: Prompts, params: list[SamplingParams]) -> Prompts:
    """The engine's own loop runs all of it, on the stepping thread."""
    outputs = await asyncio.wrap_future(live.call(lambda engine: engine.generate(prompts, params)))
    return [output.token_ids for output in outputs]


async def by_streams(live: AsyncEngine, prompts: Prompts, params: list[SamplingParams]) -> Prompts:
    """A coroutine reads each request, token by token."""

    async def read(prompt: list[int], params: SamplingParams) -> list[int]:
        request = live.submit(prompt, params)
        return [one.token_id async for outputs in request for one in outputs if one.token_id is not None]

    return await asyncio.gather(*map(read, prompts, params))


def make_app(live: AsyncEngine, folder: str) -> Any:
    """Return kvpage's application with the two ways beside it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    app = create_app(live, tokenizer, ServerConfig(served_model_names=["model"]))

    def timed(run: Any) -> Any:
        async def answer(request: Request) -> Response:
            asked = await request.json()
            params = [SamplingParams(max_tokens=most, ignore_eos=True, temperature=0.0) for most in asked["max_tokens"]]
            begin = time.perf_counter()
            answers = await run(live, asked["prompts"], params)
            taken = time.perf_counter() - begin
            return JSONResponse({"seconds": taken, "texts": tokenizer.batch_decode(answers, skip_special_tokens=True)})

        return answer

    async def forget(request: Request) -> Response:
        await asyncio.wrap_future(live.call(Engine.reset_prefix_cache))
        return JSONResponse({})

    for name, route in {"engine": timed(by_engine), "live": timed(by_streams), "forget": forget}.items():
        app.add_api_route(f"/bench/{name}", route, methods=["POST"])
    return app


def main() -> None:
    folder, port, num_threads, dtype, num_blocks, max_num_seqs = sys.argv[1:]
    torch.set_num_threads(int(num_threads))
    cache = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=int(num_blocks))
    engine = Engine.from_model(load_model(folder, DTYPES[dtype]), EngineConfig(cache, int(max_num_seqs)))
    with AsyncEngine(engine) as live:
        uvicorn.run(make_app(live, folder), host="127.0.0.1", port=int(port), log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
