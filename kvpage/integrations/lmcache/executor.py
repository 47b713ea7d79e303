"""CacheBlendImpl: blends retrieved K and V with fresh ones.

    layer 0 .. check layer - 1    everything is computed; nothing is blended
    check layer                   everything is computed; the rows that deviate most are chosen, only they go on
    later layers                  retrieved K and V, rotated to their positions; fresh K and V in the chosen rows

With filters several layers choose: the first among all rows, each later one among the rows that are left.

Nothing is kept between two forward passes: layer 0 forgets the selection of the pass before.
"""

from collections.abc import Callable, Sequence

import torch

from kvpage.blend.indices import as_mask, create_index
from kvpage.blend.mixing import mix, mix_in_place
from kvpage.blend.rotary import RotaryTables
from kvpage.blend.selection import (
    METRICS,
    SEAM,
    Selection,
    check_filters,
    check_seam,
    offsets_after_seams,
    seam_weights,
    select_tokens,
    token_deviation,
)
from kvpage.checks.tensors import as_bounds, as_dim, as_floats, as_indices, as_ratio
from kvpage.checks.values import as_integer, as_list, check_flag
from kvpage.integrations.lmcache.interfaces import BlendExecutor, BlendOutput
from kvpage.layout.rotation import Rotation

Encoder = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(positions, q, k) -> (q, k), rotated to the positions, or back from them."""
Retrieved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""K, V, valid mask and original positions of all tokens."""
Fresh = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Q, K and V of the rows that are computed."""


class CacheBlendImpl(BlendExecutor):
    """Blends layer by layer and chooses the rows to compute again. Not thread-safe; one forward pass at a time.

    K is rotated by `rotary`, or by the two encoders that are set: back from the old positions, then to the new ones. On
    the host, K whose valid rows are all at their old positions is not rotated.

    Args:
        recompute_ratio: the share of valid rows to compute again, 0 to 1; one for all requests, or one a request.
        check_layer: the layer that chooses, at least 1.
        metric: the part that is compared, "k", "v" or "kv".
        rotary: tables that rotate K; None for encoders that are set later.
        filters: (layer, ratio) of layers before the check layer that drop rows already. They keep that share of the
            valid rows, or the request's own share where it is larger. Layers rise, ratios fall.
        seam: the extra weight of rows near the beginning of a segment, see seam_weights; 0 for none.
        in_place: whether the layers that mix write into the retrieved K and V, and return these. Rows that stay are
            then not copied. The caller gives up their contents: a later retrieval of them would be of the mixture.

    Raises:
        ValueError: an argument breaks a rule.
        TypeError: an argument is of the wrong type.
    """

    def __init__(
        self,
        recompute_ratio: float | Sequence[float],
        check_layer: int = 1,
        metric: str = "v",
        rotary: RotaryTables | None = None,
        filters: Sequence[tuple[int, float]] = (),
        seam: float = SEAM,
        in_place: bool = False,
    ) -> None:
        check_flag("in_place", in_place)
        if not isinstance(recompute_ratio, (int, float)):
            recompute_ratio = as_list("recompute_ratio", recompute_ratio)
        for ratio in recompute_ratio if isinstance(recompute_ratio, list) else [recompute_ratio]:
            as_ratio("recompute_ratio", ratio)
        if isinstance(check_layer, bool) or not isinstance(check_layer, int) or check_layer < 1:
            raise ValueError(f"check_layer must be an integer of at least 1, got {check_layer!r}")
        if not isinstance(metric, str) or metric not in METRICS:
            raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
        self.recompute_ratio = recompute_ratio
        self.check_layer = check_layer
        self.metric = metric
        self.rotary = rotary
        self.filters = check_filters(filters, check_layer, 1)
        self.seam = check_seam(seam)
        self.in_place = in_place
        self._least_ratio = {**dict(self.filters), check_layer: 0.0}
        self.selection: Selection | None = None
        """The last selection of the running forward pass, with every row's deviation; None before one was made."""
        self._next_layer = 0
        self._last_rotation: tuple[torch.Tensor, torch.Tensor, Rotation] | None = None
        self._encode: Encoder | None = None
        self._decode: Encoder | None = None

    def set_positional_encoder(self, encoder: Encoder) -> None:
        """Set the function that rotates q and k to positions, as the model does.

        Args:
            encoder: takes (positions, q, k), int64 [num_tokens] and rows [num_tokens, ...]; returns (q, k).
        """
        self._encode = encoder

    def set_reverse_positional_encoder(self, encoder: Encoder) -> None:
        """Set the function that undoes the rotation of q and k.

        Args:
            encoder: takes (positions, q, k), int64 [num_tokens] and rows [num_tokens, ...]; returns (q, k).
        """
        self._decode = encoder

    def blend(
        self,
        layer_id: int,
        retrieved_k: torch.Tensor,
        retrieved_v: torch.Tensor,
        valid_mask: torch.Tensor,
        original_positions: torch.Tensor,
        fresh_q: torch.Tensor,
        fresh_k: torch.Tensor,
        fresh_v: torch.Tensor,
        positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        token_dim: int = 0,
    ) -> BlendOutput:
        """Blend one layer, see BlendExecutor.

        Args:
            layer_id: the next layer, or 0 for a new forward pass.
            retrieved_k: K of all tokens, their number in dimension `token_dim`, rotated to `original_positions`. With
                `in_place` it is overwritten after the check layer, and so is V.
            retrieved_v: V likewise.
            valid_mask: bool [num_tokens], the rows that were found.
            original_positions: int64 [num_tokens].
            fresh_q: Q of the rows that are computed, rotated to `positions`.
            fresh_k: K of these rows, rotated likewise.
            fresh_v: V of these rows.
            positions: int64 [num_fresh], of the rows that are computed.
            query_start_loc: [num_requests + 1], the first retrieved row of each request, and the end.
            token_dim: the dimension of tokens in Q, K and V.

        Returns:
            Q, K and V to attend with, and the rows to go on with.

        Raises:
            ValueError: layers are out of order, or shapes do not fit each other.
            TypeError: an argument is of the wrong type.
        """
        layer_id = as_integer("layer_id", layer_id)
        if layer_id not in (0, self._next_layer):
            raise ValueError(f"layer_id must be {self._next_layer}, or 0 for a new forward pass, got {layer_id}")
        selection = self.selection if layer_id else None
        retrieved, token_dim = _retrieved(retrieved_k, retrieved_v, valid_mask, original_positions, token_dim)
        positions = as_indices("positions", positions)
        query_start_loc = as_indices("query_start_loc", query_start_loc)
        num_fresh = len(retrieved[2]) if selection is None else len(selection.indices)
        fresh = _fresh(fresh_q, fresh_k, fresh_v, token_dim, num_fresh, retrieved)
        if len(positions) != num_fresh:
            raise ValueError(f"positions must be of {num_fresh} rows, got {len(positions)}")
        if layer_id == 0:
            self.selection, self._next_layer, self._last_rotation = None, 0, None
        chosen = None
        if layer_id in self._least_ratio:  # from the retrieved rows, before they are overwritten
            chosen = self._choose(layer_id, retrieved, fresh, positions, query_start_loc, token_dim)
        output = BlendOutput(*fresh, positions, _all(num_fresh, positions), None)
        if self.selection is not None:
            output = self._mix(retrieved, fresh, positions, token_dim)
        if chosen is not None:
            output = self._narrowed(output, chosen, query_start_loc, token_dim)
        self._next_layer += 1
        return output

    def _choose(
        self,
        layer_id: int,
        retrieved: Retrieved,
        fresh: Fresh,
        positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        token_dim: int,
    ) -> Selection:
        """Return the rows to go on with. positions: of the rows that were given."""
        valid = retrieved[2]
        bounds = as_bounds("query_start_loc", query_start_loc, len(valid))
        ratios = [max(ratio, self._least_ratio[layer_id]) for ratio in self._ratios(len(bounds) - 1)]
        before = self.selection
        left = _all(len(valid), valid) if before is None else before.indices
        if before is None:
            self._positions = positions
            offsets = offsets_after_seams(valid, retrieved[3].to(valid.device), positions, query_start_loc)
            self._weights = seam_weights(offsets, self.seam)
        deviation = torch.zeros(len(valid), device=valid.device)
        deviation[left] = self._deviation(retrieved, fresh, left, positions, token_dim) * self._weights[left]
        among = None if before is None else before.places >= 0
        return select_tokens(deviation, valid, bounds, ratios, among)

    def _narrowed(
        self, output: BlendOutput, chosen: Selection, query_start_loc: torch.Tensor, token_dim: int
    ) -> BlendOutput:
        """Return the output with the chosen rows alone, and remember them."""
        before, self.selection = self.selection, chosen
        local = chosen.indices if before is None else before.places[chosen.indices]
        q = output.q[create_index(output.q.dim(), token_dim, local)]
        starts = chosen.query_start_loc.to(query_start_loc.dtype)
        return BlendOutput(q, output.k, output.v, output.positions[local], local, starts)

    def _deviation(
        self,
        retrieved: Retrieved,
        fresh: Fresh,
        left: torch.Tensor,
        positions: torch.Tensor,
        token_dim: int,
    ) -> torch.Tensor:
        """Return the deviation of the rows that are left: the fresh rows are these."""
        k, v, valid, original = retrieved
        if len(left) < len(valid):
            k, v = (part.index_select(token_dim, left) for part in (k, v))
            valid, original = valid[left], original.to(left.device)[left]
        deviation = torch.zeros(len(left), device=valid.device)
        if "k" in self.metric:
            deviation = token_deviation(
                fresh[1], self._rotated(k, original, positions, valid, token_dim), valid, token_dim
            )
        if "v" in self.metric:
            deviation = deviation + token_deviation(fresh[2], v, valid, token_dim)
        return deviation

    def _mix(
        self,
        retrieved: Retrieved,
        fresh: Fresh,
        positions: torch.Tensor,
        token_dim: int,
    ) -> BlendOutput:
        assert self.selection is not None
        k, v, valid, original = retrieved
        fresh_q, fresh_k, fresh_v = fresh
        fresh_rows = self.selection.places
        rotation, head_size = None, None
        if not _stays(original, self._positions, valid):
            if self.rotary is None:
                k = self._encoded(k, original, self._positions, token_dim)
            else:
                rotation, head_size = self._rotation(original, self._positions, k.device), self.rotary.head_size
        put = mix_in_place if self.in_place else mix
        if k is not retrieved[0] and self.in_place:
            k = retrieved[0].copy_(k)
        mixed_k = put(k, token_dim, head_size, rotation, fresh_k.to(k.dtype), fresh_rows)
        mixed_v = put(v, token_dim, None, None, fresh_v.to(v.dtype), fresh_rows)
        return BlendOutput(fresh_q, mixed_k, mixed_v, positions, _all(len(positions), positions), None)

    def _rotated(
        self, k: torch.Tensor, old: torch.Tensor, new: torch.Tensor, valid: torch.Tensor, token_dim: int
    ) -> torch.Tensor:
        if _stays(old, new, valid):
            return k
        if self.rotary is not None:
            return mix(k, token_dim, self.rotary.head_size, self._rotation(old, new, k.device))
        return self._encoded(k, old, new, token_dim)

    def _encoded(self, k: torch.Tensor, old: torch.Tensor, new: torch.Tensor, token_dim: int) -> torch.Tensor:
        if self._encode is None or self._decode is None:
            raise ValueError("rotary, or both positional encoders, must be set before K can be rotated")
        old, rows = old.to(k.device), k.movedim(token_dim, 0)
        nothing = torch.zeros_like(rows)
        rotated = self._encode(new, nothing, self._decode(old, nothing, rows)[1])[1]
        return rotated.movedim(0, token_dim)

    def _rotation(self, old: torch.Tensor, new: torch.Tensor, device: torch.device) -> Rotation:
        """Return the rotation, that of the layer before for the same positions: on a device, the same tensors."""
        assert self.rotary is not None
        last = self._last_rotation
        if last is None or not (_is_same(last[0], old) and _is_same(last[1], new)):
            last = _kept(old), _kept(new), self.rotary.rotation(old, new, device)
            self._last_rotation = last
        return last[2]

    def _ratios(self, num_requests: int) -> list[float]:
        if isinstance(self.recompute_ratio, (int, float)):
            return [self.recompute_ratio] * num_requests
        ratios = list(self.recompute_ratio)
        if len(ratios) != num_requests:
            raise ValueError(f"recompute_ratio must be one, or one a request, got {len(ratios)} for {num_requests}")
        return ratios


