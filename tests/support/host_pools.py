"""Pools of host memory as SGLang's HiCache has them, made up: pages, their addresses, and what nobody owns.

MadePool("layer_first")     [K and V, layers, tokens, heads, size]      two pieces a layer for each page
MadePool("page_first")      [K and V, tokens, layers, heads, size]      two pieces a page
MadePool(..., parts=1)      latents: no V
"""

import torch

PAGE, LAYERS, HEADS, SIZE = 4, 3, 2, 5


class MadePool:
    """Memory of `num_pages` pages. Every byte begins as POISON."""

    POISON = 0xA5

    def __init__(self, layout: str = "page_first", num_pages: int = 12, parts: int = 2, dtype=torch.bfloat16) -> None:
        self.layout, self.page_size, self.layer_num, self.head_num, self.head_dim = layout, PAGE, LAYERS, HEADS, SIZE
        self.dtype, self.parts, self.tokens = dtype, parts, num_pages * PAGE
        self.size_per_token = parts * LAYERS * HEADS * SIZE * dtype.itemsize
        self.kv_buffer = torch.empty(self._shape(), dtype=dtype)
        self.bytes.fill_(self.POISON)

    def _shape(self) -> tuple[int, ...]:
        rows = (LAYERS, self.tokens) if self.layout == "layer_first" else (self.tokens, LAYERS)
        return (self.parts, *rows, HEADS, SIZE)

    @property
    def bytes(self) -> torch.Tensor:
        """All memory, uint8."""
        return self.kv_buffer.view(torch.uint8).reshape(-1)

    def fill(self, seed: int) -> None:
        """Write other bytes everywhere, which never are POISON alone."""
        made = torch.randint(0, 256, self.bytes.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        self.bytes.copy_(made)

    def page(self, page: int) -> torch.Tensor:
        """Return a copy of a page: [parts, layers, tokens, ...], whatever the layout."""
        rows = slice(page * PAGE, (page + 1) * PAGE)
        if self.layout == "layer_first":
            return self.kv_buffer[:, :, rows].clone()
        return self.kv_buffer[:, rows].transpose(1, 2).clone()

    def poison(self, page: int) -> None:
        """Write POISON over a page."""
        rows = slice(page * PAGE, (page + 1) * PAGE)
        where = self.kv_buffer[:, :, rows] if self.layout == "layer_first" else self.kv_buffer[:, rows]
        where.copy_(torch.full((1,), self.POISON, dtype=torch.uint8).repeat(self.dtype.itemsize).view(self.dtype))

    # --- what SGLang's pools have ------------------------------------------------------------------------------------

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        itemsize, row = self.dtype.itemsize, HEADS * SIZE * self.dtype.itemsize
        found = []
        for first in indices.tolist()[::PAGE]:
            if self.layout == "layer_first":
                starts = [(layer * self.tokens + first) * row for layer in range(LAYERS)]
            else:
                starts = [first * LAYERS * row]
            part = self.kv_buffer[0].numel() * itemsize
            found += [self.kv_buffer.data_ptr() + start + p * part for start in starts for p in range(self.parts)]
        size = PAGE * row * (1 if self.layout == "layer_first" else LAYERS)
        return found, [size] * len(found)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.page(int(index) // PAGE).flatten()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(PAGE * self.size_per_token // self.dtype.itemsize, dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        rows = slice(int(index), int(index) + PAGE)
        page = data_page.view(self.parts, LAYERS, PAGE, HEADS, SIZE)
        if self.layout == "layer_first":
            self.kv_buffer[:, :, rows] = page
        else:
            self.kv_buffer[:, rows] = page.transpose(1, 2)


class PoolOfCopies(MadePool):
    """A pool whose layout has no address for a page."""

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        raise ValueError(f"Unsupported layout: {self.layout}")


class AnchorPool:
    """A pool without bytes."""

    layout, page_size, dtype, kv_buffer = "layer_first", PAGE, torch.uint8, None

    def get_page_buffer_meta(self, indices: torch.Tensor) -> None:
        return None


def tokens_of(*pages: int) -> torch.Tensor:
    """Return the indices of the pages' tokens."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages] or [torch.empty(0, dtype=int)])
