"""Rules: the caches and the options of attention that each library takes, in one table.

    name            layouts            dtypes          head sizes       blocks of       options             GPUs
    flash_attn_3    flash, flashinfer  fp16, bf16      8, 16 ... 256    any size        window, softcap     9.0
    flashinfer      flash, flashinfer  and 8-bit       64, 128, 256     any size        window, softcap     from 8.0
    flash_attn      flash, flashinfer  fp16, bf16      8, 16 ... 256    256, 512 ...    window, softcap     from 8.0
    flash_mla       mla                fp16, bf16      512 + 64         64 tokens       none                9.0
    flashinfer      mla                fp16, bf16      512 + 64         any size        none                from 8.0

"auto" tries them in this order. The scale of the products is free everywhere. No library takes sinks, or positions of
queries within their sequences.
"""

from collections.abc import Container
from dataclasses import dataclass

import torch

from kvpage.layout.attention import Attention
from kvpage.layout.cache_layout import CacheLayout
from kvpage.layout.kv_scales import FP8_DTYPES
from kvpage.ops.args.bound_cache import BoundCache

OURS = "kvpage"
HALVES = (torch.float16, torch.bfloat16)
HEADS = ("flash", "flashinfer")
LATENTS = ("mla",)
LATENT_SIZE, LATENT_RANK = 576, 512
OPTIONS = ("sliding_window", "softcap", "sinks")


@dataclass(frozen=True, slots=True)
class LibraryRules:
    """The rules of one library for one kind of cache.

    Attributes:
        name: The library's name in EngineConfig.
        module: The module to import.
        distributions: The names of the package that has it, the usual one first.
        backends: Backends of layouts.
        dtypes: Dtypes of caches. The query has the cache's own, or a half one for a cache of 8-bit floats.
        head_sizes: Elements of a head.
        block_multiple: The divisor of the tokens of a block.
        most_block: The most tokens of a block.
        least_capability: Ten times the lowest compute capability.
        most_capability: Ten times the highest one.
        options: Names of options that it takes, of OPTIONS.
    """

    name: str
    module: str
    distributions: tuple[str, ...]
    backends: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_sizes: Container[int]
    block_multiple: int = 1
    most_block: int = 2**31 - 1
    least_capability: int = 80
    most_capability: int = 999
    options: tuple[str, ...] = ("sliding_window", "softcap")


_SIZES_OF_FLASH = range(8, 257, 8)
RULES = (
    LibraryRules(
        "flash_attn_3",
        "flash_attn_interface",
        ("flash_attn_3", "flash-attn-3"),
        HEADS,
        HALVES,
        _SIZES_OF_FLASH,
        least_capability=90,
        most_capability=90,
    ),
    LibraryRules(
        "flashinfer", "flashinfer", ("flashinfer-python", "flashinfer"), HEADS, (*HALVES, *FP8_DTYPES), (64, 128, 256)
    ),
    LibraryRules("flash_attn", "flash_attn", ("flash-attn",), HEADS, HALVES, _SIZES_OF_FLASH, block_multiple=256),
    LibraryRules(
        "flash_mla",
        "flash_mla",
        ("flash_mla", "flash-mla"),
        LATENTS,
        HALVES,
        (LATENT_SIZE,),
        block_multiple=64,
        most_block=64,
        least_capability=90,
        most_capability=90,
        options=(),
    ),
    LibraryRules(
        "flashinfer", "flashinfer", ("flashinfer-python", "flashinfer"), LATENTS, HALVES, (LATENT_SIZE,), options=()
    ),
)
LIBRARY_NAMES = tuple(dict.fromkeys(rules.name for rules in RULES))
ATTENTION_BACKENDS = ("auto", OURS, *LIBRARY_NAMES)


def layout_refusal(rules: LibraryRules, layout: CacheLayout, capability: int | None) -> str | None:
    """Return the first rule that a cache breaks, as the words of an error; None where it is taken.

    Args:
        rules: The library's.
        layout: The cache's.
        capability: Ten times the device's compute capability, None for a device without CUDA.
    """
    name = rules.name
    if layout.backend not in rules.backends:
        return f"backend must be {' or '.join(rules.backends)} for {name}, got {layout.backend!r}"
    if layout.dtype not in rules.dtypes:
        return f"the cache's dtype must be {' or '.join(map(str, rules.dtypes))} for {name}, got {layout.dtype}"
    if layout.head_size not in rules.head_sizes:
        return f"head_size must be in {_shown(rules.head_sizes)} for {name}, got {layout.head_size}"
    if layout.block_size % rules.block_multiple or layout.block_size > rules.most_block:
        return f"block_size must be {_shown_blocks(rules)} for {name}, got {layout.block_size}"
    if capability is None:
        return f"the model must be on a CUDA device for {name}"
    if not rules.least_capability <= capability <= rules.most_capability:
        return f"compute capability must be {_shown_capability(rules)} for {name}, got {capability / 10}"
    return None


def option_refusal(rules: LibraryRules, cache: BoundCache, query: torch.Tensor, attention: Attention) -> str | None:
    """Return the first rule that a call's query or options break, as the words of an error; None if there is none.

    Args:
        rules: The library's.
        cache: The layer's, whose layout the library takes.
        query: [num_tokens, num_heads, key_size].
        attention: The options, complete.
    """
    name, layout, dtype = rules.name, cache.layout, query.dtype
    for option in OPTIONS:
        if option not in rules.options and getattr(attention, option) is not None:
            return f"{option} must be None for {name}"
    if dtype != layout.dtype and not (layout.dtype in FP8_DTYPES and dtype in HALVES):
        return f"queries must be {layout.dtype} as the cache for {name}, got {dtype}"
    if cache.scales is not None and len(cache.scales.key) + len(cache.scales.value) > 2:
        return f"kv_scales must be one number for all heads of a layer for {name}, got {len(cache.scales.key)}"
    value_size, key_size = LATENT_RANK if layout.backend in LATENTS else layout.head_size, query.shape[2]
    if (key_size, attention.value_size) != (layout.head_size, value_size):
        return (
            f"heads of K and V must have {layout.head_size} and {value_size} elements for {name}, "
            f"got {key_size} and {attention.value_size}"
        )
    return None


def _shown(sizes: Container[int]) -> str:
    shown = [str(size) for size in range(1025) if size in sizes]
    return f"({', '.join(shown)})" if len(shown) < 6 else f"({', '.join(shown[:2])}, ... {shown[-1]})"


def _shown_blocks(rules: LibraryRules) -> str:
    multiple = rules.block_multiple
    return str(multiple) if rules.most_block == multiple else f"a multiple of {multiple}"


def _shown_capability(rules: LibraryRules) -> str:
    least, most = rules.least_capability / 10, rules.most_capability / 10
    return f"{least}" if least == most else f"at least {least}"
