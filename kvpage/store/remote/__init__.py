"""Remote tiers: Redis, S3, Mooncake."""