def _retrieved(
    k: torch.Tensor, v: torch.Tensor, valid_mask: torch.Tensor, original_positions: torch.Tensor, token_dim: int
) -> tuple[Retrieved, int]:
    """Return the checked tensors and their token dimension. Raises ValueError if they do not fit each other."""
    k = as_floats("retrieved_k", k)
    token_dim = as_dim("token_dim", token_dim, k)
    num_tokens = k.shape[token_dim]
    v = _of_rows("retrieved_v", v, token_dim, num_tokens)
    valid = as_mask(valid_mask).to(k.device)
    original_positions = as_indices("original_positions", original_positions)
    if len(valid) != num_tokens or len(original_positions) != num_tokens:
        raise ValueError(
            f"valid_mask and original_positions must be of {num_tokens} tokens, "
            f"got {len(valid)} and {len(original_positions)}"
        )
    return (k, v, valid, original_positions), token_dim


def _fresh(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, token_dim: int, num_rows: int, retrieved: Retrieved
) -> Fresh:
    """Return the checked tensors. Raises ValueError unless they have `num_rows` rows of the retrieved shapes."""
    return (
        _of_rows("fresh_q", q, token_dim, num_rows),
        _of_rows("fresh_k", k, token_dim, num_rows, retrieved[0]),
        _of_rows("fresh_v", v, token_dim, num_rows, retrieved[1]),
    )


