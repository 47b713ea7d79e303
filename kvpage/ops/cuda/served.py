"""The devices that kvpage's kernels are compiled for: NVIDIA's GPUs of compute capability 8.0 and later."""

import torch

LEAST_CAPABILITY = 8, 0


def check_served(device: torch.device) -> None:
    """Refuse a GPU for which no kernel can be compiled. A CPU is always served.

    Args:
        device: A CPU or a CUDA device.

    Raises:
        ValueError: The GPU is AMD's, or its compute capability is less than 8.0.
    """
    if device.type != "cuda":
        return
    rule = "device must be a CPU or an NVIDIA GPU of compute capability 8.0 or later (A100, A10, L4, RTX 30 and newer)"
    if torch.version.hip:
        raise ValueError(f'{rule}, got {device} of ROCm {torch.version.hip}: use device="cpu"')
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ValueError(f'{rule}, got {device}, {name}, of {major}.{minor}: use another GPU, or device="cpu"')
