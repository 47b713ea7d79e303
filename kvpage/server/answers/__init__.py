"""Answers: tokens to text, and to the JSON that OpenAI's clients read."""
