"""Who owns which block: the invariants of a BlockManager, checked from the outside.

device tier = free + cached in the tree + owned by sequences        host tier the same, by swapped sequences
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from kvpage.blocks.sequence import SequenceState, SwappedState
from kvpage.blocks.space import BlockSpace
from kvpage.blocks.table import BlockTables, Ids


def own_ids(tables: BlockTables, seq: SequenceState) -> Ids:
    """The blocks that the sequence itself holds a reference to: a view, valid until its next change."""
    return tables.ids(seq.row)[seq.match.num_blocks + seq.num_left :]


def check_blocks(
    space: BlockSpace,
    tables: BlockTables,
    sequences: Mapping[object, SequenceState],
    swapped: Mapping[object, SwappedState],
) -> None:
    """RuntimeError, with the numbers, if an invariant of pools, tree or ownership is broken."""
    space.pool.check()
    space.tree.check()
    for seq_id, seq in sequences.items():
        _check_sequence(seq_id, seq, tables)
    holders = Counter(block_id for seq in sequences.values() for block_id in own_ids(tables, seq).tolist())
    for block_id, num_holders in holders.items():
        if space.pool.ref_count(block_id) != num_holders:
            raise RuntimeError(
                f"block {block_id} has {space.pool.ref_count(block_id)} references and {num_holders} holders"
            )
    space.check_host([host_id for seq in swapped.values() for host_id in seq.host_ids.tolist()])
    if space.pool.num_free + space.tree.num_cached + len(holders) != space.pool.num_blocks:
        raise RuntimeError(
            f"{space.pool.num_free} free + {space.tree.num_cached} cached + {len(holders)} owned "
            f"is not {space.pool.num_blocks}"
        )


def _check_sequence(seq_id: object, seq: SequenceState, tables: BlockTables) -> None:
    ids = tables.ids(seq.row)
    if len(ids) != -(-seq.num_tokens // tables.block_size):
        raise RuntimeError(f"sequence {seq_id!r} has {len(ids)} blocks for {seq.num_tokens} tokens")
    if not np.array_equal(ids[: seq.match.num_blocks], seq.match.block_ids):
        raise RuntimeError(f"sequence {seq_id!r} and the tree differ in its cached blocks")
