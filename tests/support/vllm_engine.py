"""Lives of a real vLLM engine on a CPU, each in a process of its own.

stdin: a path a line, such as life-1 ─► a child: it reads life-1.json, writes life-1.answer, and prints into life-1.log
stdout: its exit status. vLLM is imported once, before the first child: that takes longer than a life.

settings: model, llm (arguments of vLLM's LLM), tier (one entry of secondary_tiers, or null), host_bytes, offloading
          (more keys beside secondary_tiers), and waves:
          lists of requests that are added at once, [tokens, max_tokens, steps after which it is aborted or null];
          or {"signal": [process, number]}, {"remove": folder}, {"forget": true}: the device's cached blocks
answer:   for each request its tokens, cached tokens and seconds to the first token; the tier's metrics
"""

import json
import os
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

PLUGIN = {"spec_name": "CpuTieringSpec", "spec_module_path": "kvpage.integrations.vllm"}


def engine_id() -> str:
    """Return the name under which vLLM's shared memory is found."""
    return f"kvpage-test-{os.getpid()}"


def make_llm(settings: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    given: dict[str, Any] = {
        "model": settings["model"], "skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32",
        "max_model_len": 2048, "max_num_seqs": 16, "enable_prefix_caching": True, "seed": 0,
        "disable_log_stats": False,
    }  # fmt: skip
    if settings.get("tier"):
        extra = {**PLUGIN, "cpu_bytes_to_use": settings.get("host_bytes", 64 << 20), **settings.get("offloading", {})}
        extra["secondary_tiers"] = [settings["tier"]]
        given["kv_transfer_config"] = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
            engine_id=engine_id(),
        )
    return LLM(**{**given, **settings.get("llm", {})})


class Life:
    """An engine, and what came of its requests."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._llm = make_llm(settings)
        self.engine = self._llm.llm_engine
        self.num_requests, self.answers = 0, []

    def wave(self, requests: list[Any]) -> None:
        """Add requests, and step until all have ended."""
        from vllm import SamplingParams

        began, names, open_names = time.perf_counter(), {}, set()
        for tokens, max_tokens, abort_after in requests:
            name = str(self.num_requests)
            self.num_requests += 1
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
            self.engine.add_request(name, {"prompt_token_ids": tokens}, params)
            names[name] = {"tokens": [], "cached": None, "seconds": None, "abort_after": abort_after}
            open_names.add(name)
        step = 0
        while open_names:
            outputs = self.engine.step()
            if not outputs:
                time.sleep(0.001)  # as a server's loop does: threads of the tiers get their turn
            for output in outputs:
                answer = names[output.request_id]
                answer["tokens"] = list(output.outputs[0].token_ids)
                answer["cached"] = output.num_cached_tokens
                if answer["seconds"] is None and answer["tokens"]:
                    answer["seconds"] = time.perf_counter() - began
                if output.finished:
                    open_names.discard(output.request_id)
            step += 1
            aborted = [name for name in open_names if names[name]["abort_after"] == step]
            if aborted:
                self.engine.abort_request(aborted)
                open_names -= set(aborted)
        self.answers += names.values()

    def event(self, event: dict[str, Any]) -> None:
        """Let something happen between two waves."""
        if "signal" in event:
            os.kill(*event["signal"])
        if "remove" in event:
            shutil.rmtree(event["remove"])
        if "forget" in event:
            assert self.engine.reset_prefix_cache()

    def idle(self) -> None:
        """Step until what waits to be stored is stored, as a server's loop does."""
        core = getattr(self.engine.engine_core, "engine_core", None)
        while core is not None and core.scheduler.has_requests():
            self.engine.step()
            time.sleep(0.001)

    def metrics(self) -> dict[str, float]:
        found = {}
        for metric in self._llm.get_metrics():
            if any(word in metric.name for word in ("kvpage", "preempt", "kv_offload_tiering")) and hasattr(
                metric, "value"
            ):
                labels = [value for name, value in sorted(metric.labels.items()) if name in ("place", "tier")]
                found["|".join([metric.name, *labels])] = metric.value
        return found


def run(begin: Path) -> None:
    """Live once."""
    settings = json.loads(begin.with_suffix(".json").read_text())
    life = Life(settings)
    for wave in settings["waves"]:
        if isinstance(wave, dict):
            life.event(wave)
        else:
            life.wave(wave)
            life.idle()
    answer = {"answers": life.answers, "metrics": life.metrics()}
    life.engine.engine_core.shutdown()
    answer["left_behind"] = [name for name in os.listdir("/dev/shm") if engine_id() in name]
    begin.with_suffix(".answer").write_text(json.dumps(answer))


def child(begin: Path) -> int:
    """Live once in a child; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    log = os.open(begin.with_suffix(".log"), os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        run(begin)
        status = 0
    except BaseException:  # the border of the process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    import vllm.v1.engine.core  # noqa: F401
    from vllm import LLM, SamplingParams  # noqa: F401
    from vllm.model_executor.models import gemma3, llama  # noqa: F401
    from vllm.v1.worker import cpu_worker  # noqa: F401

    import kvpage.store  # noqa: F401

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        pid = child(Path(line.strip()))
        answers.write(f"{pid}\n")
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")


if __name__ == "__main__":
    main()
