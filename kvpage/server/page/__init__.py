"""The page at /: a chat, and beside it what the cache holds, live."""
