"""WeightWatch: notices weights that were changed in place, and nobody has said so.

    counter    torch counts the changes of a tensor in place: copy_, load_state_dict, most optimizers
    place      another tensor, or other memory below it: load_state_dict(assign=True), `.data = `, `.to(...)`
    hook       a step of any optimizer of torch's over these tensors; fused ones count nothing
    bytes      in host memory, a few of each tensor: writes around torch, as `parameter.data.add_(1)`

The first three are seen for sure. Of writes around torch those are seen that change one of the few bytes.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

SAMPLED = 4
"""Tensors that are looked at before each step, in turns."""
NUM_PROBED = 32
"""Elements of each tensor in host memory whose bytes are compared."""

ChangedWeights = Literal["error", "version"]
"""What an engine does about weights that have changed in place: it raises, or begins a new version."""
Place = dict[str, torch.Tensor | None]


class WeightsChanged(RuntimeError):
    """Weights have changed in place, and nobody has told the engine."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight as it was: where it stands, its tensor, counter and memory, and some of its bytes.

    counter: None for a tensor without one. address: None for a tensor that consists of several. probe: a view of some
        elements; None where none can be read. It owns nothing, and is read only while the tensor is at the address.
    """

    place: Place
    name: str
    path: str
    tensor: torch.Tensor
    counter: int | None
    address: int | None
    probe: npt.NDArray[Any] | None
    probed: bytes

    @classmethod
    def of(cls, place: Place, name: str, path: str) -> "Weight":
        """Return a weight as it is now."""
        tensor = place[name]
        assert tensor is not None, "it was found there"
        is_plain = not hasattr(tensor, "__tensor_flatten__") and not tensor.is_meta
        probe = _probe(tensor) if is_plain and tensor.device.type == "cpu" else None
        counter = None if tensor.is_inference() else tensor._version
        address = tensor.data_ptr() if is_plain else None
        return cls(place, name, path, tensor, counter, address, probe, b"" if probe is None else probe.tobytes())

    def has_changed(self) -> bool:
        """Return whether it is another tensor, in other memory, or has changed."""
        tensor = self.place.get(self.name)
        if tensor is not self.tensor or (self.counter is not None and self.counter != tensor._version):
            return True
        address = None if self.address is None else tensor.data_ptr()
        if address != self.address:  # 0: the memory was taken away, and a step that needs it fails by itself
            return address not in (0, getattr(tensor, "joined_at", None))
        return self.probe is not None and self.probe.tobytes() != self.probed


class WeightWatch:
    """The weights of one model, saved buffers included, as they were when `accept` was called. For one thread."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stepped = _Steps()
        handle = register_optimizer_step_post_hook(_hook(weakref.ref(self._stepped)))
        weakref.finalize(self, handle.remove)
        self.accept()

    def accept(self) -> None:
        """Take the weights as they are now."""
        self._weights = [Weight.of(*location) for location in _places(self._model)]
        self._counted = [weight.tensor for weight in self._weights if weight.counter is not None]
        self._counters = list(map(_COUNTER, self._counted))
        self._stepped.watch(self._weights)
        self._next = 0

    @property
    def num_weights(self) -> int:
        """Tensors that are watched."""
        return len(self._weights)

    def changed(self) -> str | None:
        """Return the path of a weight that has changed: one that an optimizer has stepped, or one of the next few."""
        if self._stepped.path is not None:
            return self._stepped.path
        begin, weights = self._next, self._weights
        self._next = begin + SAMPLED if begin + SAMPLED < len(weights) else 0
        for weight in weights[begin : begin + SAMPLED]:
            if weight.has_changed():
                return weight.path
        return None

    def any_changed(self) -> str | None:
        """Do the same, and compare the counters of all."""
        if list(map(_COUNTER, self._counted)) != self._counters:
            return next(weight.path for weight in self._weights if weight.has_changed())
        return self.changed()

    def all_changed(self) -> str | None:
        """Return the path of the first weight that has changed, was added or is gone, by all that is looked at."""
        places, paths = _places(self._model), {weight.path for weight in self._weights}
        news = next((path for _, _, path in places if path not in paths), None)
        return news or self._stepped.path or next((w.path for w in self._weights if w.has_changed()), None)


class _Steps:
    """Whether an optimizer has stepped a weight. path: of one that was; None for none."""

    def __init__(self) -> None:
        self.path: str | None = None
        self._paths: dict[int, str] = {}

    def watch(self, weights: list[Weight]) -> None:
        """Forget the steps so far."""
        self.path, self._paths = None, {id(weight.tensor): weight.path for weight in weights}

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._paths and parameter.grad is not None:
                    self.path = self._paths[id(parameter)]
                    return


_COUNTER = attrgetter("_version")


def _hook(steps: "weakref.ref[_Steps]") -> Callable[..., None]:
    def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        noting = steps()
        if noting is not None:
            noting.note(optimizer)

    return note


def _places(model: nn.Module) -> list[tuple[Place, str, str]]:
    return [location for prefix, module in model.named_modules() for location in _places_of(prefix, module)]


def _places_of(prefix: str, module: nn.Module) -> Iterator[tuple[Place, str, str]]:
    """Yield the parameters of a module itself, and the buffers that its state has."""
    start = f"{prefix}." if prefix else ""
    tensors_by_kind: tuple[Place, Place] = module._parameters, module._buffers  # type: ignore[assignment]
    for tensors in tensors_by_kind:
        for name, tensor in tensors.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield tensors, name, start + name


def _probe(tensor: torch.Tensor) -> npt.NDArray[Any] | None:
    """Return a view of elements that are far from each other, as bytes of their size; None of a tensor without any."""
    if not tensor.numel() or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    integer = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}.get(tensor.element_size())
    if integer is None or tensor.is_neg() or tensor.is_conj():
        return None
    # Not `tensor.numpy()`, after which its memory cannot be resized any more, as it is by those who shard weights.
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    flat: npt.NDArray[Any] = np.frombuffer(memoryview(memory), integer)
    step = max(len(flat) // NUM_PROBED, 1) | 1  # odd: not always the same column
    return flat[::step][:NUM_PROBED]
