"""UpdatableEngine: the calls of an engine about its weights: versions and adapters."""

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from kvpage.serving.assembly.weight_updates import Change, Running, WeightUpdates
from kvpage.serving.config import EngineConfig
from kvpage.serving.loop.ranks.rank_caches import RankCaches
from kvpage.serving.loop.serving_loop import ServingLoop, step_on
from kvpage.serving.model.runner import ModelRunner
from kvpage.serving.weights.adapters.adapter import Adapter, check_adapter_name
from kvpage.serving.weights.adapters.adapter_file import read_adapter
from kvpage.serving.weights.engine_weights import EngineWeights
from kvpage.serving.weights.weight_files import read_weights


class UpdatedParts(Protocol):
    """The parts of an engine that these calls use; see EngineParts."""

    @property
    def config(self) -> EngineConfig:
        """The settings."""

    @property
    def runner(self) -> ModelRunner:
        """Computes with the model."""

    @property
    def caches(self) -> RankCaches:
        """The caches of all layers."""

    @property
    def loop(self) -> ServingLoop:
        """Steps."""

    @property
    def weights(self) -> EngineWeights:
        """The names of versions and adapters."""

    @property
    def updates(self) -> WeightUpdates:
        """Goes from one version to the next."""


class UpdatableEngine:
    """Calls for the engine's thread, between two steps."""

    _parts: UpdatedParts

    def update_weights(self, version: str, change: Change | None = None, *, running: Running = "restart") -> None:
        """Begin a version of the weights: K and V of others are found by nobody from now on.

        They stay cached, and in stores, under their own version: see `drop_version`. Going back to an older version
        finds them again. So no version names two sets of weights.

        Args:
            version: The name of the new weights.
            change: Changes the weights, between two steps. None says that they have changed already.
            running: What becomes of requests that have begun. "finish": they run to their ends on the weights that they
                have, and `change` is called then; no other request begins meanwhile. "restart": all of their K and V
                are computed again; their tokens stay. "stale": those that have tokens go on, with older K and V beside
                new ones, which no other request finds; others, and those that are preempted, are computed again.

        Raises:
            ValueError: The version is the current one, empty, too long or not UTF-8. Requests are to finish, but
                weights have changed already, or there is no `change`.
            RuntimeError: A step is under way, or there are live Branches. Another update waits for requests to finish,
                and so would this one; with "restart" and "stale" it takes the place of that.
            Exception: `change` has raised. The version is the same as before. Where weights have changed, the next step
                does what `EngineConfig.changed_weights` says.
        """
        future = self.begin_update(version, change, running)
        try:
            step_on(self._parts.loop, future)
            future.result()
        finally:
            future.cancel()  # where a step has raised: the weights must not change after this call

    def begin_update(self, version: str, change: Change | None, running: Running) -> "Future[None]":
        """Do the same, but leave the steps in which requests finish to the caller.

        Args:
            version: See `update_weights`.
            change: See `update_weights`.
            running: See `update_weights`.

        Returns:
            A future, done once the version has begun, with what `change` has raised. While requests finish, any thread
            may cancel it: the version never begins then.

        Raises:
            ValueError, RuntimeError: As `update_weights`.
        """
        return self._parts.updates.begin(version, change, running)

    def read_weights(self, folder: "str | os.PathLike[str]") -> Change:
        """Read other weights of the model, as transformers saves them. Any thread may call it at any time.

        Args:
            folder: With `*.safetensors` files.

        Returns:
            A function for `change` of `update_weights`, which copies them into the model's own.

        Raises:
            ValueError: The files are not all of this model's weights, with the name of one.
            OSError: A file cannot be read.
        """
        return read_weights(self._parts.runner.model, Path(folder))

    def drop_version(self, version: str, *, records: bool = False) -> int:
        """Forget the cached blocks of a version, in both tiers, that are neither in use nor pinned.

        Args:
            version: Another than the current one; "" for the weights that the model came with.
            records: Remove the model's records of it from the store, too.

        Returns:
            How many blocks of the device are free for it.

        Raises:
            ValueError: The version is the current one, or `records` is asked for without a KVStore.
            RuntimeError: A step is under way.
        """
        return self._parts.updates.drop(version, records)

    @property
    def weights_version(self) -> str:
        """The current version of the weights; "" for those that the model came with. Any thread may ask."""
        return self._parts.weights.version

    def kv_namespace(self, namespace: bytes = b"", adapter: str | None = None) -> bytes:
        """Return the namespace under which K and V of now are cached: of weights, adapter and caller.

        Args:
            namespace: The caller's.
            adapter: The name of an adapter; None for the base model.

        Returns:
            The whole namespace, as BlockManager, stores and events have it. The caller's own while nothing has a name.

        Raises:
            ValueError: No such adapter is loaded, or the caller's is too long.
        """
        weights = self._parts.weights
        return weights.namespace(namespace, weights.adapter(adapter))

    def load_adapter(self, name: str, folder: "str | os.PathLike[str]") -> None:
        """Load a LoRA that peft has saved. Requests name it by `SamplingParams.adapter`, any number of them in a step.

        Its bytes are a part of the namespace of what it computes. One that leaves all K and V as they are shares them
        with the base model.

        Args:
            name: A name that is not loaded: 1 to 256 printable characters without slashes, and no blank at an end.
            folder: With `adapter_config.json` and `adapter_model.safetensors`.

        Raises:
            ValueError: The adapter is not served, or not on this engine, with the reason. The name is another.
            TypeError: The name is no str.
            OSError: A file cannot be read.
            RuntimeError: A step is under way.
        """
        self._parts.loop.check_between_steps("load_adapter")
        check_adapter_name(name)
        self._check_adaptable()
        adapter = read_adapter(name, Path(folder), self._parts.runner.model)
        self._parts.weights.check_new(name)
        self._parts.runner.use_adapters([*self._parts.weights.adapters(), adapter])
        self._parts.weights.add_adapter(adapter)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Its K and V stay cached, and serve one with the same bytes.

        Args:
            name: Of an adapter that is loaded.

        Raises:
            ValueError: It is not loaded, or an unfinished request has it.
            RuntimeError: A step is under way.
        """
        parts = self._parts
        parts.loop.check_between_steps("unload_adapter")
        adapter = parts.weights.adapter(name)
        if any(request.params.adapter == name for request in parts.loop.requests.values()):
            raise ValueError(f"adapter must not be in use, {name!r} is")
        others: list[Adapter] = [other for other in parts.weights.adapters() if other is not adapter]
        parts.runner.use_adapters(others)
        parts.weights.remove_adapter(name)

    def _check_adaptable(self) -> None:
        config, parts = self._parts.config, self._parts
        for option, is_refused, rule in (
            ("same_bits", config.same_bits, "False"),
            ("compile_model", config.compile_model, "False"),
            ("blend", config.blend is not None, "None"),
            ("tensor_parallel_size", config.tensor_parallel_size > 1, "1"),
            ("backend", config.cache_config.backend == "mla", "another than 'mla'"),
        ):
            if is_refused:
                raise ValueError(f"{option} must be {rule} for an engine with adapters")
        if parts.caches.states is not None:
            raise ValueError(f"adapters are served on attention and MLPs, {type(parts.runner.model).__name__} has more")
