"""KVPageCache: a transformers Cache whose K and V are in blocks, for calls of `model.generate`."""

import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
from transformers import Cache, DynamicCache

from kvpage.blocks.groups.states.marks import as_cache_at
from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.interrupts import HeldInterrupts, uninterrupted
from kvpage.checks.tensors import as_indices, as_selection
from kvpage.checks.values import as_integer, check_namespace
from kvpage.serving.generate.cached_rows import CachedRows, TokenRows
from kvpage.serving.generate.forward_hooks import ForwardHooks, is_on_stack
from kvpage.serving.generate.forward_inputs import Forward, ForwardInputs, as_mask_tensor, as_token_rows, is_unmasked
from kvpage.serving.generate.kv_page_layer import KVPageLayer, StatefulLayer
from kvpage.serving.generate.model_blocks import ModelBlocks
from kvpage.serving.generate.row_slots import RowSlots
from kvpage.serving.generate.states.mixer_hooks import MixerHooks
from kvpage.serving.generate.states.row_states import PackedPass, RowPass
from kvpage.serving.generate.view.row_padding import are_findable, pads_of_forward, pads_of_mask
from kvpage.serving.model.states.piece_cache import PieceCache

# A negative number is how many tokens `crop` removes. A positive one is the length that it leaves. In versions of
# transformers whose own `crop` takes a length, zero is a length, too.
_CROPS_TO_LENGTH = "max_length" in inspect.signature(Cache.crop).parameters


