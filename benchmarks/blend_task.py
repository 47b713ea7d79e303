"""Documents whose facts refer to names in other segments, and questions about them.

    Ada f3 f17 f8 | Bob f40 | SHE f5 f22 | f9 ... | HE f31 | Eve f2 ...        a record a bar: who, and facts
                               Ada                   Bob

Who a fact belongs to stands before it: a name, or a pronoun, which is the last name of its kind. A segment that begins
within a record, or with a pronoun before a name of its kind, says less by itself than within its document. A question
asks whose a fact is. Each fact occurs once in a document, so that a question finds its token by matching; whose it is
must have been written there when the document was read: where the record begins is not to be found by matching.
"""

from dataclasses import dataclass

import torch

NUM_NAMES = 16  # of each of the two kinds
NUM_FACTS = 160
ASK, HE, SHE = 0, 1, 2
FIRST_NAME = 3
FIRST_FACT = FIRST_NAME + 2 * NUM_NAMES
VOCAB_SIZE = FIRST_FACT + NUM_FACTS
NOBODY = -100
"""The label of a token without an owner: the index that torch's cross entropy ignores."""

RECORD_END = 0.3  # a record has 3.3 facts on average
PRONOUN = 0.3


@dataclass(frozen=True, slots=True)
class Documents:
    """tokens, owners: int64 [num_documents, num_tokens]. owner: the name that a token belongs to, or NOBODY.

    named_at: where that name stands, or -1.
    """

    tokens: torch.Tensor
    owners: torch.Tensor
    named_at: torch.Tensor

    def is_cross(self, segment_tokens: int) -> torch.Tensor:
        """Facts whose name is in a segment before their own: bool [num_documents, num_tokens]."""
        place = torch.arange(self.tokens.shape[1]) // segment_tokens
        is_fact = (self.tokens >= FIRST_FACT) & (self.owners != NOBODY)
        return is_fact & (self.named_at // segment_tokens < place)


def write_documents(count: int, num_tokens: int, seed: int) -> Documents:
    """Seeded. A document may begin within a record, as a window over a longer text does."""
    if num_tokens > NUM_FACTS:
        raise ValueError(f"num_tokens must be at most {NUM_FACTS}, as each fact occurs once, got {num_tokens}")
    draw = torch.Generator().manual_seed(seed)
    tokens = FIRST_FACT + torch.rand(count, NUM_FACTS, generator=draw).argsort(dim=1)[:, :num_tokens]
    begins = torch.rand(count, num_tokens, generator=draw) < RECORD_END
    begins[:, 1:] &= ~begins[:, :-1]  # a record has at least one fact
    kinds = torch.randint(2, (count, num_tokens), generator=draw)
    names = FIRST_NAME + kinds * NUM_NAMES + torch.randint(NUM_NAMES, (count, num_tokens), generator=draw)
    is_pronoun = begins & (torch.rand(count, num_tokens, generator=draw) < PRONOUN)
    tokens = torch.where(begins, torch.where(is_pronoun, HE + kinds, names), tokens)
    named_at = _named_at(begins, is_pronoun, kinds)
    owners = tokens.gather(1, named_at.clamp(min=0)).masked_fill(named_at < 0, NOBODY)
    return Documents(tokens, owners, named_at)


def _named_at(begins: torch.Tensor, is_pronoun: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Return the place of each token's name: of the last record's kind the last one before; -1 if none."""
    here = torch.arange(begins.shape[1]).expand_as(begins)
    last_begin = here.masked_fill(~begins, -1).cummax(dim=1).values
    of_kind = [here.masked_fill(~(begins & ~is_pronoun & (kinds == kind)), -1).cummax(dim=1).values for kind in (0, 1)]
    resolved = torch.where(kinds == 0, of_kind[0], of_kind[1])
    return resolved.gather(1, last_begin.clamp(min=0)).masked_fill(last_begin < 0, -1)


def ask(documents: Documents, where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Questions about the facts at `where`, int64 [num_documents, num_questions], and the answers.

    The first: [num_documents, num_questions, 2], ASK and the fact. The second: [num_documents, num_questions].
    """
    facts = documents.tokens.gather(1, where)
    return torch.stack([torch.full_like(facts, ASK), facts], dim=-1), documents.owners.gather(1, where)
