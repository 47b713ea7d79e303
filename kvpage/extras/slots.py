"""Whole-sequence slots: a cache in which each sequence has one slot as long as the longest, and no block tables.

    SlotAllocator          which slots are free, and how often each was handed out (its version)
    PrefixCacheManager     which slot holds which tokens; finds a prompt's longest prefix, copies it to another slot

        slot = slots.alloc()                                       # a new version
        prefix_len = cache.copy_kv(prompt, slot, kv, n_layers, slots)   # the rest is computed
        cache.insert(prompt, slot, slots.version(slot))            # can be found, and is pinned
        cache.release(prompt); slots.free(slot)                    # can be found until the slot is handed out again

It suits fixed batches of sequences of like length. Where lengths differ, blocks (BlockManager) waste less memory and
share prefixes without copies.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

import kvpage._C as _C
from kvpage._C import SlotAllocator as SlotAllocator
from kvpage.checks.tensors import check_dense, check_writable, tensor_list
from kvpage.checks.tokens import Tokens
from kvpage.checks.values import as_integer

__all__ = ["PrefixCacheManager", "PrefixHit", "SlotAllocator"]

HOST = -1
LayerKV = torch.Tensor | Sequence[torch.Tensor]


class PrefixHit(NamedTuple):
    """The longest prefix that a slot holds: (0, None, None) if none holds even the first token."""

    prefix_len: int
    slot: int | None
    slot_ver: int | None


class PrefixCacheManager:
    """Which slots hold which token sequences: a compressed radix tree, split at any token.

    A slot holds one sequence, and with it every prefix of it. A path is pinned by each `insert` and each `pin` that
    took it, and given back by `release` with the same tokens. What is not pinned is forgotten in order of last use, a
    sequence's end before its beginning, so that no more than `max_capacity` tokens are held; a prefix that several
    sequences share counts once. Pinned tokens stay: where all are, the cache goes over its capacity (`insert` returns
    by how much, `num_over` tells), and comes back to it as they are released.

    `token_ids`: a list, or a one-dimensional int32 or int64 array, buffer or CPU tensor, which is read in place. A call
    that raises has changed nothing. Safe to use from several threads.
    """

    def __init__(self, max_capacity: int) -> None:
        """ValueError if max_capacity is negative."""
        self._tree = _C.SlotTree(max_capacity)

    def insert(self, token_ids: Tokens, slot: int, slot_ver: int) -> int:
        """`slot`, in its version `slot_ver`, now holds the K and V of `token_ids`, and of nothing else.

        Pins the path until `release(token_ids)`. Returns the tokens over capacity after eviction: 0, unless all is
        pinned. ValueError for no tokens, an id that does not fit into 32 bits, or a negative slot.
        """
        return self._tree.insert(token_ids, slot, slot_ver)

    def find(self, token_ids: Tokens, allocator: SlotAllocator | None = None) -> PrefixHit:
        """The longest prefix of `token_ids` that a slot holds, as (prefix_len, slot, slot_ver); it counts as a use.

        With the allocator, only slots whose version is still the inserted one count; those found to be of an old
        version are forgotten for good. Without it, the caller compares `slot_ver` with the slot's version. ValueError
        if the allocator does not have a slot that was inserted.
        """
        return PrefixHit._make(self._tree.find(token_ids, allocator))

    def pin(self, token_ids: Tokens, allocator: SlotAllocator | None = None) -> PrefixHit:
        """As `find`, and pins what it finds, till `release(token_ids[:prefix_len])`. No prefix takes no pin."""
        return PrefixHit._make(self._tree.pin(token_ids, allocator))

    def release(self, token_ids: Tokens) -> None:
        """Gives back the whole path of one `insert` or `pin` of exactly these tokens. No tokens: nothing to give back.

        ValueError if no such pin is left.
        """
        self._tree.release(token_ids)

    def withdraw(self, slot: int) -> bool:
        """Forgets what `slot` holds; for one that is taken with `occupy` to be written anew. False if it held nothing.

        Pins stay until they are released, and the path of what other slots hold stays too.
        """
        return self._tree.withdraw(slot)

    def copy_kv(
        self,
        token_ids: Tokens,
        target_slot: int,
        kv_cache: torch.Tensor | Sequence[LayerKV],
        n_layers: int,
        allocator: SlotAllocator | None = None,
    ) -> int:
        """Copies K and V of the longest prefix of `token_ids` that a slot holds to `target_slot`, in one launch.

        kv_cache: one tensor [num_layers, 2, max_slots, max_len, ...], or a sequence with an entry a layer, each one
            tensor [2, max_slots, max_len, ...] or a sequence of tensors [max_slots, max_len, ...] (K and V; MLA's
            latents alone), all of one shape, dtype and device. Views with other strides do, such as a cache
            [max_slots, heads, max_len, size] with its dimensions transposed. n_layers: how many of the layers, from
            the first on.

        Returns the length of the prefix; 0 copies nothing, and neither does a prefix that `target_slot` holds itself.
        Only these tokens of the slot are written. On CUDA it is ordered on the current stream and not waited for.

        ValueError, with nothing written, besides those of `find`: if target_slot or the slot found is not one of the
        cache's, if the prefix is longer than max_len, if n_layers is not between 1 and the number of layers, and for
        tensors of other shapes. Slots found to be of an old version are forgotten all the same.
        """
        parts = _parts(kv_cache, n_layers)
        max_slots, max_len = parts[0].shape[:2]
        target_slot = as_integer("target_slot", target_slot)
        if not 0 <= target_slot < max_slots:
            raise ValueError(f"target_slot must be between 0 and {max_slots - 1}, got {target_slot}")
        hit = self.find(token_ids, allocator)
        if hit.slot is None or hit.slot == target_slot:
            return hit.prefix_len
        if hit.slot >= max_slots:
            raise ValueError(f"kv_cache must have all slots that were inserted, got {max_slots} for slot {hit.slot}")
        if hit.prefix_len > max_len:
            raise ValueError(f"kv_cache must have room for {hit.prefix_len} tokens a slot, got {max_len}")
        _copy_slot([part[:, : hit.prefix_len] for part in parts], hit.slot, target_slot)
        return hit.prefix_len

    @property
    def max_capacity(self) -> int:
        """In tokens."""
        return self._tree.max_capacity

    @property
    def num_tokens(self) -> int:
        """Tokens held, a shared prefix once."""
        return self._tree.num_tokens

    @property
    def num_over(self) -> int:
        """Tokens above max_capacity: none, unless all that is held is pinned."""
        return self._tree.num_over

    @property
    def num_slots(self) -> int:
        """Slots that hold something."""
        return self._tree.num_slots

    @property
    def num_nodes(self) -> int:
        """Edges of the tree: what a path's cost grows with."""
        return self._tree.num_nodes

    @property
    def num_pins(self) -> int:
        """Pins taken by insert and pin and not yet released."""
        return self._tree.num_pins

    def check(self) -> None:
        """RuntimeError that names the broken invariant, if one is: for tests. O(tree)."""
        self._tree.check()


