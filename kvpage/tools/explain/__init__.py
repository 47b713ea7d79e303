"""`kvpage explain`: questions to servers and to tiers."""
