"""Text to tokens, tokens to text, chats to prompts."""
