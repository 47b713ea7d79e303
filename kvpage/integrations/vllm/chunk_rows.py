"""ChunkRows: vLLM's host memory as one row of bytes for each chunk."""

import ctypes

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.uint8]


class ChunkRows:
    """The rows of vLLM's host memory. Rows hold the address alone.

    vLLM frees this memory when it shuts down, and cannot do so while an array or a view of it lives. A thread may keep
    one for an instant after its job is done. So rows are made of addresses; jobs must be over before the memory goes.
    """

    def __init__(self, view: memoryview) -> None:
        """Take the view that vLLM gives to a tier.

        Args:
            view: Contiguous, [chunks, bytes of a chunk], one byte each.

        Raises:
            ValueError: It has another shape, or other strides.
        """
        shape = view.shape
        if shape is None or len(shape) != 2 or view.itemsize != 1 or not view.c_contiguous:
            raise ValueError(
                f"primary_kv_view must be contiguous bytes [chunks, bytes], got shape {shape}, strides {view.strides}"
            )
        self.num_chunks, self.num_bytes = shape
        array = np.frombuffer(view, np.uint8)
        self._address = array.ctypes.data
        del array

    def __getitem__(self, chunk_id: int) -> Row:
        """Return the bytes of a chunk, without a copy. Raises IndexError for an id that is none."""
        if not 0 <= chunk_id < self.num_chunks:
            raise IndexError(f"chunk_id must be in 0..{self.num_chunks - 1}, got {chunk_id}")
        memory = (ctypes.c_uint8 * self.num_bytes).from_address(self._address + chunk_id * self.num_bytes)
        return np.ctypeslib.as_array(memory)