class KVPageCache(Cache):
    """The cache of one call of `generate`, or of calls that continue each other, over the blocks of a pool.

        pool = KVPageCachePool.from_model(model, CacheConfig(block_size=16, num_gpu_blocks=256))
        with KVPageCache(pool, input_ids) as cache:
            output = model.generate(input_ids, past_key_values=cache, max_new_tokens=20)

    A prompt that begins like an earlier call is found up to where they differ, in whole blocks. `get_seq_length`
    returns how many tokens were found, and `generate` computes only the rest. Later caches find the prompt and the
    answer of this one, in whole blocks, from the next step or the release on. The generated tokens are the same as
    without the cache, unless the pool's blocks quantise.

    With beams, or several answers a prompt, the first forward repeats the rows. They share blocks copy-on-write.
    Layers with a sliding window keep all tokens, too, and the model's mask applies the window.

    Release the cache, by `with` or by `release`. A cache that is dropped without it gives its blocks back when the
    pool's next cache is made. Until the release, hooks on the model's forward read the tokens that K and V belong to.
    A forward that raises, by Ctrl-C too, changes nothing: tokens computed before it stay.

    Where layers keep states, too, a prompt is found up to an exact position at which a state was kept: one token before
    a prompt's end, the end of an answer, where prompts diverged, and `cache_at`. States cannot go back: `crop` raises.

    Use a pool and its caches in one thread. Other threads may use the model at the same time.

    Args:
        pool: the blocks of the model. The cache borrows some until its release.
        input_ids: integers [num_rows, num_tokens], the prompt that `generate` will be given. All rows go on from the
            end of the shortest beginning that was found for any of them. At least one token is left to compute.
        attention_mask: [num_rows, num_tokens], as for `generate`. A row with padding is computed in full, and other
            calls do not find it; unless the pool has `same_bits`: then padding is not computed, and the row is found.
        namespace: a tenant's salt. Only caches of one namespace find each other's tokens.
        cache_at: for a model whose layers keep states, positions of the prompt, 1 to its length, from which others may
            go on: the end of a system prompt. Where padding is not computed, they count the tokens after it, and a
            row that is shorter has none of them.

    Raises:
        OutOfBlocks: where the prompt does not fit, or no slot for a state can be had; nothing is changed. A forward
            raises it where its tokens do not fit.
        TypeError: for a namespace that is not bytes.
        ValueError: for input_ids or a mask of another form. A forward raises it, before the model computes anything,
            for inputs other than text (images, embeddings, token types), for `use_cache=False`, for tokens that
            contradict `input_ids`, for a mask or positions that would change found tokens, and beyond the length at
            which the model's rotary embedding changes.
    """

    def __init__(
        self,
        pool: ModelBlocks,
        input_ids: torch.Tensor | Sequence[Sequence[int]],
        attention_mask: torch.Tensor | Sequence[Sequence[int]] | None = None,
        namespace: bytes = b"",
        *,
        cache_at: Sequence[int] = (),
    ) -> None:
        super().__init__(layers=[])
        check_namespace(namespace)
        tokens = as_token_rows(input_ids)
        marks = as_cache_at(cache_at, tokens.shape[1])
        mask = None if attention_mask is None else as_mask_tensor(attention_mask)
        if mask is not None and tuple(mask.shape) != tokens.shape:
            raise ValueError(f"attention_mask must be of shape {tokens.shape}, got {tuple(mask.shape)}")
        pool.check_tokens(tokens)
        pool.check_length(tokens.shape[1])
        self._pool, self._namespace = pool, namespace
        self._forward: Forward | None = None
        pads = None if pool.runner is None else pads_of_mask(mask, len(tokens))
        self._rows = pool.make_rows()
        with HeldInterrupts():
            self._rows.open(tokens, are_findable(is_unmasked(mask, *tokens.shape), pads), namespace, marks, pads)
            self._rows.skip_found()
            self._held = _Held(self._rows, self._make_hooks())
            self._finalizer = weakref.finalize(self, pool.forgotten.append, self._held.release)
            self._finalizer.atexit = False

    def __enter__(self) -> "KVPageCache":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    @uninterrupted
    def release(self) -> None:
        """Make computed tokens findable, and give the blocks back. The cache ends. Calling it again does nothing."""
        self._forward = None
        if self._finalizer.detach():
            self._held.release()

    def _make_hooks(self) -> "list[ForwardHooks | MixerHooks]":
        """Return hooks on the pool's model; none where its forward asks the cache by itself."""
        if self._pool.runner is not None:
            return []
        of_mixers = [MixerHooks(forward, self) for forward in (self._pool.states.forwards if self._pool.states else ())]
        return [ForwardHooks(self._pool.model, self), *of_mixers]

    # --- called by the model ---

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one layer's K and V of the tokens of the current forward.

        Args:
            key_states: [num_rows, num_heads, num_new_tokens, size]. It must not need gradients.
            value_states: the same for V, with a size of its own.
            layer_idx: the layer.
            args: ignored.
            kwargs: ignored.

        Returns:
            K and V of all tokens of the rows, [num_rows, num_heads, num_tokens, size].

        Raises:
            ValueError: outside of a forward of the pool's model, for a layer's second call in one forward, and for K of
                other rows or tokens than input_ids.
        """
        forward = self._checked_forward(key_states, layer_idx)
        layer, new = self._pool.layers[layer_idx], (key_states, value_states)
        if forward.slots is None:
            assert self._rows.working is not None
            rows = self._rows.working.append(layer_idx, new, forward.start, self._rows.tables)
        else:
            layer.write(*new, forward.slots.slot_mapping)
            is_whole = forward.start == 0 and layer.keeps(key_states.dtype)  # nothing was in the cache
            rows = new if is_whole else layer.read(forward.slots.block_tables, forward.end, key_states.dtype)
        forward.layers_left.remove(layer_idx)
        return rows

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens of each row a layer holds. Found tokens count from the beginning.

        Args:
            layer_idx: The layer. Within a forward, layers that have not written yet hold fewer tokens.
        """
        forward = self._current()
        if forward is None:
            return self._rows.length
        is_written = layer_idx in self._pool.layers and layer_idx not in forward.layers_left
        return forward.end if is_written else forward.start

    def get_mask_sizes(self, query_length: torch.Tensor | int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys that the next queries see, and the place of the first key, 0.

        Args:
            query_length: the number of queries; older versions of transformers pass the queries' positions.
            layer_idx: the layer.
        """
        num_queries = query_length.shape[0] if isinstance(query_length, torch.Tensor) else query_length
        return self.get_seq_length(layer_idx) + num_queries, 0

    # --- called by generate ---

    @uninterrupted
    def crop(self, num_tokens: int) -> None:
        """Remove the last tokens of every row.

        Args:
            num_tokens: a negative number removes that many tokens. A positive one is the length to leave. Zero removes
                nothing or, where transformers' own `crop` takes a length, all tokens.

        Raises:
            OutOfBlocks: with nothing removed, where a shared block has to be copied and no block is free.
        """
        length, num_tokens = self._rows.length, as_integer("num_tokens", num_tokens)
        self._current()
        if num_tokens > 0 or (num_tokens == 0 and _CROPS_TO_LENGTH):
            self._rows.crop(min(num_tokens, length))
        else:
            self._rows.crop(max(length + num_tokens, 0))

    @uninterrupted
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put row beam_idx[i] in place of each row i.

        Args:
            beam_idx: integers [num_rows], in [0, num_rows).

        Raises:
            OutOfBlocks: with nothing changed, where copies need blocks and none are free.
            ValueError: for other indices.
        """
        self._select(as_indices("beam_idx", beam_idx).tolist())

    @uninterrupted
    def batch_select_indices(self, indices: torch.Tensor | Sequence[int] | Sequence[bool]) -> None:
        """Keep these rows, in this order.

        Args:
            indices: row numbers, negative ones from the last, or a mask with one entry a row.

        Raises:
            OutOfBlocks: with nothing changed, where copies need blocks and none are free.
            ValueError: for rows that do not exist, or none.
        """
        self._select(as_selection("indices", indices, len(self._rows)))

    @uninterrupted
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row, its copies beside each other.

        Args:
            repeats: how many times each row is in the result. At least 1.

        Raises:
            OutOfBlocks: with nothing changed, where copies need blocks and none are free.
            ValueError: for no repeats, or more than the pool has blocks.
        """
        self._repeat(as_integer("repeats", repeats))

    @uninterrupted
    def reset(self) -> None:
        """Release all rows. The next forward begins a new batch, of any number of rows."""
        self._current()
        self._rows.release()

    # --- the layers ---

    def __len__(self) -> int:
        """Return the number of layers, up to the last one with K and V or a state."""
        return self._pool.num_layers

    def has_layer(self, layer_idx: int) -> bool:
        """Return whether a layer has K and V of its own.

        Args:
            layer_idx: The layer.
        """
        return layer_idx in self._pool.layers

    def read_layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return copies of a layer's K and V.

        Args:
            layer_idx: The layer.

        Returns:
            K and V, [num_rows, num_heads, num_tokens, size] each; None where the layer holds nothing.
        """
        length = self.get_seq_length(layer_idx)
        if not length or not self.has_layer(layer_idx):
            return None
        working = None if self._rows.working is None else self._rows.working.rows(layer_idx, length)
        if working is not None:
            return working
        return self._pool.layers[layer_idx].read(self._rows.tables(), length, self._pool.dtype)

    @property
    def max_batch_size(self) -> int:
        """The number of rows."""
        return len(self._rows)

    @property
    def is_initialized(self) -> bool:
        """Whether there are rows."""
        return len(self._rows) > 0

    @property
    def batch_size(self) -> int:
        """The number of rows."""
        return self.max_batch_size

    def __repr__(self) -> str:
        return f"KVPageCache({len(self._rows)} rows of {self._rows.length} tokens)"

    @property
    def layers(self) -> list[Any]:
        """The KVPageLayers, made at each call: their `keys` and `values` are copies of the K and V in the cache.

        Within a forward, layers have states, also those without K and V.
        """
        row_pass, layer_ids = self.row_pass, range(len(self))
        if row_pass is None:
            return [KVPageLayer(self, layer_idx) for layer_idx in layer_ids]
        return [StatefulLayer(self, layer_idx, row_pass.states) for layer_idx in layer_ids]

    @layers.setter
    def layers(self, layers: Sequence[object]) -> None:
        if layers:
            raise ValueError("layers of a KVPageCache are those of its pool's model, and cannot be set")

    def __getitem__(self, layer_idx: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return copies of a layer's K and V."""
        layer = self.layers[layer_idx]
        return layer.keys, layer.values

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Iterate as DynamicCache does: over K and V of each layer and, in some versions of transformers, a window."""
        iterate = getattr(DynamicCache, "__iter__", None)
        layers: Iterator[tuple[Any, ...]]
        layers = iter([(layer.keys, layer.values) for layer in self.layers]) if iterate is None else iterate(self)
        return layers

    def to_legacy_cache(self) -> tuple[tuple[torch.Tensor | None, torch.Tensor | None], ...]:
        """Return a pair of K and V for each layer."""
        return tuple(self[layer_idx] for layer_idx in range(len(self)))

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: only the number of blocks limits the length.

        Args:
            layer_idx: The layer; all have the same limit.
        """
        return -1

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """Return -1, as get_max_length.

        Args:
            layer_idx: The layer; all have the same limit.
        """
        return -1

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise TypeError: a copy would copy the pool. Another cache over the pool finds the same beginning."""
        raise TypeError("KVPageCache cannot be copied or pickled: make another one over the same pool")

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def is_sliding(self) -> list[bool]:
        """False for each layer: those with a sliding window keep all tokens."""
        return [False] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        """False for each layer: none has a state of linear attention."""
        return [False] * len(self)

    @property
    def is_dummy(self) -> list[bool]:
        """False for each layer."""
        return [False] * len(self)

    # --- called by mixers, whose states are of one position ---

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the states of a convolution, [num_rows, *shape], which the mixer may change; None before the first.

        Args:
            layer_idx: The layer.
            state_idx: Which of the layer's.
        """
        return self._states.get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return recurrent states, [num_rows, *shape], which the mixer may change; None before the first.

        Args:
            layer_idx: The layer.
            state_idx: Which of the layer's.
        """
        return self._states.get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Keep the last columns of a convolution's inputs.

        Args:
            conv_states: [num_rows, channels, tokens].
            layer_idx: The layer.
            state_idx: Which of the layer's.
            kwargs: Ignored.

        Returns:
            The columns before, and these.
        """
        return self._states.update_conv_state(conv_states, layer_idx, state_idx)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Keep recurrent states, and return them.

        Args:
            recurrent_states: [num_rows, *shape].
            layer_idx: The layer.
            state_idx: Which of the layer's.
            kwargs: Ignored.

        Returns:
            The same states.
        """
        return self._states.update_recurrent_state(recurrent_states, layer_idx, state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether there is a state before the tokens that are computed next.

        Args:
            layer_idx: The layer; None for any.
            state_idx: Which of the layer's.
        """
        if self.row_pass is None:
            return self.get_seq_length() > 0
        return self.row_pass.states.has_previous_state(layer_idx, state_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: states are of one position.

        Args:
            layer_idx: The layer.
        """
        return False

    @property
    def _states(self) -> PieceCache:
        if self.row_pass is None:
            raise ValueError("states must come from a forward of the pool's model, before release")
        return self.row_pass.states

    # --- called by the hooks: a ForwardListener ---

    @property
    def is_in_forward(self) -> bool:
        """Whether the model is computing with the cache."""
        return self._current() is not None

    @property
    def row_pass(self) -> RowPass | None:
        """The states that the model's mixers read, of the forward that is under way; None where none do."""
        forward = self._current()
        states = None if forward is None else forward.states
        return states if isinstance(states, RowPass) else None

    @property
    def runner(self) -> object | None:
        """What computes for the pool's model, a view with `same_bits`; None where the model computes by itself."""
        return self._pool.runner

    @property
    def nums_pads(self) -> list[int] | None:
        """The padding of each row, where the pool has `same_bits`; None where padding is computed."""
        return None if self.runner is None else self._rows.nums_pads

    @uninterrupted
    def begin_forward(self, arguments: Mapping[str, Any], call: FrameType) -> Forward:
        """Reserve blocks for the tokens that the model is about to compute. All checks come before any change.

        Args:
            arguments: the arguments of the model's call, by name.
            call: torch's frame of that call. The forward ends with it.

        Returns:
            The forward, which is under way.

        Raises:
            OutOfBlocks: where the tokens do not fit.
            ValueError: for arguments that the cache does not serve: see KVPageCache.
        """
        rows = self._rows
        tokens, start, is_whole = ForwardInputs.of_call(arguments, rows.length)
        self._pool.check_forward(tokens, start + tokens.shape[1])
        if self._pool.states is not None and start != rows.length:
            raise ValueError(f"a forward over states must begin at token {rows.length}, got {start}")
        pads = pads_of_forward(arguments, self.nums_pads, len(tokens), start, start + tokens.shape[1])
        if not len(rows):  # after a reset
            rows.open(tokens, are_findable(is_whole, pads), self._namespace, nums_pads=pads)
        repeats, rest = divmod(len(tokens), len(rows))
        if rest or not repeats:
            raise ValueError(f"input_ids must have {len(rows)} rows, or a multiple of it, got {len(tokens)}")
        rows.check(tokens, start, repeats)
        if pads is None:
            self._hide([all(is_whole[row : row + repeats]) for row in range(0, len(tokens), repeats)])
        if repeats > 1:
            self._repeat(repeats)
        try:
            slots = None if rows.begin_working(tokens, start) else self._begin_in_blocks(tokens, start)
        except OutOfBlocks:
            rows.select(range(0, len(rows), repeats))
            raise
        end = start + tokens.shape[1]
        states = rows.begin_states(start, end)
        self._forward = Forward(tokens, start, end, slots, set(self._pool.layers), repeats, call, states)
        return self._forward

    def finish_forward(self) -> None:
        """Count the forward's tokens as computed if every layer has written them."""
        forward = self._forward
        if forward and forward.is_done:
            self._rows.finish(forward.tokens, forward.start, forward.states)
        self._forward = None

    @uninterrupted
    def end_forward(self) -> None:
        """Undo a forward that has not finished: rows that it repeated are single again."""
        forward, self._forward = self._forward, None
        if forward and isinstance(forward.states, PackedPass):
            forward.states.undo()
        if forward and forward.repeats > 1:
            self._rows.select(range(0, len(self._rows), forward.repeats))

    # --- inside ---

    def _current(self) -> Forward | None:
        """Return the forward that is under way, if any. torch does not report that Ctrl-C ended one: it ends here."""
        if self._forward and not is_on_stack(self._forward.call):
            self.end_forward()
        return self._forward

    def _begin_in_blocks(self, tokens: TokenRows, start: int) -> RowSlots:
        """Begin a forward without working memory: K and V are written into blocks at once, and gathered."""
        self._rows.commit()
        if self._rows.working is not None:
            self._rows.working.drop()
        return self._rows.begin(tokens, start)

    def _repeat(self, repeats: int) -> None:
        if repeats > self._pool.manager.num_blocks:
            raise ValueError(f"repeats must be at most the number of blocks, got {repeats}")
        self._select([row for row in range(len(self._rows)) for _ in range(repeats)])

    def _select(self, indices: list[int]) -> None:
        self._current()
        self._rows.select(indices)

    def _hide(self, is_whole: list[bool]) -> None:
        """Make rows with padding unfindable. ValueError if tokens of such a row are computed or found already."""
        hidden = [row for row, whole in enumerate(is_whole) if not whole and self._rows.is_findable(row)]
        if not hidden:
            return
        if self._rows.length:
            raise ValueError(
                "attention_mask, position_ids and cache_position must show every token of a row in its place, after "
                f"what is cached of it; those of rows {hidden} do not"
            )
        self._rows.hide(hidden)

    def _checked_forward(self, key_states: torch.Tensor, layer_idx: int) -> Forward:
        """Return the forward to which these K belong. ValueError where there is none."""
        forward = self._current()
        if self.runner is not None:
            raise ValueError(
                f"generate must be called on the pool's model, which computes with same_bits, not on the "
                f"{type(self._pool.model).__name__} that it is a view of: layers of torch have other bits"
            )
        if forward is None or layer_idx not in forward.layers_left:
            raise ValueError(
                f"K and V of layer {layer_idx} must come from a forward of the pool's model, once each, before release"
            )
        shape = (key_states.shape[0], key_states.shape[2])
        if shape != forward.tokens.shape:
            raise ValueError(f"K must be of the rows and tokens {forward.tokens.shape} of input_ids, got {shape}")
        if key_states.requires_grad:
            raise ValueError("K and V must need no gradients, which do not pass through blocks: use torch.no_grad()")
        return forward


@dataclass(frozen=True, slots=True)
class _Held:
    """The rows and hooks that a cache gives back at its end. It does not refer to the cache."""

    rows: CachedRows
    hooks: Sequence[ForwardHooks | MixerHooks]

    def release(self) -> None:
        """Remove the hooks, and release the rows."""
        for hooks in self.hooks:
            hooks.remove()
        self.rows.release()
