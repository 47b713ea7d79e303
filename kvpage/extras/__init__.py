"""Whole-sequence slots and token tries: useful beside a cache, needed by nothing else here."""
