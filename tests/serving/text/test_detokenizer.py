"""The pieces of a text are whole characters, and together what `decode` makes of all tokens."""

import random

import pytest
from support.tokenizers_made import byte_level, metaspace, word_piece
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from kvpage.serving import Detokenizer
from kvpage.serving.text.detokenizer import SpaceCleanup, cleaned

TOKENIZERS = {
    "byte_level": byte_level,
    "metaspace": metaspace,
    "word_piece": word_piece,
    "word_piece_as_it_is": lambda: word_piece(False),
}
EMOJI = "Ångström 🤖🏴 漢字, crème 🙂!"


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


@pytest.mark.parametrize("sizes", [[1], [1, 3, 0, 2]], ids=str)
def test_a_tokenizer_in_python_leaves_out_broken_characters_and_raises_for_ids_that_it_lacks(sizes: list[int]) -> None:
    tokenizer, chance = ByT5Tokenizer(), random.Random(5)
    known = [*tokenizer.encode(EMOJI, add_special_tokens=False), *range(3, 259, 7)]
    with pytest.raises(ValueError):
        tokenizer.decode([len(tokenizer)])
    for length in [0, 1, 2, 3, 5, 8, 40, 200] * 6:
        begin, detokenizer = chance.randrange(30), Detokenizer(tokenizer)
        text = (known[begin:] + [chance.choice(known[:40]) for _ in range(length)])[:length]
        tokens = [one for token in text for one in ([token, 1000] if token % 5 == 0 else [token])]
        assert "".join(pieces(detokenizer, tokens, sizes)) == tokenizer.decode(text), tokens


def pieces(detokenizer: Detokenizer, tokens: list[int], sizes: list[int]) -> list[str]:
    """Push the tokens, so many at once in turn; return all pieces, the flushed one last."""
    found, begin, turn = [], 0, 0
    while begin < len(tokens):
        size = sizes[turn % len(sizes)]
        found.append(detokenizer.push(tokens[begin : begin + size]))
        begin, turn = begin + size, turn + 1
    return [*found, detokenizer.flush()]


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("sizes", [[1], [1, 3, 0, 2]], ids=str)
def test_random_tokens_are_those_of_decode(tokenizer: PreTrainedTokenizerFast, skips: bool, sizes: list[int]) -> None:
    """Invalid bytes, special tokens and ids that the tokenizer lacks among them; one object for all texts."""
    chance, detokenizer = random.Random(7), Detokenizer(tokenizer, skip_special_tokens=skips)
    for length in [0, 1, 2, 3, 5, 8, 40, 200] * 12:
        tokens = [chance.randrange(len(tokenizer) + 3) for _ in range(length)]
        found = pieces(detokenizer, tokens, sizes)
        assert "".join(found) == tokenizer.decode(tokens, skip_special_tokens=skips), tokens


def test_many_bytes_and_many_broken_characters_are_those_of_decode(tokenizer: PreTrainedTokenizerFast) -> None:
    """More tokens without a whole character than are kept."""
    chance, vocab = random.Random(3), tokenizer.get_vocab()
    alphabet = [index for name, index in vocab.items() if len(name) == 1 or name.startswith("<0x")]
    for length in [1, 4, 31, 32, 33, 34, 100, 300] * 4:
        tokens = [chance.choice(alphabet) for _ in range(length)]
        assert "".join(pieces(Detokenizer(tokenizer), tokens, [1])) == tokenizer.decode(tokens)


@pytest.mark.parametrize("name", ["decode", "_decode"])
def test_a_tokenizer_that_decodes_in_its_own_way_is_asked(name: str) -> None:
    plain = byte_level()
    own = type(
        "Own", (type(plain),), {name: lambda self, *args, **kwargs: getattr(plain, name)(*args, **kwargs).upper()}
    )
    tokenizer = own(tokenizer_object=plain.backend_tokenizer)
    tokens = plain.encode("hello there", add_special_tokens=False)
    assert "".join(pieces(Detokenizer(tokenizer), tokens, [1])) == "HELLO THERE"


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_a_character_of_several_tokens_comes_whole(make) -> None:
    tokenizer = make()
    tokens = tokenizer.encode(EMOJI, add_special_tokens=False)
    assert len(tokens) > len(EMOJI.encode()) // 2
    found = pieces(Detokenizer(tokenizer), tokens, [1])
    assert "".join(found).strip() == EMOJI
    assert not any("\ufffd" in piece for piece in found), found
    assert sum(map(bool, found)) > 5, "the text comes piece by piece"


def test_another_one_begins_its_own_text(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer.encode(EMOJI, add_special_tokens=False)
    one = Detokenizer(tokenizer, skip_special_tokens=False)
    begin, other = one.push(tokens[:2]), one.another()
    text = tokenizer.decode(tokens)
    assert other.push(tokens) + other.flush() == text == begin + one.push(tokens[2:]) + one.flush()


def test_text_comes_as_soon_as_it_is_settled() -> None:
    tokenizer, found = byte_level(), []
    detokenizer = Detokenizer(tokenizer)
    for token in tokenizer.encode("a€!", add_special_tokens=False):
        found.append(detokenizer.push([token]))
    assert found == ["a", "", "", "€", "!"]
    assert detokenizer.push([]) == detokenizer.flush() == ""


def test_a_text_that_lacks_bytes_ends_in_a_replacement_character() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)
    tokens = tokenizer.encode("ab€", add_special_tokens=False)[:-1]
    assert "".join(detokenizer.push([token]) for token in tokens) == "ab"
    assert detokenizer.flush() == tokenizer.decode(tokens)[2:] == "\ufffd"
    assert detokenizer.push(tokens[:1]) + detokenizer.flush() == tokenizer.decode(tokens[:1]), "a new text begins"


def test_special_tokens_are_skipped_or_kept() -> None:
    tokenizer = metaspace()
    end, tool = tokenizer.convert_tokens_to_ids(["<|end|>", "<tool>"])
    tokens = [*tokenizer.encode("the dog", add_special_tokens=False), end, tool, tokenizer.eos_token_id]
    skipped, kept = ("".join(pieces(Detokenizer(tokenizer, skips), tokens, [1])) for skips in (True, False))
    assert skipped.split() == ["the", "dog", "<tool>"]
    assert kept.replace(" ", "") == "thedog<|end|><tool></s>"


def test_cleaned_spaces_are_those_of_transformers() -> None:
    chance, tokenizer = random.Random(1), word_piece()
    parts = [" ", "  ", "n", "'t", "'", ".", "x", " n't", " 's", "v", "'ve", " ' ", "?", "é", " '", "re", "m"]
    for length in range(1, 400):
        chosen = [chance.choice(parts) for _ in range(length % 24)]
        cleanup = SpaceCleanup()
        text = "".join(map(cleanup.push, chosen)) + cleanup.flush()
        assert text == cleaned("".join(chosen)) == tokenizer.clean_up_tokenization("".join(chosen))


def test_other_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="tokenizer must be a tokenizer of transformers, got str"):
        Detokenizer("gpt2")
    with pytest.raises(TypeError, match="skip_special_tokens must be True or False, got int"):
        Detokenizer(byte_level(), 1)
