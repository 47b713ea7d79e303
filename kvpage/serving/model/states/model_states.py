"""ModelStates: the groups of a model's cache and the modules that keep its states, found by computing two tokens.

The config does not say it all: a layer may have attention and a state, several states, or none. States may be of
another dtype than the model.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from kvpage.checks.errors import OptionError
from kvpage.layout.config import ModelConfig
from kvpage.layout.groups import CacheGroup, GroupKind, StateLayout, StatePart
from kvpage.serving.model.hf_cache.argument import CACHE_ARGUMENTS, checked_cache_argument
from kvpage.serving.model.hf_cache.seen_cache import SeenCache, SeenState
from kvpage.serving.model.kv_shape import KVShape
from kvpage.serving.model.states.continuation import Continuation
from kvpage.serving.model.states.fixed.scan_names import scan_names
from kvpage.serving.model.states.held_states import held_states, without_own_states
from kvpage.serving.model.states.mixer import StateMixer, limits_of
from kvpage.serving.model.states.scan_step import Shapes, steps_apart, takes_several
from kvpage.serving.model.window_check import cache_windows

IS_EARLY = Version(transformers.__version__) < Version("5.15")
"""Whether mixers may take any tokens after a state for one."""
FIRST_VERSION = "5.5"
"""Of transformers, whose models with states an Engine serves. Earlier ones keep them in caches of the models' own."""


@dataclass(frozen=True, slots=True)
class ModelStates:
    """The states that one model keeps for each sequence, beside K and V or alone.

    groups: of all layers. layout: of a state slot. mixers: the modules that read and write states.
    kv_shape: of the layers with attention; None where none has. model_config: of the blocks of those layers.
    """

    groups: tuple[CacheGroup, ...]
    layout: StateLayout
    mixers: tuple[StateMixer, ...]
    kv_shape: KVShape | None
    model_config: ModelConfig

    @property
    def shares_answers(self) -> bool:
        """Whether tokens that were generated leave what the same tokens of a prompt would; see scan_step."""
        return not any(mixer.steps_apart for mixer in self.mixers)

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> "ModelStates":
        """Compute two tokens. Raises ValueError, with the reason, for states that do not fit into slots."""
        parts_of_mixers = held_states(model)
        seen = _computed(model, use_cache=not parts_of_mixers)
        name = type(model).__name__
        if not seen.states and not parts_of_mixers:
            raise ValueError(f"states must be written into the cache, {name} writes none there")
        parts = [*_parts(name, seen.states), *(part for parts in parts_of_mixers.values() for part in parts)]
        groups = (*_attention_groups(model, seen), _state_group(parts))
        layout = StateLayout.of_groups(groups)
        assert layout is not None
        kv_shape = KVShape.of_rows(model, seen.rows) if seen.rows else None
        mixers = _tried(model, _mixers(seen.states), {part.key: part.shape for part in parts})
        model_config = _model_config(model, kv_shape, len(seen.layers))
        return cls(groups, layout, (*mixers, *parts_of_mixers), kv_shape, model_config)

    def with_fixed_scans(self, name: str) -> "ModelStates":
        """Return the same, whose mixers compute token by token in prompts, too. name: of the model.

        OptionError for mixers that compute one token by a rule of its own, and for states that are rounded
        where a portion of a prompt ends.
        """
        fixed = tuple(replace(mixer, is_fixed=bool(scan_names(mixer.module))) for mixer in self.mixers)
        dtypes = {part.key: part.dtype for part in self.layout.parts}
        for mixer in fixed:
            kind = type(mixer.module).__name__
            if not mixer.is_fixed and (mixer.is_stepwise or mixer.steps_apart or mixer.holds):
                raise OptionError(f"same_bits must be False for {name}: {kind} computes one token by a rule of its own")
            rounded = [key for key in mixer.keys if key[1] == "recurrent" and dtypes[key] != torch.float32]
            if mixer.is_fixed and rounded:
                raise OptionError(f"same_bits must be False for {name}: {kind} keeps states in {dtypes[rounded[0]]}")
        known = (replace(m, is_stepwise=False, steps_apart=False) if m.is_fixed else m for m in fixed)
        return replace(self, mixers=tuple(known))


def are_states_served(first_version: str = FIRST_VERSION) -> bool:
    """Return whether this version of transformers keeps states as kvpage reads them. first_version: that does."""
    return Version(transformers.__version__) >= Version(first_version)


def keeps_states(config: PretrainedConfig) -> bool:
    """Return whether layers of transformers' cache for this config keep states.

    Raises ValueError if it does not know all layers.
    """
    decoder = config.get_text_config(decoder=True)
    try:
        layers = DynamicCache(config=decoder).layers
    except KeyError as error:
        raise ValueError(
            f"layers must be of types that transformers' cache has, {type(decoder).__name__} has {error} and "
            f"transformers is {transformers.__version__}"
        ) from error
    return any(hasattr(layer, "conv_states") and hasattr(layer, "recurrent_states") for layer in layers)


