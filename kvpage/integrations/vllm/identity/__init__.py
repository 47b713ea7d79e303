"""What K and V depend on besides tokens: weights, and facts of vLLM's configuration."""
