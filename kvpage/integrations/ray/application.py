"""app, build_app: the deployments of the application put together.

Gateway ─┬─► kvpage            num_prefill_replicas = 0
         ├─► kvpage-decode     num_prefill_replicas > 0: chunks go through the store
         └─► kvpage-prefill
"""

from typing import TYPE_CHECKING, Any

from kvpage.integrations.ray.gateway import Gateway
from kvpage.integrations.ray.replica import Replica
from kvpage.integrations.ray.settings import AppSettings, Role

if TYPE_CHECKING:
    from ray.serve import Application

ROUTER = "kvpage.integrations.ray.router:PrefixRouter"
WAIT_LOOP = 0.5  # seconds between two looks whether a draining replica is done

LOOK_BACK = 30.0  # seconds over which the load is averaged, at most: Serve's default


def app(settings: AppSettings) -> "Application":
    """Build the application; `serve run kvpage.integrations.ray:app model=DIR` calls it.

    Args:
        settings: The arguments, of the command line or of a YAML file.

    Returns:
        The application.
    """
    fields = settings.model_dump()
    if settings.num_prefill_replicas:
        decode = deploy_replicas(settings, "kvpage-decode", "decode").bind(fields, "decode")
        prefill = deploy_replicas(settings, "kvpage-prefill", "prefill").bind(fields, "prefill")
        made: Application = _gateway(settings).bind(fields, decode, prefill)
    else:
        made = _gateway(settings).bind(fields, deploy_replicas(settings, "kvpage", "both").bind(fields))
    return made


def build_app(**settings: Any) -> "Application":
    """Build the application in Python: `serve.run(build_app(model=..., num_replicas=2))`.

    Args:
        settings: The fields of AppSettings.

    Returns:
        The application.

    Raises:
        ValueError: A field is unknown or wrong.
        ModuleNotFoundError: Ray is not installed.
    """
    return app(AppSettings(**settings))


def ray_serve() -> Any:
    """Return the module ray.serve, with its configs. ModuleNotFoundError tells how to install it."""
    try:
        import ray.serve.config
    except ModuleNotFoundError as error:
        message = "the application for Ray Serve needs the extra 'ray': pip install 'kvpage[ray]'"
        raise ModuleNotFoundError(message, name=error.name) from error
    return ray.serve


def deploy_replicas(settings: AppSettings, name: str, role: Role) -> Any:
    """Return the deployment of the replicas of one role, without its arguments."""
    serve = ray_serve()
    num_replicas = settings.num_prefill_replicas if role == "prefill" else settings.num_replicas
    fields: dict[str, Any] = {"num_replicas": num_replicas}
    if role != "prefill" and settings.max_replicas is not None and settings.max_replicas > num_replicas:
        fields = {"autoscaling_config": _autoscaling(settings)}
    router: dict[str, Any] = {"request_routing_stats_period_s": settings.digest_period}
    if settings.router == "prefix":
        kwargs = {"block_size": settings.block_size, "imbalance": settings.imbalance}
        router |= {"request_router_class": ROUTER, "request_router_kwargs": kwargs}
    return serve.deployment(
        Replica,
        name=name,
        max_ongoing_requests=settings.max_ongoing_requests,
        ray_actor_options={"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
        request_router_config=serve.config.RequestRouterConfig(**router),
        graceful_shutdown_timeout_s=settings.drain_timeout,
        graceful_shutdown_wait_loop_s=WAIT_LOOP,
        health_check_period_s=2.0,
        **fields,
    )


def _autoscaling(settings: AppSettings) -> dict[str, Any]:
    return {
        "min_replicas": settings.num_replicas,
        "max_replicas": settings.max_replicas,
        "target_ongoing_requests": settings.target_ongoing_requests,
        "upscale_delay_s": settings.upscale_delay,
        "downscale_delay_s": settings.downscale_delay,
        "look_back_period_s": min(LOOK_BACK, max(settings.upscale_delay, 1.0)),
    }


def _gateway(settings: AppSettings) -> Any:
    serve = ray_serve()
    return serve.deployment(
        serve.ingress()(Gateway),
        name="Gateway",
        num_replicas=settings.num_gateways,
        max_ongoing_requests=settings.max_num_waiting + settings.max_ongoing_requests * settings.num_replicas,
        ray_actor_options={"num_cpus": 0.1},
        graceful_shutdown_timeout_s=settings.drain_timeout,
        graceful_shutdown_wait_loop_s=WAIT_LOOP,
    )
