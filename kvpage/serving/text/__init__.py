"""Text of generated tokens: all of the loop that knows the tokenizer."""
