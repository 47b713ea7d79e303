"""Public modules name what is public; it exists, says what it does, and names only classes that are public too."""

import importlib
import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = "\n\n".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
MODULES = [
    "kvpage",
    "kvpage.layout.backends",
    "kvpage.blend",
    "kvpage.observe.events",
    "kvpage.integrations.lmcache",
    "kvpage.integrations.mini_sglang",
    "kvpage.integrations.prometheus",
    "kvpage.integrations.routing",
    "kvpage.integrations.sglang",
    "kvpage.blocks.namespaces",
    "kvpage.ops",
    "kvpage.server",
    "kvpage.tools.replay",
    "kvpage.serving",
    "kvpage.serving.stats",
    "kvpage.serving.loop.store_connector",
    "kvpage.extras.slots",
    "kvpage.store",
    "kvpage.store.tiers.tier",
    "kvpage.observe.telemetry",
    "kvpage.extras.token_trie",
    "kvpage.integrations.vllm_ops",
]
EXTRAS = {
    "kvpage.integrations.prometheus": "prometheus_client",
    "kvpage.serving": "transformers",
    "kvpage.server": "fastapi",
}
CLASS_METHODS = ("__init__", "__enter__", "__call__", "__getitem__", "__setitem__", "__iter__")
PRIVATE = {
    "kvpage.store.load.block_chunks.BlockChunks": "of a KVStore, which stores them through its LayerChunks",
    "kvpage.store.load.block_load.BlockLoad": "of a KVStore, which begins it through its LayerChunks",
    "kvpage.store.records.kinds.RecordKinds": "of a KVStore, which stores through its LayerChunks",
    "kvpage.store.records.record_io.ShapedSource": "of a KVStore, which stores through its LayerChunks",
    "kvpage.store.stack.tier_stack.TierStack": "of a KVStore, which makes its LayerChunks and StateRecords",
    "kvpage.store.states.state_index.StateKeys": "of a KVStore, which makes its StateRecords",
    "kvpage.integrations.sglang.host_pages.HostPages": "of a PageStorage, which makes it of a pool",
    "kvpage.observe.tree_watch.TreeChanges": "told by an engine's telemetry to its listeners",
    "kvpage.ops.args.bound_cache.AttentionOfOthers": "a library, which Engine.from_model chooses",
    "kvpage.integrations.lmcache.retriever.SegmentFetch": "of a task, which a retriever makes",
    "kvpage.blend.selection.Stage": "of an executor, which asks the configuration for it",
    "kvpage.blend.spans.Span": "of the engine, which asks the configuration for it",
    "kvpage.serving.stats.explaining.Question": "of an engine, of which an AsyncEngine asks it",
    "kvpage.serving.generate.forward_inputs.Forward": "of a KVPageCache, which hands it to the runner of its pool",
    "kvpage.serving.generate.cached_rows.CachedRows": "made by a KVPageCachePool for its caches",
    "kvpage.serving.generate.model_blocks.ModelBlocks": "the part of a KVPageCachePool that its caches use",
    "kvpage.serving.stats.debug.EngineDebug": "the parts of an Engine, which tests look into",
    "kvpage.serving.live.mailbox.Mailbox": "made by AsyncEngine.submit",
    "kvpage.serving.live.live_request.Steps": "the side of an AsyncEngine that its requests use",
    "kvpage.serving.live.stepping.served_engine.ServedEngine": "the side of an Engine that an AsyncEngine uses",
    "kvpage.serving.loop.intake.Prompt": "the arguments of a request, made by AsyncEngine.submit",
    "kvpage.serving.loop.request.Request": "of the loop, made by AsyncEngine.submit",
    "kvpage.serving.loop.serving_loop.ServingLoop": "the side of an Engine that an AsyncEngine uses",
    "kvpage.serving.model.kv_shape.KVShape": "found by KVPageCachePool.from_model",
    "kvpage.serving.model.step.BatchItem": "of a step, which the engine makes",
    "kvpage.serving.steer.steerable.SteerableEngine": "the side of an Engine that Branches use",
    "kvpage.serving.sessions.session.SessionKeeper": "the side of Sessions that a Session uses",
    "kvpage.serving.sessions.session_blocks.SessionBlocks": "of Sessions, which make a Session",
    "kvpage.serving.sessions.sessions.Sessions": "of an Engine, whose `session` opens one",
    "kvpage.store.bytes.byte_jobs.ByteJobs": "of a ByteStore, which makes its Later",
    "kvpage.store.stack.call_gate.CallGate": "of a KVStore, which makes a LayerLoad",
    "kvpage.blocks.sequence_state.SequenceState": "a copy of what BlockManager knows, for those who restore it",
    "kvpage.serving.generate.states.row_states.RowPass": "of a forward, which a KVPageCache begins",
    "kvpage.serving.generate.states.row_states.RowStates": "the part of a KVPageCachePool that its caches use",
    "kvpage.serving.generate.states.pool_states.PoolStates": "made by KVPageCachePool.from_model",
    "kvpage.store.records.kinds.KnownDtype": "of a store, which a cache's dtype tells",
    "kvpage.serving.assembly.engine_parts.EngineParts": "made by Engine.from_model",
    "kvpage.serving.params.defaults.ParamDefaults": "of the model, read by Engine.from_model",
    "kvpage.cache.transfer.BlockPins": "of a CacheEngine, which makes a Transfer",
    "kvpage.cache.copiers.Copier": "of a CacheEngine, which makes LayeredMoves",
}


