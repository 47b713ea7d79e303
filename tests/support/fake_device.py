"""FakeDevice: tensors in host memory that say that they are on a CUDA device, and a count of all that is done to them.

launches    operations on them
uploads     copies from pinned memory that nothing waits for; fetches: those to it
waits       the names of operations that wait for a device: item, tolist, bool, pageable copies, shapes that follow
            from values
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.cpu_graphs import CpuCapturer, CpuReplay
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from kvpage.serving import Engine
from kvpage.serving.loop.batch.device_decoder import DeviceDecoder
from kvpage.serving.loop.graphs.capture import Replay
from kvpage.serving.model import attention, step

CUDA = torch.device("cuda", 0)
READS = ("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "__bool__")
READS += ("__int__", "__float__", "__index__", "__array__", "__contains__", "repeat_interleave")
FREE = ("view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "expand", "detach", "unbind", "flatten", "t")
FREE += (
    "size",
    "stride",
    "dim",
    "data_ptr",
    "element_size",
    "numel",
    "is_contiguous",
    "contiguous",
    "__len__",
    "chunk",
)
FREE += ("__get__", "__set__", "requires_grad_", "split", "is_floating_point", "untyped_storage", "is_neg", "new_empty")


class OnDevice(torch.Tensor):
    """A tensor that says so. Outside of a FakeDevice it is like any other."""


class FakeDevice(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._pinned: set[int] = set()
        self._is_paused = False
        self.clear()

    def clear(self) -> None:
        self.num_launches = self.num_uploads = self.num_fetches = self.num_events_waited = 0
        self.waits: list[str] = []

    @contextlib.contextmanager
    def one_launch(self) -> Iterator[None]:
        """Inside, operations are those of a captured graph."""
        self.num_launches += 1
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", str(func))
        tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
        is_on_device = any(isinstance(one, OnDevice) for one in tensors)
        for getter, value in ((torch.Tensor.device, CUDA), (torch.Tensor.is_cuda, True), (torch.Tensor.is_cpu, False)):
            if is_on_device and func == getter.__get__:
                return value
        if name in ("to", "copy_", "pin_memory"):
            return getattr(self, f"_{name.strip('_')}")(*args, **kwargs)
        if not is_on_device:
            return self._make(func, name, args, kwargs)
        self._count(name, args, tensors)
        return on_device(func(*stripped(args), **stripped(kwargs)))

    def _count(self, name: str, args: Any, tensors: list[torch.Tensor]) -> None:
        has_number = name == "repeat_interleave" and isinstance(args[1], int)  # the shape follows from it
        if name in READS and not has_number:
            self._wait(name)
        if name == "where" and len(tensors) < 3:
            self._wait("where with a number of the host")  # which it copies
        if name in ("__getitem__", "__setitem__") and _is_index_of_values(args[1]):
            self._wait(f"{name} with indices of the host, or a mask")
        elif any(not isinstance(one, OnDevice) and one.dim() for one in tensors):
            raise AssertionError(f"{name} must have all tensors on one device")
        if name not in (*FREE, "__getitem__") and not self._is_paused:  # a slice is a view
            self.num_launches += 1

    def _wait(self, name: str) -> None:
        assert not self._is_paused, f"{name} waits in a captured graph"
        self.waits.append(name)

    def _make(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A function of the host, or one that makes a tensor."""
        device, is_pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
        is_there = device is not None and torch.device(device).type == "cuda"
        if is_there:
            kwargs["device"] = "cpu"
            if name in ("tensor", "as_tensor"):
                self._wait(f"{name} of numbers of the host")
            self.num_launches += not self._is_paused
        made = func(*args, **kwargs)
        if is_pinned:
            self._pinned.add(made.untyped_storage().data_ptr())
        return on_device(made) if is_there else made

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        self._pinned.add(copy.untyped_storage().data_ptr())
        return copy

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if args and isinstance(args[0], OnDevice):
            device = CUDA
        source = stripped(tensor)
        moved = source.to(dtype) if dtype is not None else source
        was_there, is_there = isinstance(tensor, OnDevice), isinstance(tensor, OnDevice)
        if device is not None:
            is_there = device.type == "cuda"
        self._moved(was_there, is_there, non_blocking and (was_there or self._is_pinned(source)))
        moved = moved.clone() if was_there != is_there else moved
        return on_device(moved) if is_there else moved

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        there, was_there = isinstance(target, OnDevice), isinstance(source, OnDevice)
        pinned = self._is_pinned(stripped(target if was_there else source))
        self._moved(was_there, there, non_blocking and pinned)
        stripped(target).copy_(stripped(source))
        return target

    def _moved(self, was_there: bool, is_there: bool, is_free: bool) -> None:
        if was_there == is_there:
            self.num_launches += was_there and not self._is_paused
        elif not is_free:
            self._wait("a copy that is not from or to pinned memory")
        elif is_there:
            self.num_uploads += 1
        else:
            self.num_fetches += 1


class Capturer(CpuCapturer):
    """Its replays are one launch each."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def capture(self, work: Callable[[], None], beside: Replay | None) -> CpuReplay:
        def one_launch() -> None:
            with self._device.one_launch():
                work()

        return super().capture(one_launch, beside)


def on_device(value: Any) -> Any:
    return tree_map(lambda one: one.as_subclass(OnDevice) if isinstance(one, torch.Tensor) else one, value)


def stripped(value: Any) -> Any:
    return tree_map(lambda one: one.as_subclass(torch.Tensor) if isinstance(one, OnDevice) else one, value)


def _is_index_of_values(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(part, list)
        or (isinstance(part, torch.Tensor) and (part.dtype == torch.bool or not isinstance(part, OnDevice)))
        for part in parts
    )


def move(engine: Engine, device: FakeDevice, patch: pytest.MonkeyPatch, runs_ahead: bool) -> None:
    """Let an engine on a CPU take itself for one on the device. Attention is left out: it returns its queries."""

    class Event:
        def record(self, stream: object) -> None:
            pass

        def synchronize(self) -> None:
            device.num_events_waited += 1

    for module in engine.debug.runner.model.modules():
        for part in (module._parameters, module._buffers):
            part.update((name, on_device(tensor.detach())) for name, tensor in part.items() if tensor is not None)
    for module in engine.debug.runner.view.modules():  # tables of their own
        module._buffers.update((name, on_device(tensor)) for name, tensor in module._buffers.items())
    engine.debug.accept_weights()
    for blocks in (engine.cache, *engine.window_caches):
        for cache in blocks.bound_caches:
            cache.is_cuda, cache.device = True, CUDA
        patch.setattr(blocks, "device", CUDA)
    if engine.states is not None:
        engine.states.slots = on_device(engine.states.slots)
        engine.states.views = {key: on_device(view) for key, view in engine.states.views.items()}
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "current_stream", lambda device: None)
    patch.setattr(step, "attends_in_place", lambda device: True)
    patch.setattr(attention.ops, "write_and_attend", lambda query, *args: query.transpose(1, 2))
    engine.loop.use_decoder(DeviceDecoder(engine.debug.batch_runner, engine.scheduler, runs_ahead))
