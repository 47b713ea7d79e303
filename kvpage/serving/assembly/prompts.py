"""EnginePrompts: what an engine says of a prompt that is not queued: whether it fits, and how much of it is cached."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvpage.blocks.explain import Explanation
from kvpage.blocks.manager import BlockManager
from kvpage.checks.tokens import Tokens
from kvpage.serving.loop.connectors import Connectors
from kvpage.serving.loop.intake import Intake


class EnginePrompts:
    """The part of an engine that only looks. manager: of its blocks; EngineCore makes it, and the others."""

    manager: BlockManager
    _intake: Intake
    _connectors: Connectors

    def explain(self, tokens: Tokens, namespace: bytes = b"") -> Explanation:
        """Return how far what is cached reaches into a prompt, and why it ends there, for each group of layers.

        A store is asked, too, and waited for at most `EngineConfig.store_deadline` seconds, as by a request. One that
        raises or is late is no error: `Explanation.store` says so.

        Args:
            tokens: Token ids of a prompt.
            namespace: Where to search.

        Returns:
            The explanation. Nothing changes by it in the engine, not even what counts as used.

        Raises:
            ValueError, TypeError: As `add_request` for tokens and namespace.
        """
        array = self.check_tokens(tokens)
        found, store = self.manager.explain(array, namespace), self._connectors.store
        return found if store is None else replace(found, store=store.explain(array, namespace))

    def check_tokens(self, tokens: Tokens) -> npt.NDArray[np.int32]:
        """Check token ids.

        Args:
            tokens: Token ids, at least one.

        Returns:
            The same as int32 [num_tokens].

        Raises:
            ValueError: There are none, or ids outside of the vocabulary.
            TypeError: They are text.
        """
        return self._intake.check_tokens(tokens)

    def check_length(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Check that the model takes a sequence of some length.

        Args:
            num_prompt_tokens: Tokens of the prompt.
            max_tokens: Tokens after it.

        Raises:
            ValueError: The sum is more than max_model_len.
        """
        self._intake.check_length(num_prompt_tokens, max_tokens)
