"""TokenTables: what the rules of one sequence say of each token, on a device.

words    [ 0   1<<27   1<<30 | 2   0 ]      token 1 is suppressed; token 2 was seen, and generated twice
biases   [ 0.   0.     0.    1.5 ]
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpage.layout.sampling_record import ENDS, NOT_FIRST, SEEN, SUPPRESSED
from kvpage.ops.cuda.uploads import upload

Ids = npt.NDArray[np.int64]


class NamedTokens(NamedTuple):
    """The tokens that rules name. Each id outside of the vocabulary is passed over.

    biased_ids: each once. counts: whether a rule asks which tokens the sequence holds. is_guided: whether a mask says
        which may come.
    """

    biased_ids: Ids
    biases: npt.NDArray[np.float32]
    suppressed_ids: Ids
    stop_ids: Ids
    first_ids: Ids
    counts: bool
    num_prompt_tokens: int
    is_guided: bool = False

    @property
    def are_barred(self) -> bool:
        """Whether some tokens must not come, always or at some positions."""
        return self.is_guided or any(map(len, (self.suppressed_ids, self.stop_ids, self.first_ids)))


class TokenTables:
    """The tables of one sequence. words: int32 [vocab_size]; biases: fp32 [vocab_size]. None where no rule asks."""

    def __init__(self, named: NamedTokens, vocab_size: int, device: torch.device) -> None:
        self._named, self._vocab_size, self.device = named, vocab_size, device
        self._num_counted, self._newest = -1, -1  # of the tokens that the words hold
        self.words: torch.Tensor | None = None
        self._always_barred: torch.Tensor | None = None  # bits of words, where a mask bars others
        if named.counts or named.are_barred:
            (self.words,) = upload([self._fixed_words()], device)
        self.biases: torch.Tensor | None = None
        if len(named.biased_ids):
            is_token = (named.biased_ids >= 0) & (named.biased_ids < vocab_size)
            biases = np.zeros(vocab_size, np.float32)
            biases[named.biased_ids[is_token]] = named.biases[is_token]
            (self.biases,) = upload([biases], device)

    @property
    def counts(self) -> bool:
        """Whether the words hold the sequence's tokens."""
        return self._named.counts

    def serves(self, vocab_size: int, device: torch.device) -> bool:
        """Whether these are the tables for such logits."""
        return self._vocab_size == vocab_size and self.device == device

    def hold(self, tokens: npt.NDArray[np.int32]) -> None:
        """Have the words hold the prompt and the generated tokens. Mostly they do: the kernel counts what it chose."""
        if self.words is None or len(tokens) == self._num_counted and tokens[-1] == self._newest:
            return
        words, num_prompt = self._fixed_words(), self._named.num_prompt_tokens
        prompt, generated = (self._in_vocabulary(part) for part in (tokens[:num_prompt], tokens[num_prompt:]))
        words[prompt] |= SEEN
        words += np.bincount(generated, minlength=self._vocab_size).astype(np.int32)
        (device_words,) = upload([words], self.device)
        self.words.copy_(device_words)

    def allow(self, mask: npt.NDArray[np.uint32]) -> None:
        """Let only tokens of a mask come next: token i if bit i % 32 of mask[i // 32] is set. Nothing is waited for."""
        assert self.words is not None, "a guided sequence has words"
        if self._always_barred is None:
            fixed = np.zeros(self._vocab_size, np.int32)
            fixed[self._in_vocabulary(self._named.suppressed_ids)] = SUPPRESSED
            (self._always_barred,) = upload([fixed], self.device)
        (device_mask,) = upload([mask.view(np.int32)], self.device)
        is_allowed = (device_mask[:, None] >> torch.arange(32, dtype=torch.int32, device=self.device) & 1).flatten()
        barred = (1 - is_allowed[: self._vocab_size]) * SUPPRESSED
        barred = torch.nn.functional.pad(barred, (0, self._vocab_size - len(barred)), value=SUPPRESSED)
        self.words.bitwise_and_(~SUPPRESSED).bitwise_or_(self._always_barred | barred)

    def note_chosen(self, num_tokens: int, token: int) -> None:
        """Note the token that the kernel has chosen, and counted, after num_tokens tokens; -1 if it chose none."""
        self._num_counted, self._newest = (num_tokens + 1, token) if token >= 0 else (-1, -1)

    def _fixed_words(self) -> npt.NDArray[np.int32]:
        words, named = np.zeros(self._vocab_size, np.int32), self._named
        for ids, bit in ((named.suppressed_ids, SUPPRESSED), (named.stop_ids, ENDS), (named.first_ids, NOT_FIRST)):
            words[self._in_vocabulary(ids)] |= bit
        return words

    def _in_vocabulary(self, ids: npt.NDArray[np.integer]) -> Ids:
        return ids[(ids >= 0) & (ids < self._vocab_size)].astype(np.int64)
