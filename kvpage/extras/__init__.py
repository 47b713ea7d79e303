"""Whole-sequence slots and token tries. They are useful beside a cache, and no other room needs them."""
