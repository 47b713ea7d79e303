"""Keys: the API keys of a server, and whose request one comes with."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpage.server.config import ApiKey
from kvpage.server.protocol.errors import ApiError

TENANT_HEADER = "x-tenant-id"
OTHER_HEADER = "x-api-key"  # where Anthropic's clients put the key
MAX_TENANT_BYTES = 256


@dataclass(frozen=True, slots=True)
class Caller:
    """The one who asks.

    Attributes:
        tenant: The tenant's name, "" for none.
    """

    tenant: str = ""

    def namespace(self, cache_salt: str | None) -> bytes:
        """Return the namespace of a request: another one for each pair of tenant and salt.

        UTF-8 never holds the byte 0xff, so no salt looks like a tenant's namespace.
        """
        salt = (cache_salt or "").encode()
        return b"\xff".join([b"", self.tenant.encode(), salt]) if self.tenant else salt


class Keys:
    """The keys of a server. No keys at all let everybody in."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = [(_digest(key.key), key) for key in keys]

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Return who asks, by the headers of a request. ApiError: 401 without a key, 403 for a foreign tenant."""
        other = f"Bearer {headers.get(OTHER_HEADER, '')}"
        key = self._key(headers.get("authorization", other)) if self._keys else None
        asked = headers.get(TENANT_HEADER)
        if key is not None and key.tenant is None:
            return Caller(_checked(asked))
        tenant = "" if key is None or key.tenant is None else key.tenant
        if asked is not None and (asked != tenant or key is None):
            raise ApiError(403, "X-Tenant-Id is believed with a gateway's key only", code="tenant_not_allowed")
        return Caller(tenant)

    def _key(self, authorization: str) -> ApiKey:
        """Return the key that a request has. All are compared, so the time tells nothing of them."""
        scheme, _, secret = authorization.partition(" ")
        digest, matched = _digest(secret.strip()), None
        for known, key in self._keys:
            if hmac.compare_digest(known, digest):
                matched = key
        if matched is None or scheme.lower() != "bearer":
            headers = {"www-authenticate": "Bearer"}
            message = "a key of this server must be in the header Authorization, as Bearer KEY, or in X-Api-Key"
            raise ApiError(401, message, code="invalid_api_key", headers=headers)
        return matched


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _checked(tenant: str | None) -> str:
    if tenant is None or not tenant.strip():
        raise ApiError(403, "X-Tenant-Id is required with a gateway's key", code="tenant_required")
    if len(tenant.encode()) > MAX_TENANT_BYTES:
        raise ApiError(400, f"X-Tenant-Id must be at most {MAX_TENANT_BYTES} bytes", code="tenant_too_long")
    return tenant