def check_states_are_cached(model: PreTrainedModel, first_version: str = FIRST_VERSION) -> None:
    """Raise ValueError for a model with states where transformers is too early, or keeps them elsewhere.

    first_version: of transformers, that is not too early.
    """
    is_cached = keeps_states(model.config)
    if is_cached and not are_states_served(first_version):
        raise ValueError(
            f"transformers must be {first_version} or later for {type(model).__name__}, whose layers keep states, got "
            f"{transformers.__version__}"
        )
    if getattr(model, "_is_stateful", False) and not is_cached:
        raise ValueError(
            f"states must be in layers of transformers' cache, those of {type(model).__name__} are elsewhere in "
            f"transformers {transformers.__version__}; from version {first_version} on they are there in most models"
        )


def _model_config(model: PreTrainedModel, kv_shape: KVShape | None, num_layers: int) -> ModelConfig:
    """Return a config with the model's layers, of which those with attention have blocks."""
    attends = () if kv_shape is None else kv_shape.layer_ids
    layer_types = tuple("full_attention" if layer in attends else "linear_attention" for layer in range(num_layers))
    if kv_shape is None:
        return ModelConfig(0, 0, layer_types, model.dtype)
    if kv_shape.is_latent:  # its attention gets heads, which it makes of the latents
        return replace(ModelConfig.from_hf(model.config, model.dtype), layer_types=layer_types)
    shapes = dict(zip(kv_shape.layer_ids, kv_shape.layer_shapes, strict=True))
    return ModelConfig.of_shapes([shapes.get(layer) for layer in range(num_layers)], layer_types, model.dtype)


def _computed(model: PreTrainedModel, use_cache: bool) -> SeenCache:
    seen, argument = SeenCache(model.config), checked_cache_argument(model, CACHE_ARGUMENTS)
    model = without_own_states(model)
    tokens = torch.ones(1, 2, dtype=torch.long, device=model.device)
    try:
        with torch.no_grad():
            model(input_ids=tokens, use_cache=use_cache, **{argument: seen})
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, RuntimeError, ValueError) as error:  # it reads a cache of its own, or asks for one
        raise ValueError(f"model must take a cache of kvpage's, {type(model).__name__} says: {error}") from error
    return seen


def _attention_groups(model: PreTrainedModel, seen: SeenCache) -> list[CacheGroup]:
    """Return a group for each window, and one for attention over everything."""
    windows = cache_windows(model)
    layers: dict[int | None, list[int]] = {}
    for layer in sorted({layer for layer, _, _ in seen.rows}):
        layers.setdefault(windows.get(layer), []).append(layer)
    return [
        CacheGroup(GroupKind.FULL if window is None else GroupKind.WINDOW, tuple(layers[window]), window)
        for window in sorted(layers, key=lambda window: window or 0)
    ]


def _parts(name: str, states: list[SeenState]) -> list[StatePart]:
    for seen in states:
        if seen.state.shape[0] != 1:
            raise ValueError(f"states must have one row a sequence, those of {name} are {list(seen.state.shape)}")
    keys = [seen.key for seen in states]
    if len(set(keys)) < len(keys):
        raise ValueError(f"each state must be written once in a forward pass, {name} writes some again")
    return [StatePart(*seen.key, tuple(seen.state.shape[1:]), seen.state.dtype) for seen in states]


def _state_group(parts: list[StatePart]) -> CacheGroup:
    parts.sort(key=lambda part: part.key)
    return CacheGroup(GroupKind.STATE, tuple(sorted({part.layer_id for part in parts})), None, tuple(parts))


def _mixers(states: list[SeenState]) -> tuple[StateMixer, ...]:
    by_module: dict[nn.Module, list[SeenState]] = {}
    for seen in states:
        by_module.setdefault(seen.module, []).append(seen)
    return tuple(_mixer(module, states_of_module) for module, states_of_module in by_module.items())


def _tried(model: PreTrainedModel, mixers: tuple[StateMixer, ...], shapes: Shapes) -> tuple[StateMixer, ...]:
    """Return the mixers, with how those of each kind compute tokens after a state. The model computes a few tokens."""
    firsts: dict[Hashable, StateMixer] = {}
    for mixer in mixers:
        firsts.setdefault(_kind(mixer), mixer)
    argument = checked_cache_argument(model, CACHE_ARGUMENTS)
    if IS_EARLY:
        goes_on = {kind: takes_several(model, argument, first, shapes) for kind, first in firsts.items()}
    else:
        trial = Continuation(model, argument) if firsts else None
        goes_on = {kind: bool(trial and trial.goes_on(first)) for kind, first in firsts.items()}
    apart = {kind: steps_apart(model, argument, first, shapes) for kind, first in firsts.items()}
    return tuple(
        replace(mixer, is_stepwise=not goes_on[_kind(mixer)], steps_apart=apart[_kind(mixer)]) for mixer in mixers
    )


def _kind(mixer: StateMixer) -> Hashable:
    """Return what mixers have in common that compute alike."""
    return type(mixer.module), limits_of(mixer.module)


def _mixer(module: nn.Module, states: list[SeenState]) -> StateMixer:
    first = states[0]
    return StateMixer(module, first.cache_name, first.cache_place, frozenset(seen.key for seen in states))
