"""ExplainingEngine: the side of an engine that tells how far its cache reaches into a prompt.

ask ─► Question ─► the store answers, in a thread ─► answer ─► Explanation: of the blocks and the store, of one moment
"""

from abc import ABC, abstractmethod
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

from kvpage.blocks.explain import Explanation, Searched
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.sequence_state import Ids
from kvpage.checks.tokens import Tokens
from kvpage.serving.config import EngineConfig
from kvpage.serving.loop.connectors import Connectors
from kvpage.serving.sessions.sessions import Sessions


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt that is to be explained.

    Attributes:
        tokens: The prompt, int32 [num_tokens].
        namespace: The caller's.
        kv_namespace: That of its K and V.
        stored: What the store has of it, once that is known; None without a store.
    """

    tokens: Ids
    namespace: bytes
    kv_namespace: bytes
    stored: "Future[Explanation] | None"


class ExplainingEngine(ABC):
    """An engine that explains; `kvpage.serving.Engine` is one."""

    config: EngineConfig
    manager: BlockManager
    sessions: Sessions
    _connectors: Connectors

    @abstractmethod
    def check_tokens(self, tokens: Tokens) -> Ids:
        """Return the tokens as int32. Raise for tokens that no request may have."""

    @abstractmethod
    def kv_namespace(self, namespace: bytes = b"", adapter: str | None = None) -> bytes:
        """Return the namespace of the K and V that are computed for a caller's namespace."""

    def explain(self, tokens: Tokens, namespace: bytes = b"", adapter: str | None = None) -> Explanation:
        """Return how far what is cached reaches into a prompt, and why it ends there, for each group of layers.

        A store is asked, too, and waited for at most `EngineConfig.store_deadline` seconds, as by a request. One that
        raises or is late is no error: `Explanation.store` says so.

        Args:
            tokens: Token ids of a prompt.
            namespace: Where to search.
            adapter: See SamplingParams.

        Returns:
            The explanation. Nothing changes by it in the engine, not even what counts as used.

        Raises:
            ValueError, TypeError: As `add_request` for tokens and namespace.
        """
        question = self.ask(tokens, namespace, adapter)
        if question.stored is not None:
            wait([question.stored], timeout=self.config.store_deadline)
        return self.answer(question)

    def ask(self, tokens: Tokens, namespace: bytes = b"", adapter: str | None = None) -> Question:
        """Begin to explain a prompt: the store is asked in a thread.

        Args:
            tokens: See `explain`.
            namespace: See `explain`.
            adapter: See `explain`.

        Returns:
            The question, for `answer`.

        Raises:
            ValueError, TypeError: As `explain`.
        """
        array, kv_namespace = self.check_tokens(tokens), self.kv_namespace(namespace, adapter)
        store = self._connectors.store
        stored = None if store is None else store.loads.question(array, kv_namespace)
        return Question(array, namespace, kv_namespace, stored)

    def answer(self, question: Question, searched: Searched = "all") -> Explanation:
        """Return the explanation of a prompt. A store that has not answered by now is late.

        Args:
            question: Of `ask`.
            searched: See BlockManager.explain.

        Returns:
            The explanation.
        """
        tokens, kv_namespace = question.tokens, question.kv_namespace
        explanation = self.manager.explain(tokens, kv_namespace, searched)
        explanation = self.sessions.explained(explanation, tokens, question.namespace, kv_namespace)
        if question.stored is None or self._connectors.store is None:
            return explanation
        return replace(explanation, store=self._connectors.store.loads.reach(question.stored, tokens, kv_namespace))
