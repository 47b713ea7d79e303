"""Reports of what happens: events, telemetry, residency."""
