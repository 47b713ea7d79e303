"""Token tries: a node a token, with a model's log-probabilities after it and the K and V of the token itself.

    root ── 5 ── 9 ── 2*        node: children by token id
              └─ 7* ── 1*       logprobs  [vocab_size], of the token after it; None if not computed
                                past_key_values (*), K and V of its token; None if absent or evicted

A node owns its arrays. They are never views into the output of a whole forward pass, which would live as long as any of
its slices. So evicted arrays are freed.

No call recurses, so a path may have any length. No trie is safe to use from several threads.
"""

from kvpage.extras.output_cache import OutputCache
from kvpage.extras.token_trie.dynamic import DynamicTokenTrie
from kvpage.extras.token_trie.plain import TokenTrie

__all__ = ["DynamicTokenTrie", "OutputCache", "TokenTrie"]
