"""Blender: blends the prompts of one model. A model is tried out first, see blender_check.py."""

from collections.abc import Sequence

from torch import nn

from kvpage.blend.config import BlendConfig
from kvpage.blend.rotary import RotaryTables
from kvpage.serving.blending.blend_pass import BlendPass
from kvpage.serving.model.step import BatchItem, Step


class Blender:
    """For one model and one BlendConfig. It owns no K and V.

    layers: the decoder's, which go on with the rows that are chosen. rotary: of each of them; None where K is not
        rotated.
    """

    def __init__(self, config: BlendConfig, layers: Sequence[nn.Module], rotary: Sequence[RotaryTables | None]) -> None:
        self.config, self._layers, self._rotary = config, layers, rotary

    def begin(self, step: Step, items: Sequence[BatchItem]) -> BlendPass:
        """Return the blending of `step`, which computes `items`: at least one of them reuses something."""
        return BlendPass(self.config, self._layers, self._rotary, step, items)
