"""A Hugging Face model as the engine runs it."""
