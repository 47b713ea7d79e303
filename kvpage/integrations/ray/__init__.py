"""kvpage on Ray Serve: `serve run kvpage.integrations.ray:app model=DIR num_replicas=2`. It needs the extra `ray`.

client ─► Gateway: the OpenAI API, RemoteEngine ─► PrefixRouter ─► Replica: AsyncEngine ─┬► KVStore, shared
                                                              └──► Replica: AsyncEngine ─┘
"""

from kvpage.integrations.ray.application import app, build_app
from kvpage.integrations.ray.router import PrefixRouter
from kvpage.integrations.ray.settings import AppSettings

__all__ = ["AppSettings", "PrefixRouter", "app", "build_app"]
