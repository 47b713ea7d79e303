"""Between blocks of a cache and records of a store."""
