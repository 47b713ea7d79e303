"""PrefixRouter: a request router of Ray Serve that sends a prompt to the replica that holds most of it."""

from kvpage.integrations.ray.prefix_routing import PrefixRouting

try:
    from ray.serve.request_router import LocalityMixin, RequestRouter
except ModuleNotFoundError:  # the class can be looked at without Ray, not used
    LocalityMixin, RequestRouter = type("LocalityMixin", (), {}), type("RequestRouter", (), {})  # type: ignore[misc, assignment, unused-ignore]


class PrefixRouter(PrefixRouting, LocalityMixin, RequestRouter):  # type: ignore[misc, valid-type, unused-ignore]
    """Routes calls of a GenerateCall by prefix, and all others as Serve does: the less busy one of two at random.

    Set it by `RequestRouterConfig(request_router_class="kvpage.integrations.ray.router:PrefixRouter")`. The deployment
    reports digests by `record_routing_stats`: see CacheDigest.
    """
