"""Gateway: the OpenAI API of the application, over replicas elsewhere."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import torch
from fastapi import FastAPI
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from kvpage.integrations.ray.settings import AppSettings
from kvpage.integrations.remote import GenerateCall, RemoteEngine, RemoteLoop, RemoteSettings, WorkerLost
from kvpage.server import ApiKey, ServerConfig, create_app
from kvpage.serving import AsyncEngine, AsyncEngineConfig, EngineStats
from kvpage.serving.loop.outputs import StepOutput

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)
STATS_PERIOD = 2.0  # seconds between two looks at the replicas' numbers


class ServeWorkers:
    """The replicas of a deployment as Workers. handle: of the deployment."""

    def __init__(self, handle: "DeploymentHandle[Any]") -> None:
        self._handle = handle.options(stream=True, method_name="generate")

    async def stream(self, call: GenerateCall) -> AsyncGenerator[list[StepOutput], None]:
        """Run a call on one of them; see Workers.stream.

        Args:
            call: The request.
        """
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        response: Any = self._handle.remote(call)
        try:
            async for outputs in response:
                yield outputs
        except (WorkerLost, ValueError, TypeError):  # the worker's own, which Ray passes on
            raise
        except (RayError, RayServeException) as error:
            raise WorkerLost(f"{type(error).__name__}: {str(error)[:200]}") from error
        finally:
            response.cancel()


class Gateway:
    """Serves the API, and gives each request to replicas. Serve makes it.

    Args:
        settings: The fields of AppSettings.
        decode: The replicas that give tokens.
        prefill: The replicas that compute prompts for them; None if there are none.
    """

    def __init__(
        self, settings: dict[str, Any], decode: "DeploymentHandle[Any]", prefill: "DeploymentHandle[Any] | None" = None
    ) -> None:
        self._settings = chosen = AppSettings(**settings)
        rules = RemoteSettings(chosen.max_tries, chosen.min_prefill_tokens)
        loop = RemoteLoop(ServeWorkers(decode), None if prefill is None else ServeWorkers(prefill), rules)
        self._tokenizer = AutoTokenizer.from_pretrained(chosen.model, trust_remote_code=False)
        self._engine = RemoteEngine(skeleton_of(chosen), chosen.engine_config("both"), loop, self._tokenizer)
        self._live = AsyncEngine(
            self._engine, AsyncEngineConfig(chosen.max_num_waiting, drain_timeout=chosen.drain_timeout)
        )
        self._handles = [decode] if prefill is None else [decode, prefill]
        self._watching = asyncio.ensure_future(self._watch())

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the API; Serve calls it."""
        keys = [ApiKey(self._settings.api_key)] if self._settings.api_key else []
        config = ServerConfig(
            served_model_names=(self._settings.name,),
            api_keys=keys,
            min_priority=self._settings.min_priority,
            max_retain_priority=self._settings.max_retain_priority,
        )
        return create_app(self._live, self._tokenizer, config)

    def check_health(self) -> None:
        """Raise the error that has ended the thread. Serve then starts another gateway."""
        if self._live.failure is not None:
            raise self._live.failure

    async def _watch(self) -> None:
        """Ask the replicas for their numbers, again and again."""
        while True:
            all_stats = [stats for handle in self._handles for stats in await _stats_of(handle)]
            self._engine.take_stats(all_stats)
            await asyncio.sleep(STATS_PERIOD)

    async def close(self) -> None:
        """End all requests and the thread."""
        self._watching.cancel()
        await asyncio.to_thread(self._live.close)

    async def __del__(self) -> None:
        """Close it; Serve awaits this."""
        if hasattr(self, "_watching"):
            await self.close()


async def _stats_of(handle: "DeploymentHandle[Any]") -> list[EngineStats]:
    """Return the numbers of all replicas that give them."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        answers = await handle.broadcast("stats").results_async(timeout_s=STATS_PERIOD, return_exceptions=True)
    except (TimeoutError, RayError, RayServeException) as error:
        logger.info("the numbers of replicas did not come: %s", error)
        return []
    return [answer for answer in answers if not isinstance(answer, BaseException)]


def skeleton_of(settings: AppSettings) -> Any:
    """Return the model without its weights, by which requests are checked."""
    classes: Any = AutoModelForCausalLM
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(settings.model, trust_remote_code=False)
        model = classes.from_config(config, trust_remote_code=False)
    try:
        model.generation_config = GenerationConfig.from_pretrained(settings.model)
    except OSError:  # the model has none of its own
        logger.info("%s has no generation config", settings.model)
    return model
