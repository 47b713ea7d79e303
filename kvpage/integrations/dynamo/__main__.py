"""The command line of a worker: python -m kvpage.integrations.dynamo --model DIR."""

import sys

from kvpage.integrations.dynamo.worker import DynamoWorker


def main() -> None:
    """Run a worker until a signal ends it.

    Raises:
        SystemExit: An option is wrong, or Dynamo is not installed.
    """
    try:
        from dynamo.common.backend.engine import LLMEngine
        from dynamo.common.backend.run import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("dynamo", "uvloop"):
            raise
        sys.exit("a worker of Dynamo needs the extra 'dynamo': pip install 'kvpage[dynamo]'")

    class KvpageEngine(DynamoWorker, LLMEngine):  # type: ignore[misc, unused-ignore]  # Dynamo has no types for mypy
        """DynamoWorker with Dynamo's own defaults for missing fields."""

    try:
        run(KvpageEngine)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
