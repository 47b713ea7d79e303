"""RequestBlocks: the blocks of requests, and their states where a model's layers keep some."""

import numpy as np
import numpy.typing as npt

from kvpage.blocks.manager import BlockManager
from kvpage.blocks.sequence_state import Allocation
from kvpage.checks.errors import OutOfBlocks
from kvpage.serving.loop.request import Request


class RequestBlocks:
    """Blocks for requests, and what becomes of their states after a step."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._states = manager.states

    @property
    def have_states(self) -> bool:
        """Whether the model's layers keep states."""
        return self._states is not None

    @property
    def can_be_shared(self) -> bool:
        """Whether a prompt that runs leaves others a place to begin: its blocks, and a state if there are some."""
        return self._manager.enable_prefix_caching and (self._states is None or self._states.space.most_kept > 0)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._manager.block_size

    def mark(self, request: Request, num_tokens: int) -> None:
        """Have a prefill that runs keep its state after num_tokens tokens, unless it has passed them."""
        self._manager.mark(request.seq_id, num_tokens)

    def allocate(self, request: Request, tokens: npt.NDArray[np.int32], num_spare: int) -> Allocation:
        """Give a waiting request blocks, and a state where there are some. Its prompt counts once, the first time.

        num_spare: blocks to leave over. OutOfBlocks, and no change, if it does not fit.
        """
        max_cached, is_counted = self._most_cached(request), not request.group.is_admitted
        return self._manager.allocate(
            request.seq_id,
            tokens,
            request.namespace,
            request.params.retain_priority,
            max_cached,
            cache_at=request.cache_at,
            num_spare=num_spare,
            is_counted=is_counted,
        )

    def lacks_room(self, request: Request, tokens: npt.NDArray[np.int32], num_spare: int) -> bool:
        """Whether `allocate` would raise OutOfBlocks for a request that is not swapped out, by free blocks alone.

        A sequence that begins before the end of what is cached on the device takes as many more blocks as it leaves
        evictable, so it fits no sooner. Pins may end for it, all of them at most.
        """
        manager, size = self._manager, self._manager.block_size
        num_free = manager.num_free_blocks + manager.space.pins.num_blocks
        device_ids = manager.tree.look(tokens[:-1], request.namespace)[0][0]
        num_found = int((device_ids >= 0).sum()) if manager.enable_prefix_caching else 0
        num_over = num_free - num_spare - (-(-len(tokens) // size) - num_found)
        if num_over < 0 or not num_found:
            return num_over < 0
        return num_over < manager.tree.num_held(tokens[: num_found * size + 1], request.namespace)

    def commit(self, request: Request) -> None:
        """Make the computed tokens of a request findable: those of its answer only if they are as a prompt's."""
        begin, end = request.num_committed, request.num_prompt_tokens
        if self._hides_answers and begin <= end <= request.num_computed:
            self._manager.commit(request.seq_id, request.tokens[begin:end])
            self.keep_marks(request)
            self._manager.make_private(request.seq_id)
            begin = end
        self._manager.commit(request.seq_id, request.tokens[begin : request.num_computed])
        request.set_committed()

    def swap_out(self, request: Request) -> bool:
        """Move its computed K and V, and its state, to the host.

        Return False, and change nothing, without room there, or with a spoiled state.
        """
        if not self._manager.tree.has_host_tier:
            return False
        if self._states is not None and not self._states.has_state(request.seq_id):
            return False
        try:
            self._manager.swap_out(request.seq_id)
        except OutOfBlocks:
            return False
        return True

    def keep_marks(self, request: Request) -> None:
        """Make checkpoints of the states that a portion of its prefill has left at its marks. It is committed."""
        if self._states is not None:
            self._manager.keep(request.seq_id)

    def keep_end(self, request: Request, goes_on: bool) -> None:
        """Make a checkpoint of its own state, after all committed tokens. It computes nothing more, or later again."""
        self._manager.keep_end(request.seq_id, goes_on)

    def spoil(self, request: Request) -> None:
        """Note that a step has failed for it: its state is to be kept by nobody."""
        self._manager.give_up_marks(request.seq_id)

    @property
    def _hides_answers(self) -> bool:
        return self._states is not None and not self._states.options.shares_answers

    def _most_cached(self, request: Request) -> int | None:
        """Return how many tokens may be found at most; None for no limit. Its answer was not computed as a prompt."""
        if request.scores_prompt:
            return 0
        return request.num_prompt_tokens if self._hides_answers else None
