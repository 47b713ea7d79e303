"""Tensors for tests of vLLM's operations, their bits, and 8-bit floats one by one."""

import math

import pytest
import torch

FP8 = torch.float8_e4m3fn
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BLOCK_SIZE = 4
LAYERS, RANK, ROPE = 3, 8, 4


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).clone()


class Unchanged:
    """The tensors hold the same bits after the block as before."""

    def __init__(self, *tensors):
        self.tensors, self.before = tensors, [bits(tensor) for tensor in tensors]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        assert all(torch.equal(bits(tensor), before) for tensor, before in zip(self.tensors, self.before, strict=True))


def noise(*shape, device="cpu"):
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def code(number, scale):
    """The e4m3 byte of number / scale in fp32, saturating."""
    quotient = torch.tensor(number, dtype=torch.float32) / torch.tensor(scale, dtype=torch.float32)
    return quotient.clamp(-448, 448).to(FP8).view(torch.uint8).item()


def power_from(number):
    """The smallest power of two that is not below it."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def fp32(number):
    return torch.tensor(number, dtype=torch.float32).item()


def quotient(number, by):
    return (torch.tensor(number, dtype=torch.float32) / torch.tensor(by, dtype=torch.float32)).item()
