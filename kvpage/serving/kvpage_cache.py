"""KVPageCache: blocks for those who keep `model.generate`.

    pool = KVPagePool.from_model(model, CacheConfig(num_gpu_blocks=256))
    with KVPageCache(pool, input_ids) as cache:
        model.generate(input_ids, past_key_values=cache, max_new_tokens=20)     computes what is not cached yet
    with KVPageCache(pool, longer_ids) as cache: ...                            finds all that was, the answer too

The model sees a transformers Cache: each layer hands over new K and V, which go into the blocks of the batch's rows,
and gets all of the rows back. What a row's blocks hold is what the model was really given: a hook on its forward notes
the token ids, and a row whose K and V are not determined by its tokens alone (padding, positions of one's own,
embeddings instead of tokens) becomes private: nobody finds it.

    rows     [ tokens so far ............ | of the running forward ]
                            num_settled    length of the layers: they reach it one after the other
"""

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvpage import ops
from kvpage.sequence_args import check_namespace
from kvpage.serving.attention import row_dtype
from kvpage.serving.kv_page_pool import KVPagePool
from kvpage.tokens import as_tokens


class _Row:
    """One sequence of the batch; itself its id in the block manager."""

    def __init__(self, tokens: list[int], num_room: int) -> None:
        self.tokens = tokens  # that the forwards so far were given, the running one included
        self.num_room = num_room


