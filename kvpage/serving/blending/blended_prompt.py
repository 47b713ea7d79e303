"""BlendedPrompt: blending's part of a request: the segments of its prompt, and those of them that are kept already.

asked      the tokens, their spans, may_reuse, copy_at, is_warming           fixed
found      reusable: segments that are kept   wanted_spans: spans to keep    by the connector; None until then
admitted   reuse: those of them that the prefill at hand reuses, in one step
computed   num_reused_tokens, num_recomputed_tokens
"""

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from kvpage.blend.segments import Reuse
from kvpage.blend.spans import Span


class BlendedPrompt:
    """A prompt whose segments may be reused, or are to be kept.

    seq_id: the prompt's sequence in the block manager. tokens: int32, the prompt. spans: its segments, at least one.
    may_reuse: kept segments may replace computation. Without it segments are only kept.
    copy_at: where the one segment is repeated, to measure its sensitivity; None where it is not.
    is_warming: the segments are to be kept even if that has to wait for others.
    """

    def __init__(
        self,
        seq_id: Hashable,
        tokens: npt.NDArray[np.int32],
        namespace: bytes,
        spans: Sequence[Span],
        may_reuse: bool,
        copy_at: int | None = None,
        is_warming: bool = False,
    ) -> None:
        self.seq_id, self.tokens, self.namespace, self.spans = seq_id, tokens.copy(), namespace, spans
        self.may_reuse, self.copy_at, self.is_warming = may_reuse, copy_at, is_warming
        self.reusable: list[Reuse] | None = None
        self.wanted_spans: list[Span] = []
        self.reuse: list[Reuse] = []
        self.num_reused_tokens = self.num_recomputed_tokens = 0

    def enter(self, namespace: bytes) -> None:
        """Look segments up, and keep them, in this namespace from now on."""
        self.namespace = namespace

    def set_found(self, reusable: list[Reuse], wanted_spans: list[Span]) -> None:
        """Take the answer of a lookup: there is no other lookup until `forget_found`."""
        self.reusable, self.wanted_spans = reusable, wanted_spans

    def forget_found(self) -> None:
        """Have the segments looked up again."""
        self.reusable, self.wanted_spans = None, []

    def admit(self, num_cached_tokens: int) -> None:
        """Choose the segments that the prefill at hand reuses: those found, after the tokens that are cached anyway."""
        clipped = [reuse.after(num_cached_tokens) for reuse in self.reusable or ()]
        self.reuse = [reuse for reuse in clipped if reuse is not None]

    def leave_blocks(self) -> None:
        """Forget the choice: the request has no blocks any more."""
        self.reuse = []

    def end_prefill(self) -> None:
        """End the prefill that reused segments. They are looked up again if the request is ever computed again."""
        self.reuse, self.reusable = [], None

    def count(self, num_reused: int, num_recomputed: int) -> None:
        """Note how many tokens of the segments were kept as they were, and how many were computed again."""
        self.num_reused_tokens, self.num_recomputed_tokens = num_reused, num_recomputed

    @property
    def num_exact_tokens(self) -> int:
        """The leading tokens that the prefill at hand computes exactly: all before the first reused one."""
        return self.reuse[0].start if self.reuse else len(self.tokens)
