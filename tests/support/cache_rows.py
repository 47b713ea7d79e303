"""K and V of one layer as tests look at them."""


def split_kv(layout, cache):
    """Views [num_blocks, block_size, num_kv_heads, head_size] of layouts whose heads are one run of memory."""
    views = layout.views(cache)
    return tuple(None if view is None else view.rows.squeeze(3)[..., : layout.head_size] for view in views)
