"""Stamps: contents that tell whose they are. Every 16 bytes of a payload say (key, layer, slot, generation).

    payload   [ key 7 | layer 0 | slot 0 | generation 3 ][ 7 | 0 | 1 | 3 ] ... [ 7 | 1 | 0 | 3 ] ...

so that a wrong byte in what was read names the record, the place in it and the writing that it comes from.
"""

import numpy as np
from support.store_records import META, STRETCH, key, trailer

from kvpage.store.records.record import RecordHead

NUM_LAYERS = 2
STAMP_BYTES = 16


def stamps(n: int, generation: int, num_layers: int, num_slots: int) -> np.ndarray:
    """uint32 [num_layers, num_slots, 4]."""
    words = np.empty((num_layers, num_slots, 4), np.uint32)
    words[..., 0], words[..., 3] = n, generation
    words[..., 1] = np.arange(num_layers)[:, None]
    words[..., 2] = np.arange(num_slots)
    return words


def num_slots(n: int, generation: int) -> int:
    """Of key n's record of a generation: 0.1 to 12 KiB, another length each time."""
    return 3 + (n * 37 + generation * 101) % 380


def stamped(n: int, generation: int) -> bytes:
    """The whole record of key n."""
    payload = stamps(n, generation, NUM_LAYERS, num_slots(n, generation)).tobytes()
    shape = (NUM_LAYERS, 1, 1, num_slots(n, generation), 4)
    head = RecordHead(key(n), META, "uint32", shape, len(payload), len(payload), STRETCH).pack()
    return head + payload + trailer(head, payload)


def difference(found: bytes, wanted: bytes, payload_begin: int = 128) -> str:
    """What is wrong: where, and whose bytes stand there."""
    if len(found) != len(wanted):
        return f"{len(found)} bytes instead of {len(wanted)}; {_whose(found, payload_begin, payload_begin)}"
    at = int(np.argmax(np.frombuffer(found, np.uint8) != np.frombuffer(wanted, np.uint8)))
    return f"byte {at}: {_whose(found, at, payload_begin)}; wanted: {_whose(wanted, at, payload_begin)}"


def _whose(data: bytes, at: int, payload_begin: int) -> str:
    begin = payload_begin + (at - payload_begin) // STAMP_BYTES * STAMP_BYTES
    if not payload_begin <= begin <= len(data) - 2 * STAMP_BYTES:
        return "outside the payload"
    n, layer, slot, generation = np.frombuffer(data, np.uint32, 4, begin)
    return f"key {n}, layer {layer}, slot {slot}, generation {generation}"
