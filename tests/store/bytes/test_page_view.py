"""PageView: pages of tensors of any strides as records, against plain indexing; starts, null pages, other layouts."""

import pytest
import torch
from support.byte_stores import opened

from kvpage.store import PageView

PAGES, SIZE, HEADS, DIM = 6, 4, 2, 8


def tensors_of(kind: str) -> tuple[list[torch.Tensor], int, int]:
    """Tensors, and the dimensions of pages and tokens."""
    generator = torch.Generator().manual_seed(5)

    def made(*shape: int) -> torch.Tensor:
        return torch.randint(0, 1 << 15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)

    if kind == "pages first":
        return [made(PAGES, SIZE, HEADS, DIM) for _ in range(3)], 0, 1
    if kind == "pages second":
        return [made(2, PAGES, SIZE, HEADS, DIM) for _ in range(3)], 1, 2
    if kind == "heads before tokens":
        return [made(PAGES, HEADS, SIZE, DIM).transpose(1, 2) for _ in range(2)], 0, 1
    if kind == "with gaps":
        return [made(PAGES, SIZE + 3, HEADS, DIM + 5)[:, :SIZE, :, :DIM]], 0, 1
    if kind == "of all layers":
        return [made(3, 2, PAGES, SIZE, HEADS * DIM)], 2, 3
    return [made(PAGES, SIZE, 1)], 0, 1


KINDS = ["pages first", "pages second", "heads before tokens", "with gaps", "of all layers", "small"]


def page(tensor: torch.Tensor, page_dim: int, number: int) -> torch.Tensor:
    return tensor.select(page_dim, number).view(torch.int16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_together", [1, 2, 3])
def test_pages_come_back_elsewhere_and_nothing_else_changes(kind: str, num_together: int) -> None:
    tensors, page_dim, token_dim = tensors_of(kind)
    copies = [one.clone(memory_format=torch.preserve_format) for one in tensors]
    for one in copies:
        one.view(torch.int16).fill_(-7)
    source, target = PageView(tensors, page_dim, token_dim), PageView(copies, page_dim, token_dim)
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1))
    ids = order[: PAGES // num_together * num_together].reshape(-1, num_together)
    keys = [b"%d" % number for number in range(len(ids))]
    with opened(header={"pages": source.name}) as store:
        assert all(store.put(keys, source.pieces(ids)))
        back = ids.flip(0, 1)[: len(ids) - 1]
        assert store.get_into(keys[: len(back)], target.pieces(back)) == [True] * len(back)
    taken = dict(zip(back.flatten().tolist(), ids.flatten().tolist(), strict=False))
    for number in range(PAGES):
        for one, copy in zip(tensors, copies, strict=True):
            found = page(copy, page_dim, number)
            expected = page(one, page_dim, taken[number]) if number in taken else torch.full_like(found, -7)
            assert torch.equal(found, expected), number


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [0, 1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 3 * SIZE + 2, 6 * SIZE, 7 * SIZE])
def test_a_load_from_a_token_on_leaves_those_before_it_alone(kind: str, start: int) -> None:
    tensors, page_dim, token_dim = tensors_of(kind)
    copies = [one.clone(memory_format=torch.preserve_format) for one in tensors]
    for one in copies:
        one.view(torch.int16).fill_(-7)
    keys, ids = [b"a", b"b", b"c"], [[0, 1], [2, 3], [4, 5]]
    source, target = PageView(tensors, page_dim, token_dim), PageView(copies, page_dim, token_dim)
    with opened(header={"pages": source.name}) as store:
        assert all(store.put(keys, source.pieces(ids)))
        found = store.get_into(keys, target.pieces(ids, start))
        assert found == [start < (number + 1) * 2 * SIZE for number in range(3)]
    for one, copy in zip(tensors, copies, strict=True):
        for number in range(PAGES):
            old, new = page(one, page_dim, number), page(copy, page_dim, number)
            for token in range(SIZE):
                dim = token_dim - (token_dim > page_dim)
                expected = old.select(dim, token) if number * SIZE + token >= start else torch.tensor(-7)
                assert (new.select(dim, token) == expected).all(), (number, token)


