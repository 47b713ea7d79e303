"""Vocabulary: each token by itself, as text and as bytes, for log-probabilities."""

from typing import Any

BROKEN = "\ufffd"


class Vocabulary:
    """The tokens of a tokenizer, one by one. Asked ones are kept."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}
        self._before: list[int] = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._text_before = self._decode([]) if self._before else ""
        self._byte_of = _bytes_of_characters()

    def __getitem__(self, token_id: int) -> tuple[str, bytes]:
        """Return a token's text and its bytes. An incomplete character is the text "\\ufffd"."""
        entry = self._known.get(token_id)
        if entry is None:
            entry = self._known[token_id] = self._look_up(token_id)
        return entry

    def _look_up(self, token_id: int) -> tuple[str, bytes]:
        text = self._decode([token_id])  # after another token: some decoders strip the space of a first one
        text = text[len(self._text_before) :] if text.startswith(self._text_before) else text
        if BROKEN not in text:
            return text, text.encode(errors="replace")
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        return text, self._raw_bytes(name) or text.encode()

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(
            [*self._before, *token_ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str), "one list of tokens has one text"
        return text

    def _raw_bytes(self, name: str | None) -> bytes:
        """Return the bytes of a token of a byte-level vocabulary, or of a token such as <0xC3>; b"" for others."""
        if name is None:
            return b""
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        values = [self._byte_of.get(character) for character in name]
        return b"" if None in values else bytes(value for value in values if value is not None)


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable characters of Latin-1 stand for themselves. The other bytes have the characters from 256 on, in order.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}
