"""Launching attention over blocks: one kernel, and the merging one where keys are split. Waits for nothing.

decodes of a batch     rows of one token, splits of their keys, a merge
                       those that share keys: see kvpage.kernels.attention_shared
its other sequences    tiles of many tokens, a launch of their own
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton.language as tl

from kvpage.kernels.attention import paged_attention_kernel
from kvpage.kernels.attention_constants import AttentionConstants
from kvpage.kernels.attention_fixed import fixed_attention_kernel, merge_fixed_kernel
from kvpage.kernels.attention_merge import MERGED, merge_splits_kernel
from kvpage.kernels.attention_plan import (
    ANY_NUMBER,
    MAX_SPLITS,
    MIN_ROWS,
    Sizes,
    Tile,
    choose_fixed_splits,
    choose_fixed_tile,
    choose_items,
    choose_pieces,
    choose_tile,
    min_keys_of_split,
    split_tiles,
)
from kvpage.kernels.prepared import HAS_DEPENDENT_LAUNCH, VERSION, Grid, Prepared, PreparedKinds, addresses_of, form
from kvpage.kernels.quantize import INTERPRETED
from kvpage.layout.attention import Attention
from kvpage.layout.shared_prefixes import max_groups

_COMPUTE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
ALIGNED = (*range(6), 11, 12, 13)  # tensors on whose alignment the kernel is specialised
# The compiler of 3.2 aborts at assembly with two results, and at conversions of e4m3 for some products.
WIDENS_BYTES = bool(INTERPRETED) or VERSION >= (3, 3)
FIXED_MERGE_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # sums as those of one program
_STORED = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


class Rows(NamedTuple):
    """K or V of one layer. data: [num_blocks, block_size, num_kv_heads, num_runs, run_size]. scales: fp32, None, of the
    first three dimensions, or of num_kv_heads alone."""

    data: torch.Tensor
    scales: torch.Tensor | None


class DeviceSequences(NamedTuple):
    """All on the device but the bounds. seq_lens, query_lens: [num_seqs], the latter None for one each.
    num_decodes: sequences at the beginning that have one query each, as far as the host knows them. shared: int64
    [9, num_decodes, or num_seqs of one query each], see PlanRow; None where nothing is shared. has_fixed_order: whether
    a row's sums must have one order, see kvpage.kernels.attention_fixed."""

    block_tables: torch.Tensor  # int32 [num_seqs, max_blocks]
    seq_lens: torch.Tensor
    query_lens: torch.Tensor | None
    max_seq_len: int
    max_query_len: int
    num_decodes: int = 0
    shared: torch.Tensor | None = None
    has_fixed_order: bool = False

    def decodes(self) -> "DeviceSequences":
        """Return the sequences at the beginning that have one query each."""
        few = slice(0, self.num_decodes)
        tables, lengths = self.block_tables[few], self.seq_lens[few]
        return DeviceSequences(tables, lengths, None, self.max_seq_len, 1, shared=self.shared)

    def prefills(self) -> "DeviceSequences":
        """Return the other sequences."""
        rest = slice(self.num_decodes, None)
        queries = None if self.query_lens is None else self.query_lens[rest]
        return DeviceSequences(
            self.block_tables[rest], self.seq_lens[rest], queries, self.max_seq_len, self.max_query_len
        )


class Device(NamedTuple):
    """What the launch has to know of where it runs. error: int32 [1]; gets BAD_BLOCK."""

    error: torch.Tensor
    num_multiprocessors: int
    capability: int  # 10 * major + minor
    shared_memory: int  # bytes that a thread block may have


class Plan(NamedTuple):
    """How a launch is cut into thread blocks; see kvpage.kernels.attention_plan."""

    sizes: Sizes
    tile: Tile
    tile_tokens: int
    num_tiles: int  # of queries
    head_tiles: int
    num_pieces: int  # of the keys of all sequences; 0 where none is split
    num_items: int  # a bound of each tile's splits, added up