def test_null_pages_are_left_out_of_reads_and_refused_in_writes() -> None:
    tensors, *dims = tensors_of("pages second")
    copies = [torch.zeros_like(one) for one in tensors]
    view, other = PageView(tensors, *dims), PageView(copies, *dims)
    with opened() as store:
        assert store.put([b"a", b"null"], view.pieces([[0, 1], [-1, -1]])) == [True, False]
        assert store.contains([b"a", b"null"]) == [True, False]
        with pytest.raises(ValueError, match="pieces must be whole"):
            store.put([b"b"], view.pieces([[2, -1]]))
        with pytest.raises(ValueError, match="pieces must be whole"):
            store.put([b"b"], view.pieces([[2, 3]], start=1))
        assert store.get_into([b"a", b"null"], other.pieces([[-1, 3], [-1, -1]])) == [True, False]
        for one, copy in zip(tensors, copies, strict=True):
            assert torch.equal(page(copy, 1, 3), page(one, 1, 1)) and not copy[:, :3].any() and not copy[:, 4:].any()


def test_pages_of_another_shape_order_or_version_have_other_names() -> None:
    def named(tensor: torch.Tensor, *arguments, **more) -> str:
        return repr(PageView(tensor, *arguments, **more).name)

    base = torch.zeros(4, 3, 2, 8)
    others = [torch.zeros(4, 3, 16), torch.zeros(4, 2, 3, 8).transpose(1, 2), torch.zeros(4, 3, 2, 9), base.bfloat16()]
    names = [named(base), named(base, version="2"), named(base, token_dim=1), named(base, 1), *map(named, others)]
    assert len(set(names)) == len(names)
    assert named(torch.zeros(9, 3, 2, 8)) == names[0], "the number of pages does not matter"
    with opened(header={"pages": PageView(base, version="2").name}):
        pass


def test_wrong_views_and_ids_are_refused() -> None:
    base = torch.zeros(4, 3)
    for arguments in ([[base, torch.zeros(5, 3)]], [base, 2], [base, -1], [base, 0, 0], [torch.zeros(0, 3)],
                      [base.to("meta")], [[base, torch.zeros(4, 2)], 0, 1], [[]]):  # fmt: skip
        with pytest.raises(ValueError, match="must"):
            PageView(*arguments)
    with pytest.raises(TypeError, match="tensors must be torch tensors"):
        PageView([1])
    view = PageView(base)
    for ids in ([4], [-2], [[[0]]], [0.5], 3):
        with pytest.raises(ValueError, match="page_ids must"):
            view.pieces(ids)
    with pytest.raises(ValueError, match="start must not be negative"):
        view.pieces([0], start=-1)
    assert view.pieces([]) == [] and view.page_bytes == 12 and view.num_pages == 4


def test_tensors_whose_bytes_are_not_their_own_are_refused_by_name() -> None:
    base, wide, gone = torch.zeros(4, 3), torch.zeros(30), torch.zeros(4, 3)
    gone.untyped_storage().resize_(0)
    refused = [
        (base[:1].expand(4, 3), "elements must share no byte"),
        (wide.as_strided((4, 3), (2, 1)), "elements must share no byte"),
        (wide.as_strided((3, 4), (1, 2)), "elements must share no byte"),
        (torch.zeros(4, 3, dtype=torch.complex64).conj(), "tensors must be resolved"),
        (gone, "tensors must have memory, got one of 48 bytes whose storage has 0"),
        ([base, base], "tensors must share no byte with each other"),
        ([wide.as_strided((4, 3), (6, 1)), wide.as_strided((4, 3), (6, 1), 8)], "tensors must share no byte with each"),
    ]
    for tensors, message in refused:
        with pytest.raises(ValueError, match=message):
            PageView(tensors)
    PageView([wide.as_strided((4, 3), (6, 1)), wide.as_strided((4, 3), (6, 1), 3)]), PageView(base[:1].expand(1, 3))


def test_a_page_is_read_into_once_and_may_be_stored_twice() -> None:
    view = PageView(torch.zeros(4, 3))
    with opened() as store:
        assert store.put([b"a", b"b"], view.pieces([1, 1])) == [True, True]
        for ids in ([2, 2], [[0, 3], [3, 1]]):
            with pytest.raises(ValueError, match="pages must be given once where they are read, got page"):
                store.get_into([b"a", b"b"], view.pieces(ids))
        with pytest.raises(ValueError, match="buffers must share no byte"):
            store.get_into([b"a", b"b"], [view.pieces([2])[0], view._tensors[0][2]])
        assert store.get_into([b"a", b"none"], view.pieces([[0, -1], [-1, 1]])) == [False, False]
        assert store.put([b"a", b"b"], view.pieces([1, 2])) and store.get_into([b"a", b"b"], view.pieces([3, 0])) == [
            True,
            True,
        ]
