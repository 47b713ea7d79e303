"""The fake of tests/support/fake_vllm.py beside the real vLLM, where it is installed: names, parameters, fields."""

import dataclasses
import importlib
import importlib.util
import inspect

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: tests/integrations/run.sh vllm", allow_module_level=True)

from support import fake_vllm

from kvpage.integrations.vllm.interface import TESTED, check_interface, vllm_version

pytestmark = pytest.mark.routers
MEMBERS = [(module, member) for module, members in fake_vllm.MODULES.items() for member in members]


def test_the_installed_version_is_a_tested_one(caplog):
    check_interface()
    assert vllm_version().startswith(TESTED) and not caplog.text


@pytest.mark.parametrize(("module", "member"), MEMBERS, ids=lambda value: getattr(value, "__name__", None))
def test_members_are_those_of_vllm(module, member):
    real = getattr(importlib.import_module(module), member.__name__)
    if dataclasses.is_dataclass(member) and member.__name__ != "OffloadingConnectorStats":
        assert {field.name for field in dataclasses.fields(member)} <= {
            field.name for field in dataclasses.fields(real)
        }
    for name, function in vars(member).items():
        if inspect.isfunction(function) and not name.startswith("_"):
            expected = list(inspect.signature(function).parameters)
            assert list(inspect.signature(getattr(real, name)).parameters)[: len(expected)] == expected, name
    for name in getattr(member, "__members__", ()):
        assert hasattr(real, name)


def test_duties_of_a_tier_are_those_of_vllm():
    real = importlib.import_module("vllm.v1.kv_offload.tiering.base").SecondaryTierManager
    assert fake_vllm.SecondaryTierManager.__abstractmethods__ == real.__abstractmethods__
    names = {name for name in vars(fake_vllm.SecondaryTierManager) if not name.startswith("_")}
    assert names <= set(dir(real))
