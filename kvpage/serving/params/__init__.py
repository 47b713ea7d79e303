"""Check the parameters of requests, and fill in a model's defaults."""