def load(name: str) -> types.ModuleType:
    needed = next((extra for prefix, extra in EXTRAS.items() if name.startswith(prefix)), "torch")
    pytest.importorskip(needed)
    return importlib.import_module(name)


def public() -> Iterator[tuple[str, object]]:
    for module_name in MODULES:
        module = load(module_name)
        for name in module.__all__:
            yield f"{module_name}.{name}", getattr(module, name)


@pytest.mark.parametrize("module_name", MODULES)
def test_public_names_exist_and_say_what_they_do(module_name):
    module = load(module_name)
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, type) or inspect.isroutine(value):
            written = value.__doc__ or ""
            assert written and not written.startswith(f"{name}("), f"{module_name}.{name} must have a docstring"


@pytest.mark.parametrize("module_name", MODULES)
def test_what_the_pages_name_is_public(module_name):
    """Names that a page imports from a module, and names in a paragraph on it that the module has."""
    module, named = load(module_name), set()
    for names in re.findall(rf"^ *from {re.escape(module_name)} import ([\w, ]+)", PAGES, re.MULTILINE):
        named |= {name.split(" as ")[0].strip() for name in names.split(",")}
    for paragraph in re.split(r"\n\n|\n(?=- )", PAGES):
        if re.match(rf"(?:- )?`{re.escape(module_name)}`", paragraph):
            named |= {name for name in re.findall(r"`(\w+)", paragraph) if hasattr(module, name)}
    assert {name for name in named if not _is_module(module_name, name)} <= set(module.__all__)


def _is_module(module_name: str, name: str) -> bool:
    return isinstance(getattr(load(module_name), name, None), types.ModuleType)


def classes_in(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        yield hint
    for part in typing.get_args(hint):
        for one in part if isinstance(part, (list, tuple)) else (part,):
            yield from classes_in(one)


def hints_of(annotated: object, known: dict[str, object]) -> dict[str, object]:
    try:
        return typing.get_type_hints(annotated)
    except NameError:  # a name that only type checkers import
        return typing.get_type_hints(annotated, localns=known)


def annotated_in(value: object) -> Iterator[object]:
    """A function, or a class with its fields and all methods that callers have."""
    if inspect.isfunction(value):
        yield inspect.unwrap(value)
    if not isinstance(value, type):
        return
    own = [kind for kind in value.__mro__ if kind.__module__.startswith("kvpage")]
    yield from own
    for name, member in ((name, member) for kind in own for name, member in vars(kind).items()):
        if name.startswith("_") and name not in CLASS_METHODS:
            continue
        member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(member):
            yield inspect.unwrap(member)


def named_classes() -> dict[type, str]:
    """Classes of kvpage's that annotations of public names name, with one of the places."""
    known: dict[str, object] = {name.rpartition(".")[2]: value for name, value in public()}
    known |= {"Self": typing.Any, "EventStream": typing.Any}
    found: dict[type, str] = {}
    for name, value in public():
        for annotated in annotated_in(value):
            for argument, hint in hints_of(annotated, known).items():
                if isinstance(annotated, type) and argument.startswith("_"):
                    continue
                for kind in classes_in(hint):
                    if kind.__module__.startswith("kvpage"):
                        found.setdefault(kind, f"{name}: {getattr(annotated, '__name__', '')}({argument})")
    return found


def test_classes_in_signatures_are_public():
    exported = {value for _, value in public() if isinstance(value, type)}
    missing = {f"{kind.__module__}.{kind.__name__}": where for kind, where in named_classes().items()
               if kind not in exported}  # fmt: skip
    assert {name: where for name, where in missing.items() if name not in PRIVATE} == {}
    assert set(PRIVATE) <= set(missing), "PRIVATE must name only classes that signatures name and nothing exports"