def _parts(kv_cache: torch.Tensor | Sequence[LayerKV], n_layers: int) -> list[torch.Tensor]:
    """The tensors [max_slots, max_len, ...] of the first n_layers layers, all of one shape, dtype and device."""
    if isinstance(kv_cache, torch.Tensor):
        check_dense("kv_cache", kv_cache)
    n_layers = as_integer("n_layers", n_layers)
    if not 1 <= n_layers <= len(kv_cache):
        raise ValueError(f"n_layers must be between 1 and the cache's number of layers {len(kv_cache)}, got {n_layers}")
    parts = [part for layer in kv_cache[:n_layers] for part in tensor_list("kv_cache", layer)]
    if not parts or parts[0].dim() < 2:
        raise ValueError("kv_cache must have tensors [max_slots, max_len, ...] in each layer")
    for part in parts:
        check_writable("kv_cache", part)
        for name in ("shape", "dtype", "device"):
            first, other = getattr(parts[0], name), getattr(part, name)
            if first != other:
                raise ValueError(f"kv_cache must be of one {name}, got {first} and {other}")
    return parts


def _copy_slot(parts: list[torch.Tensor], source: int, target: int) -> None:
    """Slot `target` of each part becomes its slot `source`: slots are blocks to BlockCopier's native plan."""
    device = parts[0].device
    if device.type != "cpu" and _C.cuda_error() is not None:
        for part in parts:
            part[target].copy_(part[source])
        return
    place = HOST if device.type == "cpu" else device.index
    pairs = torch.tensor([[source, target]], dtype=torch.int64)
    layers = [(part.data_ptr(), [stride * part.element_size() for stride in part.stride()]) for part in parts]
    copier = _C.BlockCopier(
        sizes=list(parts[0].shape),
        block_dim=0,
        element_bytes=parts[0].element_size(),
        srcs=layers,
        dsts=layers,
        num_src_blocks=len(parts[0]),
        num_dst_blocks=len(parts[0]),
        src_device=place,
        dst_device=place,
        pinned=False,
        kernel_max_bytes=0,
        max_groups=1,
    )
    stream = 0 if device.type == "cpu" else torch.cuda.current_stream(device).cuda_stream
    copier.run(pairs.data_ptr(), 1, stream, torch.get_num_threads())
