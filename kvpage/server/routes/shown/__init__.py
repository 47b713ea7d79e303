"""The paths that show the cache: the page, and explanations."""
