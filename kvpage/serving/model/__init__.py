"""Run a Hugging Face model over blocks, and check at load that its logits are its own."""