def _of_rows(
    name: str, tensor: torch.Tensor, token_dim: int, num_rows: int, like: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the tensor. Raises ValueError unless it has `num_rows` rows, each of the shape of a row of `like`."""
    tensor = as_floats(name, tensor)
    shape = list(tensor.shape)
    if token_dim >= len(shape) or shape[token_dim] != num_rows:
        raise ValueError(f"{name} must have {num_rows} rows in dimension {token_dim}, got shape {shape}")
    if like is not None and like.movedim(token_dim, 0).shape[1:] != tensor.movedim(token_dim, 0).shape[1:]:
        raise ValueError(f"{name} must have rows as those of shape {list(like.shape)}, got shape {shape}")
    return tensor


def _kept(positions: torch.Tensor) -> torch.Tensor:
    return positions.clone() if positions.device.type == "cpu" else positions


def _is_same(known: torch.Tensor, positions: torch.Tensor) -> bool:
    """Return whether the positions are known to be the same, without waiting for a device."""
    return known is positions or (
        known.device == positions.device and not known.is_cuda and torch.equal(known, positions)
    )


def _stays(old: torch.Tensor, new: torch.Tensor, valid: torch.Tensor) -> bool:
    """Return whether valid rows are known to be at their old positions, without waiting for a device."""
    if any(tensor.is_cuda for tensor in (old, new, valid)):
        return False
    return bool(((old == new) | ~valid).all())


def _all(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(count, device=like.device)
