"""An engine on a CPU that asks for the kernels of a GPU: they are noted or compiled, and none is launched.

Attention gives zeros, and the likeliest tokens are chosen. Blending's rows are mixed and compared on the CPU, too.
"""

from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import triton

from kvpage import ops
from kvpage.benchmarks.fake_device import FakeDevice, fake_device
from kvpage.kernels import attention_launch, sampling_launch
from kvpage.kernels.rehearsal import key_of, rehearsal
from kvpage.ops.cuda import blend as cuda_blend
from kvpage.ops.cuda import error_reports
from kvpage.ops.cuda import sampling as cuda_sampling
from kvpage.serving import Engine
from kvpage.serving.loop.graphs import warmup
from kvpage.serving.sampling import sampler

Keys = set[Hashable]


def attend_nothing(query, out, *rest):
    _paged_attention(query, out, *rest)
    out.zero_()


def choose_likeliest(logits, records, positions, out, *memory):
    _sample_rows(logits, records, positions, out, *memory)
    out.copy_(logits.argmax(dim=-1))


def mix_rows(rows, out, rotation=None, fresh=None, fresh_rows=None, slots=None, out_slots=None):
    arguments = rows, out, rotation, fresh, fresh_rows, slots, out_slots
    cuda_blend.mix_rows(*arguments)
    _mix_rows(*arguments)


def row_deviation(fresh, retrieved, valid):
    cuda_blend.row_deviation(fresh, retrieved, valid)
    return _row_deviation(fresh, retrieved, valid)


_mix_rows, _row_deviation = ops.mix_rows, ops.row_deviation
_paged_attention, _sample_rows = attention_launch.paged_attention, sampling_launch.sample_rows


@contextmanager
def kernels_asked() -> Iterator[FakeDevice]:
    """Inside, engines of `on_kernels` ask for kernels. Yield the device that is to launch them."""
    with fake_device() as device, ExitStack() as stack:
        for place, name, value in (
            (attention_launch, "paged_attention", attend_nothing),
            (sampling_launch, "sample_rows", choose_likeliest),
            (sampler, "can_sample", lambda logits: False),
            (ops, "mix_rows", mix_rows),
            (ops, "row_deviation", row_deviation),
            (ops, "can_sample_rows", lambda logits: True),
            (cuda_sampling, "runs_on_host", lambda logits: False),
            (error_reports, "find_error_word", lambda device: None),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        yield device


def on_kernels(engine: Engine) -> Engine:
    """Let the engine's blocks count as those of a GPU."""
    for cache in (engine.cache, *engine.window_caches):
        for layer in cache.bound_layers.values():
            layer.is_cuda, layer.host_forms = True, {}
    return engine


def compiled_by_warmup(engine: Engine) -> Keys:
    """Warm the engine up; return the keys of what it compiles. Its steps must ask for nothing else."""
    found: Keys = set()

    def compile_all(kernels, device: torch.device, progress) -> None:
        found.update(map(key_of, kernels))

    with mock.patch.object(warmup, "compile_all", compile_all):
        asked = keys_asked_by(lambda: engine.warmup(lambda num: None))
    assert asked <= found
    return found


def keys_asked_by(work) -> Keys:
    """Do the work; return the keys of all that would be compiled."""
    with rehearsal() as variants:
        work()
    return set(variants)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Yield names of kernels. Triton adds one whenever it compiles, or reads from its cache, inside."""
    names: list[str] = []

    def note(*, metadata, **_) -> None:
        names.append(metadata["name"])

    with mock.patch.object(triton.knobs.compilation, "listener", note):
        yield names
