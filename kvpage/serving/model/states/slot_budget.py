"""slots_within: how many state slots, with their tail blocks, a budget of bytes allows."""


def slots_within(field: str, num_bytes: int, slot_bytes: int, least: int = 0) -> int:
    """Return how many slots so many bytes are. ValueError for less than one slot, and more than none.

    field: of StateConfig. slot_bytes: of a state and its tail. least: slots that there must be.
    """
    num_slots = num_bytes // slot_bytes
    if num_slots < least or (num_bytes and not num_slots):
        others = "" if least else "0, or "
        raise ValueError(f"{field} must be {others}{slot_bytes} or more, a state and its tail, got {num_bytes}")
    return num_slots
