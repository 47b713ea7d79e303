"""Which scans a mixer calls, by the names of its own file: what they are is in fixed_scans."""

from typing import Any

from torch import nn

from kvpage.serving.model.meaning import innermost, with_meaning

SCAN_NAMES = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
    "mamba_selective_scan",
    "mamba_selective_state_update",
    "mamba2_chunk_scan",
    "mamba2_selective_state_update",
)


def scan_names(module: nn.Module) -> tuple[str, ...]:
    """Return the SCAN_NAMES that a mixer's forward calls; none if the forward is not its class's."""
    if "forward" in vars(module):
        return ()
    forward: Any = type(module).forward
    names = tuple(name for name in SCAN_NAMES if innermost(forward, name) is not None)
    return names if all(with_meaning(forward, name, len) is not None for name in names) else ()
