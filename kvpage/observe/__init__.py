"""Reports on the cache: events, telemetry, residency."""
