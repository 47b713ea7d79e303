"""Tiers: the interface of a place that keeps records, and the tier in host memory."""
