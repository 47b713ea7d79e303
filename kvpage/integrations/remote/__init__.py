"""An engine whose requests are computed elsewhere: by workers that an orchestrator such as Ray starts and routes to.

AsyncEngine ─► RemoteEngine ─► RemoteLoop ─► Workers: a stream of outputs a request, begun again where a worker is lost
"""

from kvpage.integrations.remote.calls import GenerateCall, WorkerLost, Workers
from kvpage.integrations.remote.remote_engine import RemoteEngine
from kvpage.integrations.remote.remote_loop import RemoteLoop, RemoteSettings
from kvpage.integrations.remote.worker import Worker

__all__ = ["GenerateCall", "RemoteEngine", "RemoteLoop", "RemoteSettings", "Worker", "WorkerLost", "Workers"]
