"""ServerConfig and ApiKey check themselves."""

import pytest

pytest.importorskip("fastapi")

from kvpage.server import ApiKey, ServerConfig  # noqa: E402


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"max_n": 0}, ValueError, "max_n must be an integer of at least 1, got 0"),
        ({"max_body_bytes": True}, ValueError, "max_body_bytes must be an integer of at least 1"),
        ({"max_prompt_tokens": 0}, ValueError, "max_prompt_tokens must be an integer of at least 1"),
        ({"max_logprobs": 21}, ValueError, "max_logprobs must be at most 20, got 21"),
        ({"chat_template": b""}, TypeError, "chat_template must be a str or None, got bytes"),
        ({"return_tokens_as_ids": 1}, TypeError, "return_tokens_as_ids must be True or False, got int"),
        ({"served_model_names": "a"}, TypeError, "served_model_names must be several, got one str"),
        ({"served_model_names": ()}, ValueError, "served_model_names must hold at least one name"),
        ({"served_model_names": [""]}, ValueError, "served_model_names must be names, got"),
        ({"allowed_hosts": "localhost"}, TypeError, "allowed_hosts must be several, got one str"),
        ({"max_pin_seconds": 0}, ValueError, "max_pin_seconds must be positive, got 0"),
        ({"max_body_seconds": 0}, ValueError, "max_body_seconds must be positive, got 0"),
        ({"max_open_bytes": 2**20}, ValueError, "max_open_bytes must be an integer of at least 16777216, got 1048576"),
        ({"max_batch_tokens": 0}, ValueError, "max_batch_tokens must be an integer of at least 1, got 0"),
        ({"max_pin_seconds": "1"}, TypeError, "max_pin_seconds must be a number, got str"),
        ({"send_timeout": 0}, ValueError, "send_timeout must be positive, got 0"),
        ({"send_timeout": True}, TypeError, "send_timeout must be a number, got bool"),
        ({"tenant_pin_quota": -1}, ValueError, "tenant_pin_quota must be an integer of at least 0, got -1"),
        ({"max_retain_priority": 101}, ValueError, "max_retain_priority must be at most 100, got 101"),
        ({"min_priority": 1}, ValueError, "min_priority must be at most 0, got 1"),
        ({"min_priority": 0.5}, TypeError, "min_priority must be an integer, got 0.5"),
        ({"api_keys": ["secret"]}, TypeError, "api_keys must be ApiKey objects"),
        ({"api_keys": [ApiKey("a"), ApiKey("a", "b")]}, ValueError, "api_keys must differ, one is there twice"),
    ],
)
def test_wrong_values_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        ServerConfig(**fields)


@pytest.mark.parametrize("key", ["", "a b", "a\n", "\u00e4"])
def test_keys_are_printable_ascii(key):
    with pytest.raises(ValueError, match="key must be printable ASCII without spaces, and not empty"):
        ApiKey(key)


@pytest.mark.parametrize(("key", "tenant"), [(1, ""), ("a", 1)])
def test_keys_and_tenants_are_text(key, tenant):
    with pytest.raises(TypeError, match="key must be a str, and tenant a str or None"):
        ApiKey(key, tenant)


def test_no_repr_shows_a_key():
    assert "secret" not in repr(ServerConfig(api_keys=[ApiKey("secret", "tenant")]))