def fixed_plan_of(
    query: torch.Tensor,
    value_size: int,
    key: Rows,
    value: Rows | None,
    sequences: DeviceSequences,
    device: Device,
    has_window: bool,
) -> Plan:
    """Choose what plan_of does, for fixed splits: tiles by sizes alone. num_pieces: 1 for a program each split."""
    num_tokens, num_seqs = len(query), len(sequences.seq_lens)
    sizes = sizes_of(query, value_size, key, value)
    tile = choose_fixed_tile(sizes, device.capability, device.shared_memory)
    tile_tokens, max_query_len = max(tile.rows // sizes.group_size, 1), min(sequences.max_query_len, num_tokens)
    num_tiles = min(num_seqs * -(-max_query_len // tile_tokens), num_tokens // tile_tokens + num_seqs)
    head_tiles, num_splits = key.data.shape[2] * -(-sizes.group_size // tile.rows), 1
    if not has_window:  # a window reads few splits of many
        num_rows, longest = num_tokens * query.shape[1], sequences.max_seq_len
        num_splits = choose_fixed_splits(num_tiles, head_tiles, longest, tile, num_rows, device.num_multiprocessors)
    return Plan(sizes, tile, tile_tokens, num_tiles, head_tiles, int(num_splits > 1), num_tiles * num_splits)


def plan_of(
    query: torch.Tensor,
    value_size: int,
    key: Rows,
    value: Rows | None,
    sequences: DeviceSequences,
    device: Device,
    keys: str = "all",
) -> Plan:
    """Choose tiles and splits from the shapes and the bounds, without waiting for the device. keys: see the constants.

    The plan depends on shapes, max_seq_len, max_query_len and num_decodes alone, and so do the grids and the sizes of
    partial results. A graph that is captured with a bucket's bounds may be replayed with any lengths up to them.
    """
    num_tokens, num_seqs = len(query), len(sequences.seq_lens)
    max_query_len = min(sequences.max_query_len, num_tokens)
    sizes = sizes_of(query, value_size, key, value)
    rows = sizes.group_size * min(max_query_len, -(-num_tokens // num_seqs))
    if keys == "shared":  # all sequences, as members of an outer and of an inner group
        num_seqs, max_query_len, rows = max_groups(num_seqs), num_tokens, sizes.group_size * num_tokens
        num_tokens *= 2
    tile = choose_tile(sizes, rows, device.capability, device.shared_memory)
    tile_tokens = tile.num_tokens(sizes.group_size, max_query_len)
    num_tiles = min(num_seqs * -(-max_query_len // tile_tokens), num_tokens // tile_tokens + num_seqs)
    head_tiles = key.data.shape[2] * -(-sizes.group_size // tile.rows)
    is_decode, longest = max_query_len == 1 or keys == "shared", sequences.max_seq_len
    num_pieces = choose_pieces(num_tiles, head_tiles, longest, tile, is_decode, device.num_multiprocessors)
    if keys != "all":  # all results are partial
        num_pieces = max(num_pieces, 1)
    num_items = choose_items(num_tiles, num_pieces, longest, tile)
    return Plan(sizes, tile, tile_tokens, num_tiles, head_tiles, num_pieces, num_items)


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, key_size]
    out: torch.Tensor,  # [num_tokens, num_heads, value_size]
    key: Rows,
    value: Rows | None,  # None: the first value_size elements of each key
    sequences: DeviceSequences,
    attention: Attention,  # scale is given, sinks are fp32, positions on the device
    device: Device,
) -> "list[AttentionLaunch]":
    """Launch attention, and the merging of its splits if there are several; decodes apart from the other sequences.

    Tiles for many queries would be mostly empty for one, and never split. Returns the launches, for other layers.
    """
    num_decodes, num_seqs = sequences.num_decodes, len(sequences.seq_lens)
    keys = "fixed" if sequences.has_fixed_order else "all"
    if not 0 < num_decodes < num_seqs:
        return launch_alike(query, out, key, value, sequences, attention, device, 0, keys)
    made = []
    for rows, part in (
        (slice(0, num_decodes), sequences.decodes()),
        (slice(num_decodes, None), sequences.prefills()),
    ):
        positions = None if attention.query_positions is None else attention.query_positions[rows]
        options = replace(attention, query_positions=positions)
        made += launch_alike(query[rows], out[rows], key, value, part, options, device, rows.start, keys)
    return made


def launch_alike(
    query: torch.Tensor,
    out: torch.Tensor,
    key: Rows,
    value: Rows | None,
    sequences: DeviceSequences,
    attention: Attention,
    device: Device,
    first_row: int,
    keys: str = "all",
) -> "list[AttentionLaunch]":
    """Do what paged_attention does, of sequences that are all decodes, or all cut alike.

    first_row: of all sequences' rows, these ones' first. keys: see AttentionConstants.
    """
    num_tokens, num_heads, _ = out.shape
    if num_tokens == 0 or len(sequences.seq_lens) == 0 or sequences.max_query_len == 0:
        return []
    part = part_of(query, out, key, value, sequences, attention, device, keys)
    known, lengths, counts = part.known, sequences.seq_lens, sequences.query_lens
    partial, sums = part.room(out) if part.num_partial or keys == "fixed" else (None, None)
    part.launch(query, out, key, value, sequences, attention, partial, sums, device)
    grids = part.grid, (num_tokens * num_heads, 1, 1)
    if part.num_partial:
        known.merge.launch(grids[1], (out, partial, sums, lengths, counts), part.merged)
    steps = first_row * query.stride(0) * query.element_size(), first_row * out.stride(0) * out.element_size()
    places = addresses_of((sequences.block_tables, lengths, counts))
    room = part.num_partial, out.shape[2]
    return [AttentionLaunch(known, steps, grids, part.numbers, part.merged, room, places)]


class Part(NamedTuple):
    """A launch of the attention kernel. num_partial: rows of partial results. merged: numbers of their merging."""

    known: "Known"
    grid: Grid
    numbers: tuple[float, ...]
    merged: tuple[int, ...]
    num_partial: int

    def room(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for partial values, and for their maxima and sums."""
        rows = self.num_partial // out.shape[1], out.shape[1]
        partial = out.new_empty(*rows, out.shape[2], dtype=torch.float32)
        return partial, out.new_empty(*rows, 2, dtype=torch.float32)

    def launch(
        self,
        query: torch.Tensor,
        out: torch.Tensor,
        key: Rows,
        value: Rows | None,
        sequences: DeviceSequences,
        attention: Attention,
        partial: torch.Tensor | None,
        sums: torch.Tensor | None,
        device: Device,
    ) -> None:
        """Launch it on these tensors, whose partial results go into `partial` and `sums`."""
        values, plan = key if value is None else value, sequences.shared
        stored = as_loaded(key, self.known.constants.KEY_PAIRS), as_loaded(values, self.known.constants.VALUE_PAIRS)
        tensors = (
            *(query, out, *stored, key.scales, values.scales, attention.sinks),
            *(sequences.block_tables, sequences.seq_lens, sequences.query_lens, attention.query_positions),
            *(partial, sums, device.error, plan),
        )
        self.known.attention.launch(self.grid, tensors, self.numbers)


def part_of(
    query: torch.Tensor,
    out: torch.Tensor,
    key: Rows,
    value: Rows | None,
    sequences: DeviceSequences,
    attention: Attention,
    device: Device,
    keys: str = "all",
) -> Part:
    """Choose a launch for these tensors. keys: see AttentionConstants."""
    (num_tokens, num_heads), num_seqs = out.shape[:2], len(sequences.seq_lens)
    known = _known(query, out, key, value, sequences, attention, device, keys)
    plan, shared = known.plan, sequences.shared
    capacity = sequences.block_tables.shape[1] * key.data.shape[1]
    window = min(attention.sliding_window or 0, 2**31 - 1)
    numbers = (
        *(*_factors(attention), window, plan.num_items, plan.num_pieces, key.data.shape[2]),
        *(max_groups(num_seqs) if keys == "shared" else num_seqs, num_tokens, len(key.data), capacity),
        *(*query.stride()[:2], *out.stride()[:2], sequences.block_tables.stride(0)),
        0 if shared is None else shared.stride(0),
    )
    merged = num_seqs, num_heads, plan.num_items, plan.num_pieces, capacity, window
    num_partial = plan.num_items * plan.tile_tokens * num_heads if plan.num_pieces else 0
    if keys == "fixed":  # a place for each split of each row
        merged = num_seqs, num_heads, num_tokens, plan.num_pieces, capacity, window
        num_partial = plan.num_items // plan.num_tiles * num_tokens * num_heads if plan.num_pieces else 0
    return Part(known, (plan.num_items * plan.head_tiles, 1, 1), numbers, merged, num_partial)


class AttentionLaunch(NamedTuple):
    """A launch that can be made again for another layer of a step, whose rows have the same form.

    steps: bytes from the beginning of the query, and of the output, to the launch's own rows. partial: rows of partial
    results and elements of each. places: addresses of the tables and lengths, which stay.
    """

    known: "Known"
    steps: tuple[int, int]
    grids: tuple[Grid, Grid]
    numbers: tuple[float, ...]
    merged: tuple[int, ...]
    partial: tuple[int, int]
    places: list[int]

    def again(self, query: torch.Tensor, out: torch.Tensor, cache: Sequence[int], error: torch.Tensor) -> bool:
        """Launch. cache: addresses of K and V and their scales. Return False if it must be launched anew."""
        rows, size = self.partial
        partial = sums = 0
        if rows:
            room = out.new_empty(rows * (size + 2), dtype=torch.float32)
            partial = room.data_ptr()
            sums = partial + 4 * rows * size
        out_address = out.data_ptr() + self.steps[1]
        tables, lengths, counts = self.places
        addresses = (
            *(query.data_ptr() + self.steps[0], out_address, *cache, 0),
            *(tables, lengths, counts, 0, partial, sums, error.data_ptr(), 0),
        )
        if not self.known.attention.repeat(self.grids[0], addresses, self.numbers):
            return False
        to_merge = out_address, partial, sums, lengths, counts
        return not rows or self.known.merge.repeat(self.grids[1], to_merge, self.merged)


class Known(NamedTuple):
    """A plan, and the launches of its kind: those with dtypes, strides and constants like its own."""

    plan: Plan
    constants: AttentionConstants
    attention: Prepared
    merge: Prepared


_plans = PreparedKinds()  # by shapes and bounds: the layers of a step have one
_kinds = PreparedKinds()  # by what kernels are compiled for: steps of many shapes have one


def _known(
    query: torch.Tensor,
    out: torch.Tensor,
    key: Rows,
    value: Rows | None,
    sequences: DeviceSequences,
    attention: Attention,
    device: Device,
    keys: str,
) -> Known:
    values, lengths = key if value is None else value, sequences.seq_lens
    tensors = lengths, sequences.query_lens, attention.sinks, attention.query_positions
    kind = (
        *(device.error.device, *device[1:], value is None, *map(form, (query, out, *key, *values))),
        *(None if tensor is None else tensor.dtype for tensor in tensors),
        *(attention.sliding_window is None, attention.softcap is None),
        *(key.data.data_ptr() % 2, values.data.data_ptr() % 2),
    )
    shape = kind, query.shape[0], lengths.shape[0], sequences.max_seq_len, sequences.max_query_len, keys
    known: Known | None = _plans.get(shape)
    if known is None:
        if keys == "fixed":
            has_window = attention.sliding_window is not None
            plan = fixed_plan_of(query, out.shape[2], key, value, sequences, device, has_window)
        else:
            plan = plan_of(query, out.shape[2], key, value, sequences, device, keys)
        constants = constants_of(plan, query, key, value, attention, device.capability, keys)
        of_kind = kind, constants, plan.tile, plan.num_pieces > 0 or keys == "fixed"
        prepared = _kinds.get(of_kind)
        if prepared is None:
            prepared = _prepared(plan.tile, constants, out, key, values)
            _kinds.keep(of_kind, prepared)
        known = Known(plan, constants, *prepared)
        _plans.keep(shape, known)
    return known


def _prepared(
    tile: Tile, constants: AttentionConstants, out: torch.Tensor, key: Rows, values: Rows
) -> tuple[Prepared, Prepared]:
    stored = as_loaded(key, constants.KEY_PAIRS), as_loaded(values, constants.VALUE_PAIRS)
    strides = *(rows.stride(i) for rows in stored for i in (0, 2, 3)), *_scale_strides(key), *_scale_strides(values)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": not constants.IS_FIXED}
    if constants.IS_FIXED:
        merge = Prepared(merge_fixed_kernel, (*out.stride()[:2], constants), FIXED_MERGE_OPTIONS, 0, range(3))
        return Prepared(fixed_attention_kernel, (*strides, constants), options, 0, ALIGNED), merge
    merged = *out.stride()[:2], MERGED, constants
    return (
        Prepared(paged_attention_kernel, (*strides, constants), options, 0, ALIGNED),
        Prepared(merge_splits_kernel, merged, merge_options(constants), 0, range(3)),
    )


def merge_options(constants: AttentionConstants) -> dict[str, Any]:
    """Return the options of a launch of the merging kernel."""
    return {"num_warps": 4, "enable_fp_fusion": True, **({"launch_pdl": True} if constants.DEPENDENT else {})}


def sizes_of(query: torch.Tensor, value_size: int, key: Rows, value: Rows | None) -> Sizes:
    group_size = query.shape[1] // key.data.shape[2]
    stored, computed = key.data.element_size(), query.element_size()
    is_scattered = value is not None and value.data.shape[3] > 1 and value.data.shape[4] == 1
    has_token_scales = key.data.dtype == torch.int8
    options = value is None, has_token_scales, is_scattered, key.data.shape[1]
    return Sizes(group_size, query.shape[2], value_size, stored, computed, *options)


def constants_of(
    plan: Plan,
    query: torch.Tensor,
    key: Rows,
    value: Rows | None,
    attention: Attention,
    capability: int,
    keys: str = "all",
) -> AttentionConstants:
    """Choose the kernel's constants. keys: see there."""
    sizes, tile, has_splits = plan.sizes, plan.tile, keys not in ("shared", "fixed")
    dtype, query_dtype = key.data.dtype, query.dtype
    stored = _STORED.get(dtype, "float")
    is_widened = dtype in _STORED and query_dtype != torch.float32
    narrow = is_widened and dtype != torch.int8
    value_rows = key if value is None else value
    key_pairs, value_pairs = (
        is_widened and WIDENS_BYTES and tile.rows == MIN_ROWS and size % 2 == 0 and _fits_pairs(rows.data)
        for rows, size in ((key, sizes.key_size), (value_rows, sizes.value_size))
    )
    key_data, value_data = as_loaded(key, key_pairs), as_loaded(value_rows, value_pairs)
    return AttentionConstants(
        GROUP=sizes.group_size,
        KEY_SIZE=sizes.key_size,
        VALUE_SIZE=sizes.value_size,
        BLOCK_SIZE=key.data.shape[1],
        KEY_RUN=_run_size(key),
        VALUE_RUN=_run_size(value_rows),
        QUERY_ALIGN=_alignment(query, 2),
        KEY_ALIGN=_alignment(key_data, 3),
        VALUE_ALIGN=_alignment(value_data, 3),
        KEY_OFFSET_STRIDE=key_data.stride(1),
        VALUE_OFFSET_STRIDE=value_data.stride(1),
        STORED="e4m3 bits" if stored == "e4m3" and (capability < 89 or not WIDENS_BYTES) else stored,
        COMPUTE=tl.float16 if narrow else _COMPUTE[query_dtype],
        PRECISION=tile.precision,
        NORMALIZE=narrow and query_dtype != torch.float16,
        TOKEN_SCALES=dtype == torch.int8,
        SCALE_VALUES=dtype == torch.int8 and query_dtype == torch.float16,
        SHARED=sizes.shares_rows and sizes.value_size <= tile.key_tile,
        SAME_STRIDES=value is not None and key_data.stride() == value_data.stride() and key_pairs == value_pairs,
        KEY_PAIRS=key_pairs,
        VALUE_PAIRS=value_pairs,
        WINDOW=attention.sliding_window is not None,
        SOFTCAP=attention.softcap is not None,
        TILE_ROWS=tile.rows,
        TILE_TOKENS=plan.tile_tokens,
        HEADS=min(tile.rows, sizes.group_size),
        TILE_KEYS=tile.keys,
        KEY_TILE=tile.key_tile,
        KEY_TAIL=tile.key_tail,
        VALUE_TILE=tile.value_tile,
        BOUNDED=has_splits and attention.sliding_window is not None and attention.query_positions is None,
        MIN_SPLIT_TILES=-(-min_keys_of_split(tile) // tile.keys),
        DEPENDENT=has_splits and plan.num_pieces > 0 and allows_dependent_launch(capability),
        KEYS=keys,
        SPLIT_TILES=split_tiles(tile) if keys == "fixed" else 0,
        MAX_SPLITS=ANY_NUMBER if keys == "fixed" else MAX_SPLITS,
    )


def allows_dependent_launch(capability: int) -> bool:
    """Return whether merging may begin while attention runs."""
    return capability >= 90 and HAS_DEPENDENT_LAUNCH and not INTERPRETED


def _run_size(rows: Rows) -> int:
    """One run, however long, needs no arithmetic."""
    return rows.data.shape[4] if rows.data.shape[3] > 1 else 2**20


def _alignment(rows: torch.Tensor, num_dims: int) -> int:
    """Elements, of 16 bytes at most, that divide the strides of the first dimensions: a load takes that many."""
    return math.gcd(16 // rows.element_size(), *rows.stride()[:num_dims])


def as_loaded(rows: Rows, in_pairs: bool) -> torch.Tensor:
    """Return 8-bit floats as bytes, which every device loads, or as int16 of two neighbours; others as they are."""
    if in_pairs:
        return rows.data.view(torch.int16)
    return rows.data.view(torch.uint8) if rows.data.dtype in _STORED and rows.data.dtype != torch.int8 else rows.data


def _fits_pairs(data: torch.Tensor) -> bool:
    """Return whether each row is of whole pairs, all of which begin at even addresses."""
    *strides, last = data.stride()
    return last == 1 and data.shape[-1] % 2 == 0 and data.data_ptr() % 2 == 0 and not any(n % 2 for n in strides)


def _scale_strides(rows: Rows) -> tuple[int, ...]:
    strides = () if rows.scales is None else rows.scales.stride()
    return (0,) * (3 - len(strides)) + strides


def _factors(attention: Attention) -> tuple[float, float]:
    """`factor` and `softcap` of the kernel: scores are in units of log 2 there."""
    assert attention.scale is not None, "kvpage.ops.attention gives it"
    if attention.softcap is None:
        return attention.scale * math.log2(math.e), 0.0
    return 2.0 * attention.scale / attention.softcap * math.log2(math.e), attention.softcap * math.log2(math.e)
