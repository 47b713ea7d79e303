"""A naive tiering of vLLM's: host memory in rows, one secondary tier, and rules that the tier is held to.

    tiering.compute("r", chunks)         stores chunks as vLLM does after it has computed them
    tiering.load("r", keys)              looks them up step by step, and loads what is found; returns the bytes

Rows that nobody owns hold POISON. A row under way belongs to the tier; all others are compared after each call.
"""

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from support.insides import stack_of, store_of

NUM_BYTES = 96
POISON = 0xA5
MAX_STEPS = 20_000
STEP_SECONDS = 0.0005
PATIENT = {"lookup_patience": 60.0, "load_patience": 60.0, "store_patience": 60.0}  # on a busy machine, too


def bytes_of(key: bytes, num_bytes: int = NUM_BYTES) -> bytes:
    """Return what a chunk holds in these tests."""
    return np.random.default_rng(list(key)).integers(0, 256, num_bytes, dtype=np.uint8).tobytes()


def config_of(model: Any, **fields: Any) -> Any:
    """Return vLLM's configuration of a model's folder."""
    from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingModelConfig

    names = {name: fields.pop(name) for name in ("dtype",) if name in fields}
    return OffloadingConfig(model=OffloadingModelConfig(str(model), **names), **fields)


def make_model(path: Path, weights: bytes = b"weights") -> Path:
    """Make a model's folder."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    (path / "model.safetensors").write_bytes(weights)
    return path


def disk(tmp_path: Path, name: str = "kv") -> str:
    """Return the URL of a small place on disk."""
    return f"disk://{tmp_path / name}?size=4MiB&segment=1MiB"


def flip(folder: Path, key: bytes) -> None:
    """Flip one bit of a chunk where it lies on disk."""
    for path in folder.rglob("*"):
        at = path.read_bytes().find(bytes_of(key)) if path.is_file() else -1
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + NUM_BYTES // 2)
                byte = file.read(1)[0]
                file.seek(at + NUM_BYTES // 2)
                file.write(bytes([byte ^ 4]))
            return
    raise AssertionError("the chunk is nowhere")


class VllmConfig(SimpleNamespace):
    """vLLM's whole configuration, of which a tier is told a part."""


def whole(**fields: Any) -> VllmConfig:
    """Return a whole configuration with these values, in whatever part the tier looks for them."""
    values = {"dtype": "torch.float16", "load_format": "auto", "prefix_caching_hash_algo": "sha256", **fields}
    parts = ("model_config", "attention_config", "cache_config", "load_config")
    return VllmConfig(**dict.fromkeys(parts, SimpleNamespace(**values)))


