"""The form of a plan of shared prefixes: which keys attention reads once for several sequences.

                 sequences              groups                      columns
    OWN_BEGIN    384  0    256  384     GROUP_FIRST   0    0   ..
    OUTER_GROUP  0    -1   0    0       GROUP_COUNT   3    2   ..
    INNER_GROUP  1    -1   -1   1       KEY_BEGIN     0    256 ..
    RANK         0    3    2    1       KEY_END       256  384 ..
    ORDER        0    3    2    1

Sequences 0, 2 and 3 share 256 keys, and 0 and 3 share 128 more.
"""

from enum import IntEnum

GRANULE = 128
"""Keys: groups begin and end at multiples of it, with which tiles of keys of every size begin."""

MAX_GROUPS = 64
"""Each group may leave a tile with few rows."""


class PlanRow(IntEnum):
    """The rows of a plan of shared prefixes, int64 [9, num_seqs], as csrc/attention/shared_prefixes.h has them.

    The first five have a number for each sequence: the first key that it reads alone; its outer and its inner group, -1
    for none; its place in ORDER; and the sequences themselves, so that members of a group are neighbours. The others
    have a number for each group: the place of its first member, its members, and its keys.
    """

    OWN_BEGIN = 0
    OUTER_GROUP = 1
    INNER_GROUP = 2
    RANK = 3
    ORDER = 4
    GROUP_FIRST = 5
    GROUP_COUNT = 6
    KEY_BEGIN = 7
    KEY_END = 8


def max_groups(num_seqs: int) -> int:
    """Return a bound of the groups of so many sequences."""
    return min(num_seqs // 2, MAX_GROUPS)
