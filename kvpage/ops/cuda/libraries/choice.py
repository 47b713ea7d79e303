"""The choice of a library: which are installed, which takes a cache, and which one "auto" takes."""

import importlib
import importlib.metadata
import importlib.util
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvpage.layout.cache_layout import CacheLayout
from kvpage.ops.cuda.libraries.flash_attention import FlashAttention2, FlashAttention3
from kvpage.ops.cuda.libraries.flash_mla import FlashMLA
from kvpage.ops.cuda.libraries.flashinfer import FlashInferHeads, FlashInferLatents
from kvpage.ops.cuda.libraries.library import AttentionLibrary, Kernels
from kvpage.ops.cuda.libraries.rules import LATENTS, LIBRARY_NAMES, OURS, RULES, LibraryRules, layout_refusal

LIBRARY_ERRORS = (
    ImportError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError, OSError,
    subprocess.SubprocessError,
)  # fmt: skip
"""The errors of a library that does not work here: its compiler, its driver, or calls of another version."""

_KERNELS: dict[tuple[str, bool], Callable[[Any, torch.device], Kernels]] = {
    ("flash_attn_3", False): lambda library, device: FlashAttention3(library),
    ("flash_attn", False): lambda library, device: FlashAttention2(library),
    ("flashinfer", False): FlashInferHeads,
    ("flashinfer", True): FlashInferLatents,
    ("flash_mla", True): lambda library, device: FlashMLA(library),
}


def installed_libraries() -> dict[str, str | None]:
    """Return the version of each library by its name; None for one that is not installed. Nothing is imported."""
    return {rules.name: _version(rules) if _is_installed(rules) else None for rules in reversed(RULES)}


def capability_of(device: torch.device) -> int | None:
    """Return ten times the compute capability of a CUDA device, None for others and for ROCm."""
    if device.type != "cuda" or torch.version.hip:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@dataclass(frozen=True, slots=True)
class Candidate:
    """A library that takes a cache by its rules. Calling it imports and makes it, and may raise LIBRARY_ERRORS."""

    rules: LibraryRules
    device: torch.device
    is_named: bool

    @property
    def name(self) -> str:
        """The library's name in EngineConfig."""
        return self.rules.name

    def __call__(self) -> AttentionLibrary:
        """Return the library, with its workspace on the device."""
        make = _KERNELS[self.rules.name, self.rules.backends == LATENTS]
        return AttentionLibrary(
            self.rules, make(importlib.import_module(self.rules.module), self.device), self.is_named
        )


def candidates(name: str, layout: CacheLayout, device: torch.device) -> list[Candidate]:
    """Return the libraries that take a cache, the one to prefer first.

    Args:
        name: "auto", "kvpage", or a library's name.
        layout: The cache's.
        device: The cache's.

    Raises:
        ValueError: The named library is not installed, or does not take the cache, with the rule that it breaks.
    """
    if name == OURS:
        return []
    return [Candidate(rules, device, name != "auto") for rules in _fitting(name, layout, capability_of(device))]


def automatic_choice(layout: CacheLayout, capability: int | None) -> str:
    """Return the name that "auto" stands for, by the rules alone: a model's options may lead back to "kvpage".

    Args:
        layout: The cache's.
        capability: Ten times the device's compute capability, None for a device without CUDA.
    """
    return next((rules.name for rules in _fitting("auto", layout, capability)), OURS)


def _fitting(name: str, layout: CacheLayout, capability: int | None) -> list[LibraryRules]:
    if name == "auto":
        fitting = [rules for rules in RULES if layout_refusal(rules, layout, capability) is None]
        return [rules for rules in fitting if _is_installed(rules)]
    if name not in LIBRARY_NAMES:
        raise ValueError(f"attention_backend must be one of auto, kvpage, {', '.join(LIBRARY_NAMES)}, got {name!r}")
    named = [rules for rules in RULES if rules.name == name]
    rules = next((rules for rules in named if layout.backend in rules.backends), named[0])
    if not _is_installed(rules):
        raise ValueError(f"attention_backend {name!r} needs {rules.distributions[0]}, which is not installed")
    refusal = layout_refusal(rules, layout, capability)
    if refusal is not None:
        raise ValueError(refusal)
    return [rules]


def _is_installed(rules: LibraryRules) -> bool:
    """Whether the module could be imported. A folder without code, which some uninstallers leave, does not count."""
    try:
        spec = importlib.util.find_spec(rules.module)
    except ValueError:  # a module that something has put into sys.modules without a spec
        return False
    return spec is not None and spec.origin is not None


def _version(rules: LibraryRules) -> str:
    for distribution in rules.distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
