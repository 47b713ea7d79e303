"""KVPageCache: a transformers Cache whose K and V lie in blocks, for those who keep `model.generate`."""

import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, DynamicCache

from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.interrupts import HeldInterrupts, uninterrupted
from kvpage.checks.tensors import as_indices, as_selection
from kvpage.checks.values import as_integer, check_namespace
from kvpage.serving.generate.cached_rows import CachedRows, TokenRows
from kvpage.serving.generate.forward_hooks import ForwardHooks, is_on_stack
from kvpage.serving.generate.forward_inputs import ForwardInputs, as_mask_tensor, as_token_rows, is_unmasked
from kvpage.serving.generate.kv_page_layer import KVPageLayer
from kvpage.serving.generate.row_slots import RowSlots

if TYPE_CHECKING:
    from kvpage.serving.generate.cache_pool import KVPageCachePool

# transformers' `crop` used to take the length that is to be left, and takes how many tokens to remove, as a negative
# number, now. Only a zero means different things.
_CROPS_TO_LENGTH = "max_length" in inspect.signature(Cache.crop).parameters


class KVPageCache(Cache):
    """The cache of one call, or of several that follow each other, over the blocks of a pool that outlives it.

        pool = KVPageCachePool.from_model(model, CacheConfig(block_size=16, num_gpu_blocks=256))
        with KVPageCache(pool, input_ids) as cache:
            output = model.generate(input_ids, past_key_values=cache, max_new_tokens=20)

    What begins like an earlier call is found and not computed again: `get_seq_length` says how much, and `generate`
    goes on from there. What the model computes here can be found by later caches, prompt and answer, as soon as the
    next step begins or the cache is released, in whole blocks. The tokens are those of `generate` without it, unless
    the pool's blocks quantise.

    input_ids: [num_rows, num_tokens], those that `generate` will be given. Rows share one length, so that a batch
        begins where the shortest of what its rows found ends. At least one token is left to compute.
    attention_mask: [num_rows, num_tokens], as for `generate`. A row with padding is computed in whole, and no other
        call finds it: in its blocks padding would stand for tokens.
    namespace: only caches of the same one (a tenant's salt) find each other's tokens.

    For beams and several answers a prompt, rows are repeated at the first forward; beams share blocks copy-on-write.
    Layers with a sliding window keep all tokens too, and leave the window to the mask.

    It has to be released, by `with` or `release`; one that is merely forgotten gives its blocks back when the pool's
    next cache is made. Until then it listens to the model's forward, for the tokens that K and V are of. A forward that
    raises is as if it had not been; what was computed before it stays, here and, after the release, for others to find.
    Ctrl-C is no exception. Not thread-safe: a pool and its caches, one thread; others may use the model
    meanwhile.

    Raises OutOfBlocks, with nothing changed, where the prompt does not fit; ValueError for input_ids or a mask of
    another form, TypeError for a namespace that is not bytes. A forward raises OutOfBlocks where its tokens do not fit,
    and ValueError, before anything is computed, for more than text (images, embeddings, token types), for
    `use_cache=False`, for other tokens
    than the cache was made with, for a mask or positions that change what was found, and beyond the length where the
    model's rotary embedding changes.
    """

    def __init__(
        self,
        pool: "KVPageCachePool",
        input_ids: torch.Tensor | Sequence[Sequence[int]],
        attention_mask: torch.Tensor | Sequence[Sequence[int]] | None = None,
        namespace: bytes = b"",
    ) -> None:
        super().__init__(layers=[])
        check_namespace(namespace)
        tokens = as_token_rows(input_ids)
        mask = None if attention_mask is None else as_mask_tensor(attention_mask)
        if mask is not None and tuple(mask.shape) != tokens.shape:
            raise ValueError(f"attention_mask must be of shape {tokens.shape}, got {tuple(mask.shape)}")
        pool.check_tokens(tokens)
        pool.check_length(tokens.shape[1])
        self._pool, self._namespace = pool, namespace
        self._step: _Step | None = None
        self._rows = pool.make_rows()
        with HeldInterrupts():
            self._rows.open(tokens, is_unmasked(mask, *tokens.shape), namespace)
            self._rows.skip_found()
            self._held = Held(self._rows, ForwardHooks(pool.model, self))
            self._finalizer = weakref.finalize(self, pool.forgotten.append, self._held)
            self._finalizer.atexit = False

    def __enter__(self) -> "KVPageCache":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    @uninterrupted
    def release(self) -> None:
        """Makes what is computed findable, and gives the blocks up. The cache is at its end; again is fine."""
        self._step = None
        if self._finalizer.detach():
            self._held.release()

    # --- what the model calls ----------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes one layer's new K and V, [num_rows, num_heads, num_new_tokens, size], into the step's slots.

        Returns all K and V of the rows, [num_rows, num_heads, num_tokens, size].
        """
        step = self._checked_step(key_states, layer_idx)
        layer, new = self._pool.layers[layer_idx], (key_states, value_states)
        if step.slots is None:
            assert self._rows.working is not None
            rows = self._rows.working.append(layer_idx, new, step.start, self._rows.tables)
        else:
            layer.write(*new, step.slots.slot_mapping)
            is_whole = step.start == 0 and layer.keeps(key_states.dtype)  # nothing was in the cache
            rows = new if is_whole else layer.read(step.slots.block_tables, step.end, key_states.dtype)
        step.layers_left.remove(layer_idx)
        return rows

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that the layer holds of each row; those that were found count from the start."""
        step = self._current()
        if step is None:
            return self._rows.length
        return step.start if layer_idx in step.layers_left else step.end

    def get_mask_sizes(self, query_length: torch.Tensor | int, layer_idx: int) -> tuple[int, int]:
        """(number of keys, place of the first) for so many queries; older versions give the queries' positions."""
        num_queries = query_length.shape[0] if isinstance(query_length, torch.Tensor) else query_length
        return self.get_seq_length(layer_idx) + num_queries, 0

    # --- what generate calls -----------------------------------------------------------------------------------------

    def crop(self, num_tokens: int) -> None:
        """Removes the last -num_tokens tokens; a positive number is the length to be left. Zero removes nothing, or,
        where transformers' own `crop` takes a length, all tokens.

        OutOfBlocks, and nothing is removed, where that needs a copy of a block that others may read and there is none.
        """
        length, num_tokens = self._rows.length, as_integer("num_tokens", num_tokens)
        self._current()
        if num_tokens > 0 or (num_tokens == 0 and _CROPS_TO_LENGTH):
            self._rows.crop(min(num_tokens, length))
        else:
            self._rows.crop(max(length + num_tokens, 0))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row beam_idx[i] was. OutOfBlocks, with nothing changed, where copies need blocks."""
        self._select(as_indices("beam_idx", beam_idx).tolist())

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int] | Sequence[bool]) -> None:
        """Keeps these rows, in this order; negative ones count from the last. `indices` may be a mask."""
        self._select(as_selection("indices", indices, len(self._rows)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one copy after the other. OutOfBlocks, with nothing changed."""
        repeats = as_integer("repeats", repeats)
        if repeats > self._pool.manager.num_blocks:
            raise ValueError(f"repeats must be at most as many as there are blocks, got {repeats}")
        self._select([row for row in range(len(self._rows)) for _ in range(repeats)])

    def reset(self) -> None:
        """Forgets all rows: the next forward begins anew, with as many as it has."""
        self._current()
        self._rows.release()

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no longest sequence but that which all blocks hold."""
        return -1

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """-1, as get_max_length."""
        return -1

    # --- what it is --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Layers."""
        return max(self._pool.layers) + 1

    @property
    def layers(self) -> list[Any]:  # of KVPageLayer
        """Made anew each time: their `keys` and `values` are copies of what the cache holds."""
        return [KVPageLayer(self, layer_idx) for layer_idx in range(len(self))]

    @layers.setter
    def layers(self, layers: Sequence[object]) -> None:
        if layers:
            raise ValueError("layers of a KVPageCache are those of its pool's model, and cannot be set")

    def __getitem__(self, layer_idx: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """A layer's K and V, as `layers` has them."""
        layer = self.layers[layer_idx]
        return layer.keys, layer.values

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """What a DynamicCache of this transformers gives of each layer: K and V, and, in some versions, a window."""
        if hasattr(DynamicCache, "__iter__"):
            return DynamicCache.__iter__(self)  # type: ignore[arg-type]
        return iter([(layer.keys, layer.values) for layer in self.layers])

    def to_legacy_cache(self) -> tuple[tuple[torch.Tensor | None, torch.Tensor | None], ...]:
        """A pair of K and V for each layer."""
        return tuple(self[layer_idx] for layer_idx in range(len(self)))

    def has_layer(self, layer_idx: int) -> bool:
        """Whether the layer has K and V of its own."""
        return layer_idx in self._pool.layers

    def read_layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Copies of a layer's K and V, [num_rows, num_heads, num_tokens, size]; None where it holds nothing."""
        length = self.get_seq_length(layer_idx)
        if not length or not self.has_layer(layer_idx):
            return None
        working = None if self._rows.working is None else self._rows.working.rows(layer_idx, length)
        if working is not None:
            return working
        return self._pool.layers[layer_idx].read(self._rows.tables(), length, self._pool.dtype)

    @property
    def max_batch_size(self) -> int:
        """Rows."""
        return len(self._rows)

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self._rows)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """TypeError: a copy would be a copy of the pool. Another cache finds the same beginning."""
        raise TypeError("KVPageCache cannot be copied or pickled: make another one over the same pool")

    def __repr__(self) -> str:
        return f"KVPageCache({len(self._rows)} rows of {self._rows.length} tokens)"

    @property
    def is_initialized(self) -> bool:
        """Whether there are rows."""
        return len(self._rows) > 0

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self)

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * len(self)

    # --- what the hooks call -----------------------------------------------------------------------------------------

    @property
    def is_in_forward(self) -> bool:
        return self._current() is not None

    @uninterrupted
    def begin_forward(self, arguments: Mapping[str, Any], call: FrameType) -> None:
        """Room for the tokens that the model is about to compute. All checks come before any change."""
        rows = self._rows
        tokens, start, is_whole = ForwardInputs.of_call(arguments, rows.length)
        self._pool.check_forward(tokens, start + tokens.shape[1])
        if not len(rows):  # after a reset
            rows.open(tokens, is_whole, self._namespace)
        repeats, rest = divmod(len(tokens), len(rows))
        if rest or not repeats:
            raise ValueError(f"input_ids must have {len(rows)} rows, or a multiple of it, got {len(tokens)}")
        rows.check(tokens, start, repeats)
        self._hide([all(is_whole[row : row + repeats]) for row in range(0, len(tokens), repeats)])
        if repeats > 1:
            self.batch_repeat_interleave(repeats)
        try:
            slots = None if rows.begin_working(tokens, start) else self._begin_in_blocks(tokens, start)
        except OutOfBlocks:
            rows.select(range(0, len(rows), repeats))
            raise
        end = start + tokens.shape[1]
        self._step = _Step(tokens, start, end, slots, set(self._pool.layers), repeats, call)

    def finish_forward(self) -> None:
        """What every layer has written counts from now on."""
        step = self._step
        if step and not step.layers_left:
            self._rows.finish(step.tokens, step.start)
        self._step = None

    def end_forward(self) -> None:
        """It is as if it had not been."""
        step, self._step = self._step, None
        if step and step.repeats > 1:
            self._rows.select(range(0, len(self._rows), step.repeats))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _current(self) -> "_Step | None":
        """Of the forward that is under way. One that Ctrl-C has ended is ended here."""
        if self._step and not is_on_stack(self._step.call):
            self.end_forward()
        return self._step

    def _begin_in_blocks(self, tokens: TokenRows, start: int) -> RowSlots:
        """A forward whose K and V are written at once, and gathered, for want of working memory."""
        self._rows.commit()
        if self._rows.working is not None:
            self._rows.working.drop()
        return self._rows.begin(tokens, start)

    def _select(self, indices: list[int]) -> None:
        self._current()
        self._rows.select(indices)

    def _hide(self, is_whole: list[bool]) -> None:
        """Rows that padding has come into leave what others can find, as long as nothing of them is computed."""
        hidden = [row for row, whole in enumerate(is_whole) if not whole and self._rows.is_findable(row)]
        if not hidden:
            return
        if self._rows.length:
            raise ValueError(
                "attention_mask, position_ids and cache_position must show every token of a row in its place, after "
                f"what is cached of it; those of rows {hidden} do not"
            )
        self._rows.hide(hidden)

    def _checked_step(self, key_states: torch.Tensor, layer_idx: int) -> "_Step":
        step = self._current()
        if step is None or layer_idx not in step.layers_left:
            raise ValueError(
                f"K and V of layer {layer_idx} must come from a forward of the pool's model, once each, before release"
            )
        shape = (key_states.shape[0], key_states.shape[2])
        if shape != step.tokens.shape:
            raise ValueError(f"K must be of the rows and tokens {step.tokens.shape} of input_ids, got {shape}")
        if key_states.requires_grad:
            raise ValueError("K and V must need no gradients, which do not pass through blocks: use torch.no_grad()")
        return step


@dataclass(frozen=True, slots=True)
class Held:
    """What a cache has to give back."""

    rows: CachedRows
    hooks: ForwardHooks

    def release(self) -> None:
        self.hooks.remove()
        self.rows.release()


@dataclass(slots=True)
class _Step:
    """A forward that is under way, of the rows' tokens [start, end). slots: where these go; None for the working rows.
    repeats: rows that it has made of each. call: torch's frame, which ends with it.
    """

    tokens: TokenRows
    start: int
    end: int
    slots: RowSlots | None
    layers_left: set[int]
    repeats: int
    call: FrameType
