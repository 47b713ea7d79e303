"""device_kind: what vLLM computes on."""


def device_kind() -> str:
    """Return the kind of device, such as "cuda" or "cpu"."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)
