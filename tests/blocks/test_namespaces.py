"""Tenants, adapters and contents: what is different is never shared, what is the same is."""

import itertools

import numpy as np
import pytest
from support.block_requests import computed

from kvpage import BlockManager
from kvpage.blocks.namespaces import OF_WEIGHTS, Content, WeightsName, keyed_tokens, namespace_of

B, IMAGE = 4, 99


def prompt(num_placeholders, data, text=(1, 2, 3, 4, 5)):
    tokens = [*text, *[IMAGE] * num_placeholders, 7, 8, 9]
    return keyed_tokens(tokens, [Content(len(text), num_placeholders, data)])


@pytest.mark.parametrize("num_placeholders", [1, 8, 9, 10, 40])
def test_the_same_image_is_shared_and_another_is_not(num_placeholders):
    manager = BlockManager(128, B)
    tokens, namespace = prompt(num_placeholders, b"cat")
    assert computed(manager, 0, tokens, namespace).num_cached_tokens == 0
    again = prompt(num_placeholders, b"cat")
    assert np.array_equal(again[0], tokens) and again[1] == namespace
    whole = (len(tokens) - 1) // B * B
    assert computed(manager, 1, *again).num_cached_tokens >= whole
    other, other_namespace = prompt(num_placeholders, b"dog")
    shared = 5 if num_placeholders >= 9 else 0  # the text before it
    assert computed(manager, 2, other, other_namespace).num_cached_tokens == shared
    assert len(tokens) == 8 + num_placeholders and (tokens[5:-3] < 0).all()


def test_nine_placeholders_hold_the_whole_digest():
    ids = {tuple(prompt(9, bytes([i]))[0].tolist()) for i in range(256)}
    assert len(ids) == 256
    tokens = prompt(9, b"cat")[0][5:-3].tolist()
    number = sum((-1 - token) << (31 * i) for i, token in enumerate(tokens))
    import hashlib

    assert number == int.from_bytes(hashlib.sha256(b"cat").digest(), "little")


def test_namespaces_are_told_apart():
    parts = [b"", b"a", b"ab", b"\0"], ["", "a", "b"], [(), (b"x",), (b"x", b"y"), (b"xy",)]
    names = [namespace_of(*choice) for choice in itertools.product(*parts)]
    assert len(set(names)) == len(names) and namespace_of() == b""
    with pytest.raises(TypeError, match="salt must be bytes"):
        namespace_of("tenant")


def test_several_contents():
    tokens = [1, *[IMAGE] * 9, 2, *[IMAGE] * 10]
    keyed, namespace = keyed_tokens(tokens, [Content(1, 9, b"a"), Content(11, 10, b"b")], salt=b"tenant")
    assert namespace == namespace_of(b"tenant") and keyed[0] == 1 and keyed[10] == 2
    swapped, _ = keyed_tokens(tokens, [Content(1, 9, b"b"), Content(11, 10, b"a")])
    assert (keyed[1:10] == swapped[11:20]).all() and (keyed[1:10] != swapped[1:10]).any()


@pytest.mark.parametrize("spans", [[(0, 3), (2, 2)], [(4, 2), (0, 2)], [(8, 3)], [(11, 1)]])
def test_contents_must_lie_in_order_within_the_tokens(spans):
    with pytest.raises(ValueError, match="contents must be in order within"):
        keyed_tokens(list(range(10)), [Content(start, count, b"x") for start, count in spans])


def test_bad_contents_and_tokens_raise():
    with pytest.raises(ValueError, match="tokens must not be negative, got -1"):
        keyed_tokens([1, -1], [])
    for start, count in ((-1, 1), (0, 0), (0.0, 1), (True, 1)):
        with pytest.raises(ValueError, match="must be an integer of at least"):
            Content(start, count, b"x")
    with pytest.raises(TypeError, match="data must be bytes"):
        Content(0, 1, "digest")


@pytest.mark.parametrize("caller", [b"", b"a", b"\xff", bytes(range(256)), OF_WEIGHTS, OF_WEIGHTS + b"\x01" + bytes(7)])
def test_weights_and_a_callers_namespace_make_one_that_no_other_pair_makes(caller):
    names = [WeightsName(version, adapter) for version in ("", "v1", "v", "1") for adapter in ("", "d", "1d")]
    wholes = [name.within(caller) for name in names]
    assert [WeightsName.split(whole) for whole in wholes] == [(name, caller) for name in names]
    others = [name.within(wholes[1]) for name in names] + [name.within(caller + b"x") for name in names]
    assert len({*wholes, *others}) == len(wholes) + len(others)
    assert (wholes[0] == caller) != caller.startswith(OF_WEIGHTS)
