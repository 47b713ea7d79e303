"""The command line: demo, replay, benchmarks, stores."""
