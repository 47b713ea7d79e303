"""Parameters of requests, checked."""
