"""PagedTokenTrie: a model's log-probabilities after many token lists that share beginnings, each token computed once.

    root ── 5 ── 9 ── 2*        node: children by token id
              └─ 7* ── 1*       logprobs (*): [vocab_size], of the token after it
                                branch: a live Branch through the node; K and V of the path lie in its blocks

    ask for 5 9 2 3 and 5 9 2 8:   the branch that ends at 2 is forked, one token is computed for each

A branch pins its blocks, and branches of one beginning share them. Where there are too many, or blocks are short, the
one that was used the longest time ago ends. Its blocks stay in the engine's prefix tree until they are evicted
there, so that even then little is computed again.

Lists of one call are computed together, in as few passes as possible, and no token twice. A list that is the beginning
of another is read off on the way. Of lists that share a block that is not computed yet, the first goes ahead.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.fields import is_int
from kvpage.checks.tokens import Tokens
from kvpage.checks.values import check_namespace
from kvpage.serving.sampling.log_softmax import log_softmax
from kvpage.serving.sampling.logits_check import LogitsNotFinite
from kvpage.serving.steer.branches import Branch, Branches
from kvpage.serving.steer.steerable import SteerableEngine

TokenIds = npt.NDArray[np.int32]


class _Node:
    """`token` after the path to `parent`."""

    __slots__ = ("parent", "token", "children", "logprobs", "branch")

    def __init__(self, parent: "_Node | None", token: int) -> None:
        self.parent = parent
        self.token = token
        self.children: dict[int, _Node] = {}
        self.logprobs: torch.Tensor | None = None
        self.branch: Branch | None = None


class _Query(NamedTuple):
    list_index: int  # among the lists of the call
    tokens: TokenIds
    path: list[_Node]  # a node for each token

    @property
    def end(self) -> _Node:
        return self.path[-1]


class _Source(NamedTuple):
    """A live branch whose first `depth` tokens a query shares; none: it starts anew."""

    branch: Branch | None
    depth: int

    @property
    def ends_branch(self) -> bool:
        """The branch has no more tokens: it can go on as the query's own."""
        return self.branch is not None and len(self.branch) == self.depth