class _Layer(CacheLayerMixin):
    """A layer's view of the rows: how many tokens of each it has written."""

    is_compileable = False
    is_sliding = False  # all tokens are kept; the window is the mask's affair
    supports_early_init = False

    def __init__(self, cache: "KVPageCache", index: int) -> None:
        super().__init__()
        self.cache, self.index, self.length = cache, index, 0
        self.is_initialized = True

    def lazy_initialization(self, *args: Any) -> None:
        """There is nothing to make."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.cache._update(self, key_states, value_states)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """(keys, offset) of a forward; older versions of transformers give its positions instead of their number."""
        count = query_length.shape[0] if isinstance(query_length, torch.Tensor) else query_length
        return self.length + count, 0

    def get_seq_length(self, *args: Any) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    @property
    def batch_size(self) -> int:
        return self.cache.num_rows


class _WeakHook:
    """Tells a cache of a forward, and does not keep it: the model keeps its hooks."""

    def __init__(self, cache: "KVPageCache") -> None:
        self._cache = weakref.ref(cache)
        self._handle = cache.pool.model.register_forward_pre_hook(self, with_kwargs=True)

    def remove(self) -> None:
        self._handle.remove()

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = self._cache()
        if cache is None:
            self.remove()
        else:
            cache._before_forward(module, args, kwargs)


class KVPageCache(Cache):
    """The cache of one batch, for `past_key_values`. Use it in `with`, or `close` it.

    input_ids: [batch, length], as they are going to `generate`. The longest prefix that is cached of every row is
        there at once, but for the last token at least, so that `generate` computes the rest only. Rows of a batch have
        one length: the shortest of their prefixes.
    attention_mask: the same shape; needed where rows are padded. A padded row is computed in full, and so is then the
        whole batch. namespace: only what was computed in the same one is found.

    Beams, several returned sequences, chunked prefill and assisted generation (which computes the whole prompt) work.
    Tokens are those of `generate` without it (in fp32; blocks that quantise change them). OutOfBlocks comes out of
    `generate` when blocks lack; closing then gives all back, and what was computed before stays to be found.

    Raises ValueError for other shapes, OutOfBlocks if the prompts alone do not fit.
    """

    def __init__(
        self,
        pool: KVPagePool,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        namespace: bytes = b"",
    ) -> None:
        check_namespace(namespace)
        if input_ids.dim() != 2 or input_ids.numel() == 0:
            raise ValueError(f"input_ids must be [batch, length], not empty, got shape {list(input_ids.shape)}")
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids, {list(input_ids.shape)}, "
                f"got {list(attention_mask.shape)}"
            )
        pool.release_forgotten()
        self.pool, self.namespace = pool, namespace
        self._rows: list[_Row] = []
        self._prompts: list[np.ndarray] = []
        self._num_found = self._num_settled = 0
        self._slots: tuple[tuple[int, int], torch.Tensor, torch.Tensor] | None = None
        self._layers = [_Layer(self, index) for index in range(len(pool.engine.gpu_cache))]
        super().__init__(layers=list(self._layers))
        self._is_closed = False
        is_padded = attention_mask is not None and not bool(attention_mask.bool().all())
        self._find_prefix([as_tokens(row) for row in input_ids.cpu().numpy()], 0 if is_padded else None)
        self._hook = _WeakHook(self)

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def close(self) -> None:
        """Gives the rows' blocks back; what they hold can be found until it is evicted. Twice is fine."""
        if not self._is_closed:
            self._is_closed = True
            self._hook.remove()
            self._settle()
            self._keep([])

    def __del__(self) -> None:
        if getattr(self, "_hook", None) is not None and not self._is_closed:
            self.pool.forgotten += self._rows

    def __enter__(self) -> "KVPageCache":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- what transformers asks of a cache ---------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        """Tokens that the layer holds."""
        return self._layers[layer_idx].length

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes what row beam_idx[i] was; rows that go on twice share their blocks until they differ."""
        self._settle()
        self._keep(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows named, in their order."""
        self._settle()
        chosen = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._keep(chosen.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one after the other."""
        self._settle()
        self._keep([index for index in range(self.num_rows) for _ in range(repeats)])

    def crop(self, count: int) -> None:
        """A negative number takes so many tokens off. A positive one is the length to keep, in the versions of
        transformers whose `crop` has a max_length; 0 keeps nothing there, and everything in the others.
        """
        takes_length = "max_length" in inspect.signature(Cache.crop).parameters
        if count > 0 and not takes_length:
            raise ValueError(f"crop must be given how many tokens to take off as a negative number, got {count}")
        length = self.get_seq_length()
        self._shorten(count if takes_length and count >= 0 else length + count)

    def reset(self) -> None:
        """Empties the cache; what it holds can be found until it is evicted."""
        self._settle()
        self._keep([])
        self._num_found = 0
        self._set_lengths(0)

    # --- around a forward --------------------------------------------------------------------------------------------

    def _before_forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes which tokens are coming, and whether they say all about the K and V that will come."""
        if kwargs.get("past_key_values") is not self:
            return
        self._settle()
        input_ids = kwargs.get("input_ids", args[0] if args else None)
        if input_ids is None:
            rows = [[0] * kwargs["inputs_embeds"].shape[1]] * kwargs["inputs_embeds"].shape[0]
        else:
            rows = input_ids.tolist()
        self._fit_batch(rows)
        self._start_over(kwargs.get("position_ids"))
        are_plain = self._are_plain(kwargs, len(rows[0])) if input_ids is not None else [False] * len(rows)
        if self._num_settled == self._num_found > 0 and not all(are_plain):
            raise ValueError(
                "input_ids and attention_mask must be given to KVPageCache as they are to the model: a prefix was "
                "found for rows that are padded, or whose positions are not 0, 1, 2, ..."
            )
        for row, tokens, is_plain in zip(self._rows, rows, are_plain, strict=True):
            row.tokens += tokens
            if not is_plain:
                self.pool.manager.make_private(row)

    def _start_over(self, positions: torch.Tensor | None) -> None:
        """Forgets what was found if the first forward is given all tokens nevertheless, as in assisted generation."""
        if self._num_settled == self._num_found > 0 and positions is not None and bool((positions[..., 0] == 0).all()):
            prompts = self._prompts
            self._keep([])
            self._find_prefix(prompts, 0)

    def _are_plain(self, kwargs: dict[str, Any], num_new: int) -> list[bool]:
        """For each row: no padding, and every token at the position where it stands."""
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        are_plain = torch.ones(self.num_rows, dtype=torch.bool)
        if mask is not None:
            is_simple = isinstance(mask, torch.Tensor) and mask.dim() == 2
            are_plain &= mask.bool().all(dim=1).cpu() if is_simple else False
        if positions is not None:
            expected = torch.arange(self._num_settled, self._num_settled + num_new)
            are_plain &= (positions.cpu() == expected).all(dim=-1)
        return are_plain.tolist()

    def _fit_batch(self, rows: Sequence[Sequence[int]]) -> None:
        """As many rows as the forward has: anew after a reset, several of each for beams."""
        if not self._rows:
            self._find_prefix([as_tokens(row) for row in rows], 0)
        is_new = self._num_settled == self._num_found
        if is_new and len(rows) != self.num_rows and len(rows) % self.num_rows == 0:
            self._repeat(len(rows) // self.num_rows)
        if len(rows) != self.num_rows:
            raise ValueError(
                f"the cache must be of the batch that is computed, it has {self.num_rows} rows for {len(rows)}"
            )

    def _repeat(self, repeats: int) -> None:
        """Each row `repeats` times, before anything is computed: a fork would need that."""
        manager, added = self.pool.manager, []
        try:
            for row, prompt in zip(self._rows, self._prompts, strict=True):
                for _ in range(repeats - 1):
                    copy = _Row(list(row.tokens), len(prompt))
                    given = manager.allocate(copy, prompt, self.namespace, max_cached_tokens=self._num_found)
                    added.append(copy)
                    assert given.num_cached_tokens == self._num_found, "`row` pins what was found"
        except BaseException:
            for copy in added:
                manager.release(copy)
            raise
        groups = [added[begin : begin + repeats - 1] for begin in range(0, len(added), repeats - 1)]
        self._rows = [one for row, copies in zip(self._rows, groups, strict=True) for one in (row, *copies)]
        self._prompts = [prompt for prompt in self._prompts for _ in range(repeats)]

    def _find_prefix(self, prompts: Sequence[np.ndarray], most: int | None) -> None:
        """Rows for the prompts, all with as many cached tokens, at most `most`."""
        manager = self.pool.manager
        found: dict[int, int] = {}
        rows = [_Row(prompt.tolist(), len(prompt)) for prompt in prompts]
        try:
            while len(found) < len(rows) or len(set(found.values())) > 1:
                for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
                    if index in found and found[index] == most:
                        continue
                    if index in found:
                        manager.release(row)
                        del found[index]
                    given = manager.allocate(row, prompt, self.namespace, max_cached_tokens=most)
                    found[index] = given.num_cached_tokens
                most = min(found.values())
        except BaseException:
            for index in found:
                manager.release(rows[index])
            raise
        self._num_found = self._num_settled = most or 0
        for row in rows:
            del row.tokens[self._num_found :]
        self._rows, self._prompts = rows, list(prompts)
        self._set_lengths(self._num_found)

    def _settle(self) -> None:
        """After a forward: its tokens can be found. After one that failed half-way, as if it had not been."""
        length = min(layer.length for layer in self._layers)
        if length > self._num_settled and all(layer.length == length for layer in self._layers):
            for row in self._rows:
                self._check_noted(row, length)
                self.pool.manager.commit(row, row.tokens[self._num_settled : length])
            self._num_settled = length
        self._set_lengths(self._num_settled)
        for row in self._rows:
            del row.tokens[self._num_settled :]

    def _check_noted(self, row: _Row, length: int) -> None:
        """A forward that went past the hook has left K and V of tokens that nobody knows."""
        if len(row.tokens) != length:
            self.pool.manager.make_private(row)
            row.tokens[self._num_settled :] = [0] * (length - self._num_settled)

    def _set_lengths(self, length: int) -> None:
        for layer in self._layers:
            layer.length = length
        self._num_settled = min(self._num_settled, length)
        self._slots = None

    # --- rows --------------------------------------------------------------------------------------------------------

    def _keep(self, indices: Sequence[int]) -> None:
        """The rows named, in that order: the first of a name goes on, others are forks; the rest ends."""
        manager, heirs, kept = self.pool.manager, set(), []
        for index in indices:
            row = self._rows[index]
            if index in heirs:
                manager.give_back_room(row)
                row.num_room = self._num_settled
                fork = _Row(list(row.tokens), row.num_room)
                manager.fork(row, fork)
                row = fork
            heirs.add(index)
            kept.append(row)
        for index, row in enumerate(self._rows):
            if index not in heirs:
                manager.release(row)
        self._rows = kept
        self._slots = None

    def _shorten(self, length: int) -> None:
        if length >= self.get_seq_length():
            return
        if length >= self._num_settled:  # the running forward's tokens: not committed yet
            self._set_lengths(length)
            for row in self._rows:
                del row.tokens[length:]
            return
        if length <= 0:
            self.reset()
            return
        self._settle()
        for index, row in enumerate(self._rows):
            self._rows[index] = self._shortened(row, length)
        self._set_lengths(length)

    def _shortened(self, row: _Row, length: int) -> _Row:
        """A row of its first tokens, in the same blocks as far as these are full."""
        manager, short = self.pool.manager, _Row(row.tokens[:length], length)
        manager.give_back_room(row)
        if length >= manager.first_forkable(row):
            manager.fork(row, short, length)
        else:  # within what the tree holds: it finds it, before `row` lets go of it
            given = manager.allocate(short, [*short.tokens, 0], self.namespace, max_cached_tokens=length)
            assert given.num_cached_tokens == length
            short.num_room = length + 1
        manager.release(row)
        return short

    # --- K and V -----------------------------------------------------------------------------------------------------

    def _update(self, layer: _Layer, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """key, value: [rows, heads, num_new, size]. Returns all of the rows: [rows, heads, length, size] each."""
        start, end = layer.length, layer.length + key.shape[2]
        slots, tables = self._slots_and_tables(start, end)
        engine = self.pool.engine
        cache, layout = engine.gpu_cache[layer.index], engine.layout
        scales = engine.kv_scales[layer.index] if engine.kv_scales else None
        dtype = row_dtype(key.dtype, layout)
        key_rows, value_rows = (part.transpose(1, 2).flatten(0, 1).to(dtype) for part in (key, value))
        if self.pool.holds_latents:
            ops.reshape_and_cache(torch.cat([key_rows, value_rows], dim=-1), None, cache, slots, layout, scales)
        else:
            ops.reshape_and_cache(key_rows, value_rows, cache, slots, layout, scales)
        lengths = [end] * self.num_rows
        keys, values = ops.gather_cache(cache, tables, lengths, layout, scales=scales, dtype=dtype)
        layer.length = end
        if values is None:
            keys, values = keys.split([key.shape[3], value.shape[3]], dim=-1)
        return self._as_batch(keys, key), self._as_batch(values, value)

    def _as_batch(self, gathered: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        rows = gathered[..., : like.shape[3]].unflatten(0, (self.num_rows, -1))
        return rows.transpose(1, 2).to(like.dtype)

    def _slots_and_tables(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the rows' positions [start, end); made once a forward, with room for them."""
        if self._slots is None or self._slots[0] != (start, end):
            manager, device = self.pool.manager, self.pool.engine.device
            manager.append(self._rows, [max(end - row.num_room, 0) for row in self._rows])
            for row in self._rows:
                row.num_room = max(row.num_room, end)
            self.pool.engine.move(manager.take_moves())
            slots = manager.slot_mappings(self._rows, [start] * self.num_rows, [end] * self.num_rows)
            tables = manager.block_tables(self._rows)
            self._slots = (start, end), torch.from_numpy(slots).to(device), torch.from_numpy(tables).to(device)
        return self._slots[1], self._slots[2]
