"""The command line and its parts: build information, the demo, the replay of traces, stores."""
