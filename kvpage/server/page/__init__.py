"""The page at /: a chat, and beside it the contents of the cache, live."""
