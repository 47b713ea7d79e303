"""`kvpage serve`: a model from a folder, an engine, and a process that serves it."""
