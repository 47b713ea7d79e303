"""A worker of Dynamo's unified backend over an AsyncEngine. It needs the extra `dynamo`.

    dynamo.frontend ── tokens ─► DynamoWorker ─► AsyncEngine ─► chunks ─► dynamo.frontend, which makes text
          ▲                            │
          └── events of the cache ◄────┘       by which its router finds the worker that has a prompt's prefix

Start one by `python -m kvpage.integrations.dynamo --model DIR`.
"""

from kvpage.integrations.dynamo.options import WorkerOptions
from kvpage.integrations.dynamo.worker import DynamoWorker

__all__ = ["DynamoWorker", "WorkerOptions"]
