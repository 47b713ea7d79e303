"""Whole-sequence slots: a cache in which each sequence has one slot as long as the longest, and no block tables.

    SlotAllocator          which slots are free, and how often each was handed out (its version)
    PrefixCacheManager     which slot holds which tokens; finds a prompt's longest prefix, copies it to another slot

        slot = slots.alloc()                                       # a new version
        prefix_len = cache.copy_kv(prompt, slot, kv, n_layers, slots)   # the rest is computed
        cache.insert(prompt, slot, slots.version(slot))            # can be found, and is pinned
        cache.release(prompt); slots.free(slot)                    # can be found until the slot is handed out again

It suits fixed batches of sequences of similar length. Where lengths differ, blocks (BlockManager) waste less memory
and share prefixes without copies.
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
    """The longest prefix that a slot holds: (0, None, None) if none holds even the first token.

    Attributes:
        prefix_len: Tokens of the prefix.
        slot: The slot that holds it.
        slot_ver: The slot's version when it was inserted.
    """

    prefix_len: int
    slot: int | None
    slot_ver: int | None


class PrefixCacheManager:
    """A compressed radix tree, split at any token, of the token sequences that slots hold.

    A slot holds one sequence, and with it every prefix of the sequence. Each `insert` and each `pin` pins a path, and
    `release` with the same tokens gives it back. Paths without pins are forgotten in order of last use, a sequence's
    end before its beginning, so that at most `max_capacity` tokens are held. A prefix that several sequences share
    counts once. Pinned tokens stay. Where all are pinned, the cache exceeds its capacity: `insert` returns by how much,
    and so does `num_over`. It returns to its capacity as they are released.

    `token_ids` is a list, or a one-dimensional int32 or int64 array, buffer or CPU tensor, which is read in place. A
    call that raises has changed nothing. Safe to use from several threads.

    Args:
        max_capacity: Tokens to hold.

    Raises:
        ValueError: max_capacity is negative.
    """

    def __init__(self, max_capacity: int) -> None:
        """ValueError if max_capacity is negative."""
        self._tree = _C.SlotTree(max_capacity)

    def insert(self, token_ids: Tokens, slot: int, slot_ver: int) -> int:
        """Record that `slot`, in its version `slot_ver`, holds the K and V of `token_ids`, and of no other tokens.

        The path is pinned until `release(token_ids)`.

        Args:
            token_ids: At least one token.
            slot: The slot.
            slot_ver: Its version, as SlotAllocator.version returns it.

        Returns:
            The tokens over capacity after eviction: 0, unless all are pinned.

        Raises:
            ValueError: There are no tokens, an id does not fit into 32 bits, or the slot is negative.
        """
        return self._tree.insert(token_ids, slot, slot_ver)

    def find(self, token_ids: Tokens, allocator: SlotAllocator | None = None) -> PrefixHit:
        """Return the longest prefix of `token_ids` that a slot holds. It counts as a use.

        Args:
            token_ids: Token ids.
            allocator: The slots' allocator. With it, only slots count whose version is still the inserted one; slots of
                an old version are forgotten for good. Without it, the caller compares `slot_ver` with the slot's
                version.

        Raises:
            ValueError: The allocator does not have a slot that was inserted.
        """
        return PrefixHit._make(self._tree.find(token_ids, allocator))

    def pin(self, token_ids: Tokens, allocator: SlotAllocator | None = None) -> PrefixHit:
        """Do the same as `find`, and pin the prefix until `release(token_ids[:prefix_len])`. No prefix takes no pin.

        Args:
            token_ids: Token ids.
            allocator: As in `find`.

        Returns:
            The prefix and a slot that holds it, as of `find`.

        Raises:
            ValueError: As in `find`.
        """
        return PrefixHit._make(self._tree.pin(token_ids, allocator))

    def release(self, token_ids: Tokens) -> None:
        """Give back the whole path of one `insert` or `pin` of exactly these tokens. No tokens need no release.

        Args:
            token_ids: Token ids.

        Raises:
            ValueError: No such pin is left.
        """
        self._tree.release(token_ids)

    def withdraw(self, slot: int) -> bool:
        """Forget the contents of `slot`: for a slot that is taken with `occupy` to be written anew.

        Pins stay until they are released. The paths of other slots stay, too.

        Args:
            slot: The slot.

        Returns:
            False if it held nothing.
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
        """Copy K and V of the longest prefix of `token_ids` that a slot holds to `target_slot`, in one launch.

        Only these tokens of the slot are written. On CUDA it is ordered on the current stream, and the host does not
        wait.

        Args:
            token_ids: Token ids.
            target_slot: The slot to write.
            kv_cache: One tensor [num_layers, 2, max_slots, max_len, ...], or an entry for each layer. An entry is one
                tensor [2, max_slots, max_len, ...] or a sequence of tensors [max_slots, max_len, ...] (K and V; MLA's
                latents alone). All are of one shape, dtype and device. Views with other strides are accepted, such as a
                cache [max_slots, heads, max_len, size] with its dimensions transposed.
            n_layers: How many of the layers to copy, from the first on.
            allocator: As in `find`.

        Returns:
            The length of the prefix. 0 copies nothing, and neither does a prefix that `target_slot` holds itself.

        Raises:
            ValueError: A slot is not one of the cache's, the prefix is longer than max_len, n_layers is out of range,
                or tensors differ in shape; also as in `find`. Nothing is written. Slots of an old version are forgotten
                all the same.
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
        """Limit of tokens to hold."""
        return self._tree.max_capacity

    @property
    def num_tokens(self) -> int:
        """Number of tokens held; a shared prefix counts once."""
        return self._tree.num_tokens

    @property
    def num_over(self) -> int:
        """Number of tokens above max_capacity: 0, unless all tokens are pinned."""
        return self._tree.num_over

    @property
    def num_slots(self) -> int:
        """Number of slots with tokens."""
        return self._tree.num_slots

    @property
    def num_nodes(self) -> int:
        """Number of edges of the tree, with which a path's cost grows."""
        return self._tree.num_nodes

    @property
    def num_pins(self) -> int:
        """Number of pins taken by insert and pin and not yet released."""
        return self._tree.num_pins

    def check(self) -> None:
        """Raise RuntimeError if an invariant is broken; the message names it. For tests: it walks the whole tree."""
        self._tree.check()


def _parts(kv_cache: torch.Tensor | Sequence[LayerKV], n_layers: int) -> list[torch.Tensor]:
    """Return the tensors [max_slots, max_len, ...] of the first n_layers layers, all of one shape, dtype and device."""
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
    """Copy slot `source` of each part to its slot `target`. Slots are blocks to BlockCopier's native plan."""
    device = parts[0].device
    if device.type != "cpu" and _C.cuda_error() is not None:
        for part in parts:
            part[target].copy_(part[source])
        return
    device_number = HOST if device.type == "cpu" else device.index
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
        src_device=device_number,
        dst_device=device_number,
        pinned=False,
        kernel_max_bytes=0,
        max_groups=1,
    )
    stream = 0 if device.type == "cpu" else torch.cuda.current_stream(device).cuda_stream
    copier.run(pairs.data_ptr(), 1, stream, torch.get_num_threads())
