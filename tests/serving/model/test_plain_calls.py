"""Under a transform of torch a call has more to do than to compute, and no operation may stand in for it."""

import pytest
import torch
from torch.autograd import forward_ad

from kvpage.serving.model.native.plain import is_plain_call


@pytest.mark.parametrize("name", ["none", "vmap", "jvp", "dual"])
def test_transformed_calls_are_not_plain(name: str) -> None:
    found = []

    def layer(rows: torch.Tensor) -> torch.Tensor:
        found.append(is_plain_call(rows))
        return rows * 2

    rows = torch.ones(3, 4)
    with torch.no_grad():
        if name == "vmap":
            torch.func.vmap(layer)(rows)
        elif name == "jvp":
            torch.func.jvp(layer, (rows,), (rows,))
        elif name == "dual":
            with forward_ad.dual_level():
                layer(forward_ad.make_dual(rows, rows))
        else:
            layer(rows)
    assert found == [name == "none"]
