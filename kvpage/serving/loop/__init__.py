"""The loop: requests in, steps, tokens out."""