class Tiering:
    """Host memory and a tier, made by a call that has the whole configuration, as vLLM's does."""

    def __init__(
        self,
        model: Any,
        num_chunks: int = 8,
        num_bytes: int = NUM_BYTES,
        config: Any = None,
        publishes: bool = False,
        vllm_config: Any = None,
        **settings: Any,
    ):
        vllm_config = whole() if vllm_config is None else vllm_config  # the tier finds it in this frame
        from kvpage.integrations.vllm import KVPageTier

        self.memory = np.full((num_chunks, num_bytes), POISON, np.uint8)
        events = SimpleNamespace(enable_kv_cache_events=publishes)
        spec = SimpleNamespace(config=config or config_of(model), kv_events_config=events)
        self.view = memoryview(self.memory)
        self.tier = KVPageTier(spec, self.view, "KVPageTier", **{**PATIENT, **settings})
        self.free, self.jobs, self.results = list(range(num_chunks)), {}, {}
        self.num_jobs, self.num_loads, self.owned = 0, 0, {}

    # --- vLLM's side ---

    def request(self, name: str) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        context = ReqContext(name)
        self.tier.on_new_request(context)
        return context

    def step(self) -> None:
        """End a step, and take what is over."""
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.tier.on_schedule_end(ScheduleEndContext((), ()))
        for result in self.tier.get_finished_jobs():
            job = self.jobs.pop(result.job_id)
            assert result.successful_keys is None or set(result.successful_keys) < set(job.keys)
            self.results[result.job_id] = (job, result)
        loaded = [job for job, _ in self.results.values() if job.is_promotion]  # `finish` compares these
        mine = {row for job in [*self.jobs.values(), *loaded] for row in job.chunk_ids}
        for row in set(range(len(self.memory))) - mine:
            assert self.memory[row].tobytes() == self.owned.get(row, bytes([POISON]) * self.memory.shape[1]), row

    def wait(self, until: Any) -> None:
        """Step until something is so. It fails after many steps: nothing may hang."""
        for _ in range(MAX_STEPS):
            if until():
                return
            self.step()
            time.sleep(STEP_SECONDS)  # as long as a model computes
        raise AssertionError(f"nothing happened in {MAX_STEPS} steps")

    def submit(self, keys: Sequence[bytes], context: Any, is_load: bool) -> int:
        """Begin a job over free rows. Stores find the chunks' bytes there, loads find poison."""
        from vllm.v1.kv_offload.tiering.base import TransferJob

        rows = [self.free.pop() for _ in keys]
        for row, key in zip(rows, keys, strict=True):
            if not is_load:
                self.owned[row] = bytes_of(key, self.memory.shape[1])
                self.memory[row] = np.frombuffer(self.owned[row], np.uint8)
        job = TransferJob(self.num_jobs, list(keys), np.array(rows, np.int32), is_load, context)
        self.jobs[self.num_jobs], self.num_jobs = job, self.num_jobs + 1
        self.num_loads += is_load
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        return job.job_id

    def finish(self, job_id: int) -> tuple[list[bool], Any]:
        """Wait for a job, and give its rows back. Return a flag for each key, and the tier's result."""
        self.wait(lambda: job_id in self.results)
        job, result = self.results.pop(job_id)
        done = set(job.keys if result.success else result.successful_keys or ())
        for row, key in zip(job.chunk_ids, job.keys, strict=True):
            if job.is_promotion and key in done:  # what counts as loaded is what was stored, each byte
                assert self.memory[row].tobytes() == bytes_of(key, self.memory.shape[1]), "a wrong byte was loaded"
            self.memory[row] = POISON
            self.owned.pop(int(row), None)
            self.free.append(int(row))
        return [key in done for key in job.keys], result

    # --- tests' side ---

    def compute(self, name: str, keys: Sequence[bytes]) -> Any:
        """Store chunks; return the tier's result."""
        context = self.request(name)
        _, result = self.finish(self.submit(keys, context, is_load=False))
        self.tier.on_request_finished(context)
        return result

    def look_up(self, context: Any, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether the tier has it, after as many steps as it takes."""
        from vllm.v1.kv_offload.base import LookupResult

        found: list[Any] = []

        def is_answered() -> bool:
            found[:] = [self.tier.lookup(key, context) for key in keys]
            return LookupResult.RETRY not in found

        self.wait(is_answered)
        assert set(found) <= {LookupResult.HIT, LookupResult.MISS}
        return [result is LookupResult.HIT for result in found]

    def load(self, name: str, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it was loaded, as a request would that tries until nothing more is found."""
        context, loaded = self.request(name), dict.fromkeys(keys, False)
        for _ in range(MAX_STEPS):
            left = [key for key in keys if not loaded[key]]
            wanted = [key for key, is_there in zip(left, self.look_up(context, left), strict=True) if is_there]
            if not wanted:
                break
            flags, _ = self.finish(self.submit(wanted, context, is_load=True))
            loaded |= dict(zip(wanted, flags, strict=True))
        else:
            raise AssertionError("a request tried for ever")
        self.tier.on_request_finished(context)
        return [loaded[key] for key in keys]

    def reset(self) -> None:
        """Reset the caches, as vLLM does when it was told that weights have changed."""
        self.tier.drain_jobs()
        self.step()
        assert not self.jobs

    def close(self) -> None:
        """Shut the tier down. vLLM frees its memory then: nothing may refer to the view any more."""
        self.tier.shutdown()
        self.view.release()


def held(monkeypatch: Any, tiering: Tiering, name: str) -> tuple[threading.Event, threading.Event]:
    """Hold a call of the store's tiers back. Return what says that it began, and what lets it go on."""
    began, goes_on = threading.Event(), threading.Event()
    call = getattr(stack_of(store_of(tiering.tier)), name)

    def hold(*args: Any, **kwargs: Any) -> Any:
        began.set()
        assert goes_on.wait(60)
        return call(*args, **kwargs)

    monkeypatch.setattr(stack_of(store_of(tiering.tier)), name, hold)
    return began, goes_on
