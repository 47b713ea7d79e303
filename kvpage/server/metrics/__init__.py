"""Numbers of a server for Prometheus, under vLLM's names beside kvpage's own."""
