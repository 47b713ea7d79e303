"""GuidedSequence: how far one sequence has come in its guide, and which tokens may follow.

generated   { "name" : "A     the matcher follows them, one by one; tokens that are taken back begin it anew
mask        [ 0b...01001, ... ]     a bit for each token of the vocabulary
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint32]


class GuidedSequence:
    """One sequence in its guide.

    matcher: of llguidance, at the begin of the guide; its own. num_bits: tokens that it knows.
    end_ids: the tokens that end a sequence, of which the matcher knows the first. ignores_ends: whether none may come.
    origin: what is to live as long as the sequence.
    """

    def __init__(
        self,
        matcher: Any,
        num_bits: int,
        end_ids: Sequence[int] = (),
        ignores_ends: bool = False,
        origin: object = None,
    ) -> None:
        self._matcher, self._num_taken, self._origin = matcher, 0, origin
        self._mask, self._num_masked = np.zeros(-(-num_bits // 32), np.uint32), -1  # -1: the mask is of no position
        self._ends, self._first_end = np.zeros_like(self._mask), -1
        for token in end_ids:
            self._ends[token // 32] |= np.uint32(1 << token % 32)
        if end_ids and not ignores_ends:
            self._first_end = end_ids[0]

    def mask(self, generated: TokenArray) -> Mask:
        """Return which tokens may follow the generated ones: token i if bit i % 32 of word i // 32 is set.

        It is valid until the next call. No bit is set where the matcher has failed, see `error`.
        """
        if len(generated) != self._num_masked or len(generated) != self._num_taken:
            self._follow(generated)
            self._mask[:] = 0
            if not self._matcher.is_error():
                self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            may_end = self._first_end >= 0 and int(self._mask[self._first_end // 32]) >> self._first_end % 32 & 1
            self._mask &= ~self._ends
            if may_end:
                self._mask |= self._ends
            if self._matcher.is_error():
                self._mask[:] = 0
            self._num_masked = len(generated)
        return self._mask

    def is_over(self, generated: TokenArray) -> bool:
        """Return whether nothing may follow the generated tokens, which are a whole text of the guide."""
        self._follow(generated)
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why the matcher cannot go on: the guide needs too much work for a token; None if it can."""
        return plain_reason(self._matcher) if self._matcher.is_error() else None

    def _follow(self, generated: TokenArray) -> None:
        if len(generated) < self._num_taken:
            self._matcher.reset()
            self._num_taken, self._num_masked = 0, -1
        if new := generated[self._num_taken :].tolist():
            self._matcher.consume_tokens(new)
            self._num_taken = len(generated)


def plain_reason(matcher: Any) -> str:
    """Return why a matcher has failed, in one line, without the library's account of its state."""
    return " ".join(str(matcher.get_error()).partition("<state>")[0].split())