class PagedTokenTrie:
    """Next-token log-probabilities through an engine, with whose requests it shares model, blocks and prefix cache.

    Not thread-safe; calls come between the engine's steps. If blocks are short, its own idle branches end first, then
    running requests are preempted. Requests that need blocks get those of idle branches. `close` it, or use `with`.

    Args:
        engine: The engine.
        namespace: Only sequences of the same namespace share blocks.
        max_branches: Live branches at most. Each holds at least one block of its own.
        max_logprobs: Nodes whose log-probabilities are kept at most, vocab_size floats each. The least recently used go
            first.

    Raises:
        TypeError: The namespace is not bytes.
        ValueError: A number is not positive.
    """

    def __init__(
        self, engine: SteerableEngine, namespace: bytes = b"", max_branches: int = 256, max_logprobs: int = 4096
    ) -> None:
        check_namespace(namespace)
        for name, value in (("max_branches", max_branches), ("max_logprobs", max_logprobs)):
            if not is_int(value) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        self.engine = engine
        self.namespace = namespace
        self.max_branches = max_branches
        self.max_logprobs = max_logprobs
        self._root = _Node(None, -1)
        self._branches = Branches(engine, self._end_oldest)
        self._by_use: OrderedDict[Branch, _Node] = OrderedDict()  # live branches and where they end
        self._in_use: set[Branch] = set()  # by the call that computes
        self._cached: OrderedDict[_Node, None] = OrderedDict()  # nodes with logprobs
        self._suspects: list[_Node] = []  # nodes that may be of no use any more; looked at when no call holds any
        engine.add_reclaimer(self._end_oldest)

    @property
    def num_branches(self) -> int:
        return len(self._by_use)

    @property
    def num_logprobs(self) -> int:
        return len(self._cached)

    def next_token_logprobs(self, token_lists: Sequence[Tokens]) -> torch.Tensor:
        """Return the log-softmax of the logits after each list; compute those that are not known yet.

        Args:
            token_lists: Token ids. Lists may be equal, and may be beginnings of one another.

        Returns:
            fp32 [len(token_lists), vocab_size], on the CPU.

        Raises:
            ValueError: A list is empty, longer than the model takes, or holds others than ids of the vocabulary;
                nothing is computed then.
            OutOfBlocks: One list alone does not fit. Results of earlier passes are kept.
            LogitsNotFinite: The logits after some lists are no numbers; it names them. Other results are kept.
        """
        checked = [self.engine.check_tokens(tokens) for tokens in token_lists]
        for tokens in checked:
            self.engine.check_length(len(tokens), 0)
        indices = {tokens.tobytes(): index for index, tokens in reversed([*enumerate(checked)])}
        logprobs_by_key = {key: self._find(checked[index]) for key, index in indices.items()}
        missing = {key: checked[indices[key]] for key, logprobs in logprobs_by_key.items() if logprobs is None}
        queries = [_Query(indices[key], tokens, self._path(tokens)) for key, tokens in missing.items()]
        for key, logprobs in zip(missing, self._compute(queries), strict=True):
            logprobs_by_key[key] = logprobs
        rows = [logprobs_by_key[tokens.tobytes()] for tokens in checked]
        return torch.stack([row for row in rows if row is not None]) if rows else torch.empty(0, self.engine.vocab_size)

    def clear(self) -> None:
        """Forget everything, and let go of all blocks."""
        self._branches.close()
        self._by_use.clear()
        self._cached.clear()
        self._suspects.clear()
        self._root = _Node(None, -1)

    def close(self) -> None:
        """Clear, and leave the engine. A second call does nothing."""
        self.clear()
        self.engine.remove_reclaimer(self._end_oldest)

    def __enter__(self) -> "PagedTokenTrie":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- log-probabilities -------------------------------------------------------------------------------------------

    def _find(self, tokens: TokenIds) -> torch.Tensor | None:
        node = self._root
        for token in tokens.tolist():
            child = node.children.get(token)
            if child is None:
                return None
            node = child
        if node.logprobs is not None:
            self._cached.move_to_end(node)
        return node.logprobs

    def _keep(self, node: _Node, logprobs: torch.Tensor) -> None:
        node.logprobs = logprobs
        self._cached[node] = None
        if len(self._cached) > self.max_logprobs:
            oldest, _ = self._cached.popitem(last=False)
            oldest.logprobs = None
            self._suspects.append(oldest)

    def _prune(self) -> None:
        """Take out the suspects without log-probabilities and children, and parents that so become the same."""
        while self._suspects:
            node = self._suspects.pop()
            while node.parent and not node.children and node.logprobs is None and node.branch not in self._by_use:
                parent = node.parent
                del parent.children[node.token]
                node.parent = None  # gone: it may be suspected twice
                node = parent

    # --- computing ---------------------------------------------------------------------------------------------------

    def _compute(self, queries: Sequence[_Query]) -> list[torch.Tensor]:
        """Return the log-probabilities after distinct lists."""
        results: dict[_Node, torch.Tensor] = {}
        try:
            left = list(queries)
            while left:
                self._compute_some(self._first(left), {query.end: query for query in left}, results)
                left = [query for query in left if query.end not in results]
        finally:
            self._suspects += [query.end for query in queries]
            self._prune()
        return [results[query.end] for query in queries]

    def _path(self, tokens: TokenIds) -> list[_Node]:
        """Return the nodes of the tokens, new ones where there are none."""
        node, path = self._root, []
        for token in tokens.tolist():
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = _Node(node, token)
            path.append(child)
            node = child
        return path

    def _first(self, queries: Sequence[_Query]) -> list[_Query]:
        """Return the queries to begin with: no beginnings of others, and one of those that share an unknown block."""
        inner = {node for query in queries for node in query.path[:-1]}
        num_tokens = self.engine.manager.block_size
        ahead: set[_Node] = set()
        chosen = []
        for query in queries:
            if query.end in inner:
                continue
            begin = self._source(query).depth + num_tokens
            shared = query.path[begin - 1] if begin <= len(query.path) else query.end
            if shared not in ahead:
                chosen.append(query)
                ahead.add(shared)
        return chosen

    def _compute_some(
        self, queries: Sequence[_Query], asked: Mapping[_Node, _Query], results: dict[_Node, torch.Tensor]
    ) -> None:
        """Compute `queries`, and the `asked` nodes on their way; where blocks are short, one half after the other."""
        try:
            self._compute_at_once(queries, asked, results)
            return
        except OutOfBlocks:
            if len(queries) == 1:
                raise
        middle = len(queries) // 2
        self._compute_some(queries[:middle], asked, results)
        self._compute_some(queries[middle:], asked, results)

    def _compute_at_once(
        self, queries: Sequence[_Query], asked: Mapping[_Node, _Query], results: dict[_Node, torch.Tensor]
    ) -> None:
        with self._using() as in_use:
            branches = self._branches_for(queries)
            in_use.update(branches)
            nodes = self._nodes_on_the_way(queries, branches, asked)
            logits = self._logits(queries, branches, nodes)
            rows = torch.split(log_softmax(logits.float()).cpu(), 1)
        for query, branch in zip(queries, branches, strict=True):
            self._by_use[branch] = query.end
            self._by_use.move_to_end(branch)
            for node in query.path:
                node.branch = branch
        for node, row in zip((node for query_nodes in nodes for node in query_nodes.values()), rows, strict=True):
            results[node] = row[0].clone()  # not a view: it would keep all rows
            self._keep(node, results[node])
        while len(self._by_use) > self.max_branches:
            self._end_oldest()

    def _logits(
        self, queries: Sequence[_Query], branches: Sequence[Branch], nodes: Sequence[Mapping[int, _Node]]
    ) -> torch.Tensor:
        try:
            return self._branches.compute(branches, [list(query_nodes) for query_nodes in nodes])
        except LogitsNotFinite as error:
            indices = sorted(queries[row].list_index for row in error.rows)
            raise LogitsNotFinite(indices, [f"list {index}" for index in indices]) from error

    def _nodes_on_the_way(
        self, queries: Sequence[_Query], branches: Sequence[Branch], asked: Mapping[_Node, _Query]
    ) -> list[dict[int, _Node]]:
        """Return for each query the nodes that it can answer for, by the tokens that lead there; each node once."""
        answered: set[_Node] = set()
        nodes = []
        for query, branch in zip(queries, branches, strict=True):
            path = enumerate(query.path[branch.num_computed :], branch.num_computed + 1)
            nodes.append({depth: node for depth, node in path if node in asked and node not in answered})
            answered.update(nodes[-1].values())
        return nodes

    @contextmanager
    def _using(self) -> Iterator[set[Branch]]:
        """Hold branches: inside, those in the set do not end where blocks are short.

        After an exception they have ended, as the tokens appended to them were not computed.
        """
        self._in_use = set()
        try:
            yield self._in_use
        except BaseException:
            self._end(branch for branch in self._in_use if branch in self._branches)
            raise
        finally:
            self._in_use = set()

    def _branches_for(self, queries: Sequence[_Query]) -> list[Branch]:
        """Return a branch for each query, with at least its last token left to compute."""
        sources = [self._source(query) for query in queries]
        self._in_use.update(source.branch for source in sources if source.branch)
        heirs = {source.branch: index for index, source in enumerate(sources) if source.ends_branch}
        branches: list[Branch] = []
        for index, (query, source) in enumerate(zip(queries, sources, strict=True)):
            if source.branch is None:
                branches.append(self._branches.start(query.tokens, self.namespace))
            elif heirs.get(source.branch) == index:
                branches.append(source.branch)
            else:
                branches.append(self._branches.fork(source.branch, source.depth))
            self._in_use.add(branches[-1])
        for query, branch, source in zip(queries, branches, sources, strict=True):
            if source.branch is not None:  # only now: a branch that was appended to cannot be forked
                branch.append(query.tokens[source.depth :])
        return branches

    def _source(self, query: _Query) -> _Source:
        """Return the branch that shares the most tokens; none if a new one finds as much, in whole blocks."""
        last, manager = len(query.tokens) - 1, self.engine.manager
        for depth in range(last, 0, -1):
            branch = query.path[depth - 1].branch
            if branch is None or branch not in self._by_use:
                continue
            finds_blocks = manager.enable_prefix_caching and last - depth >= manager.block_size
            can_fork = depth >= self._branches.first_forkable(branch)
            return _Source(branch, depth) if can_fork and not finds_blocks else _Source(None, 0)
        return _Source(None, 0)

    # --- branches ----------------------------------------------------------------------------------------------------

    def _end_oldest(self) -> bool:
        """End the idle branch that was used the longest time ago; False if there is none."""
        oldest = next((branch for branch in self._by_use if branch not in self._in_use), None)
        if oldest is not None:
            self._end([oldest])
        return oldest is not None

    def _end(self, branches: Iterable[Branch]) -> None:
        for branch in list(branches):
            end = self._by_use.pop(branch, None)
            self._branches.release([branch])
            if end is not None:
                self._suspects.append(end)
