"""GPUs that no kernel is compiled for are refused by name when a cache or an engine is made for them."""

import pytest
import torch

from kvpage import CacheConfig, CacheEngine, DeviceConfig, ModelConfig
from kvpage.ops.cuda.served import check_served

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """Give this machine a GPU of a name and a compute capability, or of ROCm."""

    def make(name="NVIDIA A100", capability=(8, 0), hip=None):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)

    return make


OLD = [("Tesla T4", (7, 5)), ("Tesla V100-SXM2-16GB", (7, 0)), ("Tesla P100-PCIE-16GB", (6, 0))]


@pytest.mark.parametrize("name, capability", OLD)
def test_old_gpus_are_refused(gpu, name, capability):
    gpu(name, capability)
    number = r"\.".join(map(str, capability))
    rule = rf"compute capability 8\.0 or later .*, got cuda:0, {name}, of {number}: use another GPU"
    with pytest.raises(ValueError, match=rule):
        check_served(CUDA)


def test_gpus_of_rocm_are_refused(gpu):
    gpu(capability=(9, 4), hip="6.2.41133")
    with pytest.raises(ValueError, match=r'an NVIDIA GPU .*, got cuda:0 of ROCm 6\.2\.41133: use device="cpu"'):
        check_served(CUDA)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_others_are_served(gpu, capability):
    gpu(capability=capability)
    check_served(CUDA)


def test_a_cpu_is_served_beside_any_gpu(gpu):
    gpu(capability=(5, 2), hip="6.0")
    check_served(torch.device("cpu"))
    CacheEngine(CacheConfig(4, 2, 0), ModelConfig(8, 2, ("full_attention",)))


def test_no_cache_is_made_for_one(gpu, monkeypatch):
    gpu("Tesla T4", (7, 5))
    monkeypatch.setattr(torch, "zeros", None)  # nothing is allocated
    with pytest.raises(ValueError, match=r"got cuda:0, Tesla T4, of 7\.5"):
        CacheEngine(CacheConfig(4, 2, 0), ModelConfig(8, 2, ("full_attention",)), device_config=DeviceConfig(CUDA))
