"""TokenTexts: the text of tokens, remembered: the hottest prefixes are the same from one picture to the next."""

from collections import OrderedDict
from typing import Any

import numpy as np

MAX_TEXTS, MAX_CHARACTERS = 1024, 160


class TokenTexts:
    """Decodes tokens.

    Args:
        tokenizer: A tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: OrderedDict[bytes, str] = OrderedDict()

    def __call__(self, tokens: bytes) -> str:
        """Return the text of tokens, cut after some characters.

        Args:
            tokens: The bytes of int32 [num_tokens].
        """
        text = self._texts.get(tokens)
        if text is None:
            token_ids = np.frombuffer(tokens, np.int32).tolist()
            text = self._texts[tokens] = str(self._tokenizer.decode(token_ids))[:MAX_CHARACTERS]
            if len(self._texts) > MAX_TEXTS:
                self._texts.popitem(last=False)
        else:
            self._texts.move_to_end(tokens)
        return text
