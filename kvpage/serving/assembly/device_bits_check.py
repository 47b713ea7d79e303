"""What cannot have the same bits on a GPU, by options and the kind of model."""

from transformers import PreTrainedModel

from kvpage.checks.errors import OptionError
from kvpage.ops.cuda.libraries.rules import OURS
from kvpage.serving.config import EngineConfig


def check_device_bits(model: PreTrainedModel, config: EngineConfig, has_states: bool) -> None:
    """Raise OptionError for what cannot have the same bits on a GPU, with the reason. Operators are looked at later."""
    name = type(model).__name__
    for is_refused, why in (
        (has_states, f"{name} keeps states, whose scans on a GPU are others' kernels"),
        (config.cache_config.backend == "mla", "latents are multiplied by torch on a GPU, in an order of its own"),
        (config.blend is not None, "blending chooses tokens by torch's operators on a GPU"),
        (getattr(model, "hf_quantizer", None) is not None, f"products of the quantised weights of {name} are others'"),
        (not config.native_layers, "native_layers is False, and torch's norms on a GPU depend on the number of rows"),
        (
            config.attention_backend not in ("auto", OURS),
            f"attention_backend is {config.attention_backend!r}, and only kvpage's kernel splits keys by position",
        ),
    ):
        if is_refused:
            raise OptionError(f"same_bits must be False: {why}")
