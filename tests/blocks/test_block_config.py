"""BlockConfig: the options of a manager in one record, which checks itself."""

import pytest

from kvpage import BlockConfig, BlockManager, CacheConfig, HostPolicy, Window
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.serving import EngineConfig


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"num_blocks": -1}, ValueError, "num_blocks must be at least 0, got -1"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        ({"block_size": 4.0}, TypeError, "block_size must be an integer, got 4.0"),
        ({"num_host_blocks": -1}, ValueError, "num_host_blocks must be at least 0, got -1"),
        ({"enable_prefix_caching": 1}, TypeError, "enable_prefix_caching must be True or False, got int"),
        ({"share_parts": None}, TypeError, "share_parts must be True or False, got NoneType"),
        ({"host_policy": 2}, TypeError, "host_policy must be a HostPolicy, got int"),
        ({"pin_quota": -1}, ValueError, "pin_quota must be an integer of at least 0, got -1"),
    ],
)
def test_other_options_are_refused(options, error, message):
    for make in (BlockConfig, BlockManager):
        with pytest.raises(error, match=message):
            make(**{"num_blocks": 8, "block_size": 4, **options})


@pytest.mark.parametrize("is_caching", [True, False])
def test_a_manager_has_the_options_of_its_config(is_caching):
    config = BlockConfig(8, 4, is_caching, num_host_blocks=3, host_policy=HostPolicy(1), pin_quota=2)
    rule = LoadOrCompute(1, 4, bytes_per_second=1.0)
    manager = BlockManager.of(config, rule=rule)
    assert manager.space.rule is rule and BlockManager.of(config).space.rule is not rule
    assert (manager.num_blocks, manager.block_size, manager.enable_prefix_caching) == (8, 4, is_caching)
    assert manager.share_parts is is_caching
    assert manager.space.host_pool.num_blocks == 3 and manager.space.host_policy == HostPolicy(1)
    assert not BlockManager.of(config, groups=[Window(8, 4)] if is_caching else []).share_parts


def test_an_engine_config_has_the_options_of_its_blocks():
    config = EngineConfig(CacheConfig(4, 8, num_cpu_blocks=3), share_parts=False, pin_quota=2)
    assert config.block_config() == BlockConfig(8, 4, num_host_blocks=3, share_parts=False, pin_quota=2)


def test_the_cache_of_a_config_must_be_one():
    with pytest.raises(TypeError, match="cache must be a CacheConfig, got int"):
        BlockConfig.of_cache(8)
