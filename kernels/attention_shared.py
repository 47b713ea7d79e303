"""Launching decodes whose sequences share keys: these are read once for all members of a group, and the others apart.

    tables               a: 1 2 3 7                groups     {a, c, d}: keys of 1 2, {a, d}: keys of 3
                         b: 4 5                    own keys   a: 7    b: 4 5    c: 9    d: 6
                         c: 1 2 9
                         d: 1 2 3 6

    shared keys          a group in place of a sequence, the last tokens of its members in place of queries
    own keys             a decode as any other, from the first key on that no group of it reads
    merging              of each row: its own splits, then those of its outer and of its inner group

Sinks count with own keys. The plan (kvpage.ops.shared_prefixes) stays on the device: a captured graph may be replayed
with any other. Groups that are not there have no keys.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from kvpage.kernels.attention_launch import (
    AttentionLaunch,
    Device,
    DeviceSequences,
    Part,
    Rows,
    launch_alike,
    merge_options,
    part_of,
)
from kvpage.kernels.attention_launch import paged_attention as attend_apart
from kvpage.kernels.attention_merge import MERGED, merge_shared_kernel
from kvpage.kernels.prepared import Grid, Prepared, PreparedKinds, addresses_of
from kvpage.layout.attention import Attention
from kvpage.layout.shared_prefixes import max_groups

_merges = PreparedKinds()  # by the two kernels whose results they merge


class SharedLaunch(NamedTuple):
    """Launches that can be made again for another layer of a step, as AttentionLaunch.

    value_size: elements of a partial result. places: addresses of tables, lengths and plan, which stay.
    """

    groups: Part
    own_part: Part
    merge: Prepared
    merge_grid: Grid
    merged: tuple[int, ...]
    value_size: int
    places: list[int]

    def again(self, query: torch.Tensor, out: torch.Tensor, cache: Sequence[int], error: torch.Tensor) -> bool:
        """Launch. cache: addresses of K and V and their scales. Return False if all must be launched anew."""
        num_rows = self.groups.num_partial, self.own_part.num_partial
        room = out.new_empty(sum(num_rows) * (self.value_size + 2), dtype=torch.float32)
        tables, lengths, plan = self.places
        rows: list[int] = []
        for part, first in ((self.groups, 0), (self.own_part, num_rows[0])):
            partial = room.data_ptr() + 4 * first * (self.value_size + 2)
            rows += partial, partial + 4 * part.num_partial * self.value_size
            addresses = (
                *(query.data_ptr(), out.data_ptr(), *cache, 0, tables, lengths, 0, 0),
                *(*rows[-2:], error.data_ptr(), plan),
            )
            if not part.known.attention.repeat(part.grid, addresses, part.numbers):
                return False
        return self.merge.repeat(self.merge_grid, (out.data_ptr(), *rows[2:], *rows[:2], lengths, plan), self.merged)


def paged_attention(
    query: torch.Tensor,
    out: torch.Tensor,
    key: Rows,
    value: Rows | None,
    sequences: DeviceSequences,
    attention: Attention,
    device: Device,
) -> list[AttentionLaunch | SharedLaunch]:
    """Do what attention_launch's paged_attention does; read keys once that decodes share, where there is a plan."""
    num_decodes = len(sequences.seq_lens) if sequences.query_lens is None else sequences.num_decodes
    few = slice(0, num_decodes)
    decodes = sequences if sequences.query_lens is None else sequences.decodes()
    shared = attend_shared(query[few], out[few], key, value, decodes, attention, device)
    if shared is None:
        return [*attend_apart(query, out, key, value, sequences._replace(shared=None), attention, device)]
    rest, prefills = slice(num_decodes, None), sequences.prefills()
    return [shared, *launch_alike(query[rest], out[rest], key, value, prefills, attention, device, num_decodes)]


def attend_shared(
    query: torch.Tensor,
    out: torch.Tensor,
    key: Rows,
    value: Rows | None,
    sequences: DeviceSequences,
    attention: Attention,
    device: Device,
) -> SharedLaunch | None:
    """Launch decodes by the plan of their sequences. None, with nothing done, where that would save nothing.

    That is so where a tile has room for the heads of one sequence only.
    """
    assert sequences.shared is not None, "it is called where there is a plan"
    if max_groups(len(sequences.seq_lens)) == 0 or attention.query_positions is not None:
        return None
    options = replace(attention, sinks=None)
    groups = part_of(query, out, key, value, sequences, options, device, "shared")
    if groups.known.plan.tile_tokens == 1:
        return None
    own_part = part_of(query, out, key, value, sequences, attention, device, "own")
    group_rows, own_rows = groups.room(out), own_part.room(out)
    groups.launch(query, out, key, value, sequences, options, *group_rows, device)
    own_part.launch(query, out, key, value, sequences, attention, *own_rows, device)
    merge, grid = _merge_of(groups, own_part, out), (out.shape[0] * out.shape[1], 1, 1)
    merged = _merged(groups, own_part, sequences)
    lengths, plan = sequences.seq_lens, sequences.shared
    merge.launch(grid, (out, *own_rows, *group_rows, lengths, plan), merged)
    places = addresses_of((sequences.block_tables, lengths, plan))
    return SharedLaunch(groups, own_part, merge, grid, merged, out.shape[2], places)


def _merged(groups: Part, own_part: Part, sequences: DeviceSequences) -> tuple[int, ...]:
    """Return the numbers of the merging kernel."""
    assert sequences.shared is not None
    num_seqs, num_heads, num_items, num_pieces, capacity, window = own_part.merged
    _, _, num_group_items, num_group_pieces, *_ = groups.merged
    of_groups = max_groups(num_seqs), num_group_items, num_group_pieces
    return num_seqs, num_heads, num_items, num_pieces, *of_groups, capacity, window, sequences.shared.stride(0)


def _merge_of(groups: Part, own_part: Part, out: torch.Tensor) -> Prepared:
    constants = groups.known.constants, own_part.known.constants
    kind = constants, out.dtype, out.stride()[:2]
    merge: Prepared | None = _merges.get(kind)
    if merge is None:
        fixed = *out.stride()[:2], MERGED, *constants
        merge = Prepared(merge_shared_kernel, fixed, merge_options(own_part.known.constants), 0, range(5))
        _merges.keep(kind, merge)
    return merge
