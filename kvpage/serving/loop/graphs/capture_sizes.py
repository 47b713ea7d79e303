"""The numbers of sequences for which decode steps are captured.

1   2   4   8   16   24   32   48   64   96   128   192   256 ...      and max_num_seqs
"""


def default_sizes(max_num_seqs: int) -> list[int]:
    """Return powers of two, from 16 on also those between them, up to max_num_seqs, and that itself.

    At most half of a step's rows are padding, from 16 on a third.
    """
    sizes, size = {max_num_seqs}, 1
    while size < max_num_seqs:
        sizes.add(size)
        if size >= 16 and 3 * size // 2 < max_num_seqs:
            sizes.add(3 * size // 2)
        size *= 2
    return sorted(sizes)
