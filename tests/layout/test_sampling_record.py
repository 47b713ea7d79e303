"""The record by which a row's token is chosen: its places in memory, and who else must have the same."""

import importlib

import numpy as np
import pytest
import torch

import kvpage._C as _C
from kvpage.layout import sampling_record
from kvpage.layout.sampling_record import DRAW, RECORD_WORDS, ROW_RULES, SAMPLING_RECORD, SamplingRecord, word_of


def test_records_are_whole_words_and_each_field_is_aligned():
    assert SAMPLING_RECORD.itemsize == 8 * RECORD_WORDS
    for kinds in (SAMPLING_RECORD, ROW_RULES):
        assert all(offset % kind.itemsize == 0 for kind, offset in kinds.fields.values())


def test_the_extension_has_the_same_rows():
    assert ROW_RULES == _C.ROW_RULES and ROW_RULES.fields == _C.ROW_RULES.fields
    assert set(ROW_RULES.names) == {*DRAW, "position"} and set(DRAW) <= set(SAMPLING_RECORD.names)


def test_an_extension_with_other_rows_is_refused(monkeypatch):
    from kvpage.ops.cpu import sampling

    monkeypatch.setattr(_C, "ROW_RULES", np.dtype([("seed", np.uint64)]))
    with pytest.raises(ImportError, match="kvpage._C must be built for records .*position.*: build it again"):
        importlib.reload(sampling)


def test_numbers_survive_in_a_record():
    numbers = SamplingRecord(2**64 - 1, 8, 16, 0.75, 5, 0.5, -3.0, 1.5, -0.25, 0.125, 1, 7, 2**62)
    words = torch.from_numpy(np.array([numbers], SAMPLING_RECORD).view(np.int64))
    assert SamplingRecord.of(words) == numbers


def test_places_of_fields():
    assert [word_of("seed"), word_of("temperature", "least_score")] == [0, 5]
    assert SAMPLING_RECORD.fields["first_at"][1] == 8 * word_of("first_at") == 8 * (RECORD_WORDS - 1)


@pytest.mark.parametrize(
    "names", [("temperature",), ("least_score", "temperature"), ("least_score", "repetition"), ("seed", "words")]
)
def test_fields_that_are_no_word(names):
    with pytest.raises(ValueError, match=f"fields must make up a word of 64 bits, got {', '.join(names)}"):
        word_of(*names)


def test_bits_of_words_are_apart():
    bits = [
        sampling_record.COUNT_BITS,
        *(getattr(sampling_record, name) for name in ("SUPPRESSED", "ENDS", "NOT_FIRST", "SEEN")),
    ]
    assert sum(bits) == np.bitwise_or.reduce(bits) == 2**31 - 1
