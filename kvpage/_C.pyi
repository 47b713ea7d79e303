"""The native core: addresses, sizes and stream handles in; no torch."""

from typing import Any

from kvpage.errors import OutOfBlocks as OutOfBlocks

def build_info() -> dict[str, Any]: ...
