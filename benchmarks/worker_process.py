"""WorkerProcess: an engine in a process of its own, as one of the Workers of a RemoteLoop."""

import asyncio
import multiprocessing
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvpage import CacheConfig
from kvpage.benchmarks.serving_workloads import BLOCK_SIZE, VOCAB, Shape, make_model
from kvpage.integrations.remote import GenerateCall, Worker, WorkerLost
from kvpage.serving import AsyncEngine, Engine, EngineConfig, StepOutput
from kvpage.store import ArrivingStore, KVStore, KVStoreConfig, LayerwiseStore, metadata_of


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The engine of a process.

    role: "both", "prefill" or "decode"; the latter two store in `url`, and load from there.
    batched_tokens: of one step, and so of one portion of a prompt.
    layers_per_record: that a prefill worker stores at once; None for whole chunks. Both roles need the same.
    """

    role: str
    threads: int
    url: str
    shape: Shape
    num_blocks: int = 2048
    batched_tokens: int = 256
    chunk_size: int = 128
    layers_per_record: int | None = None


class WorkerProcess:
    """A process, forked at once: fork all before the first `wait`, which starts a thread."""

    def __init__(self, plan: WorkerPlan) -> None:
        context = multiprocessing.get_context("fork")  # torch is imported once; it has computed nothing yet
        self._pipe, far = context.Pipe()
        self._calls: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Any]]] = {}
        self._sending, self._is_ready = threading.Lock(), threading.Event()
        self._process = context.Process(target=serve, args=(far, plan), daemon=True)
        self._process.start()
        far.close()

    def wait(self, seconds: float = 120.0) -> None:
        """Raises TimeoutError: it is not ready by then."""
        threading.Thread(target=self._read, daemon=True).start()
        if not self._is_ready.wait(seconds):
            raise TimeoutError(f"a worker was not ready after {seconds:g} s")

    async def stream(self, call: GenerateCall) -> AsyncGenerator[list[StepOutput], None]:
        """Run a call; see Workers.stream."""
        news: asyncio.Queue[Any] = asyncio.Queue()
        self._calls[call.request_id] = asyncio.get_running_loop(), news
        try:
            self._send(("run", call))
            while (items := await news.get()) is not None:
                if isinstance(items, Exception):
                    raise items
                yield items
        finally:
            del self._calls[call.request_id]
            self._send(("stop", call.request_id))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()

    def _send(self, message: Any) -> None:
        with self._sending, suppress(OSError):
            self._pipe.send(message)

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                request_id, items = self._pipe.recv()
                if request_id is None:
                    self._is_ready.set()
                elif request_id in self._calls:
                    loop, news = self._calls[request_id]
                    loop.call_soon_threadsafe(news.put_nowait, items)
        for loop, news in list(self._calls.values()):
            loop.call_soon_threadsafe(news.put_nowait, WorkerLost("the process has ended"))


def make_worker(plan: WorkerPlan) -> Worker:
    """Return the worker of a plan, which runs in this process."""
    model = make_model(plan.shape, torch.float32, VOCAB)
    config = EngineConfig(
        CacheConfig(BLOCK_SIZE, plan.num_blocks),
        max_num_batched_tokens=plan.batched_tokens,
        load_or_compute=False,
        save_portions=plan.role == "prefill",
        store_deadline=60.0,
    )
    engine = Engine.from_model(model, config)
    arriving = None
    if plan.role != "both":
        store = KVStore(KVStoreConfig(plan.chunk_size, (plan.url,)), metadata_of(engine.cache, "bench"))
        layers = plan.layers_per_record
        used = store if layers is None else LayerwiseStore(store, engine.cache, layers)
        arriving = ArrivingStore(used, patience=30.0) if plan.role == "decode" else None
        engine.use_store(arriving or used)
    return Worker(AsyncEngine(engine), arriving)


def serve(pipe: Connection, plan: WorkerPlan) -> None:
    """Make a worker, and run calls until the pipe ends."""
    torch.set_num_threads(plan.threads)
    worker = make_worker(plan)
    with suppress(EOFError, KeyboardInterrupt):
        asyncio.run(_serve(pipe, worker))


async def _serve(pipe: Connection, worker: Worker) -> None:
    running: dict[str, asyncio.Task[None]] = {}
    pipe.send((None, None))
    while True:
        kind, about = await asyncio.to_thread(pipe.recv)
        if kind == "run":
            running[about.request_id] = asyncio.ensure_future(_run(pipe, worker, about))
        elif about in running:
            running.pop(about).cancel()


async def _run(pipe: Connection, worker: Worker, call: GenerateCall) -> None:
    try:
        async with aclosing(worker.stream(call)) as stream:
            async for items in stream:
                pipe.send((call.request_id, items))
        pipe.send((call.request_id, None))
    except (WorkerLost, ValueError, TypeError) as error:
        pipe.send((call.request_id, error))
