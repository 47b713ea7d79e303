"""Requests and errors of the OpenAI API, as they come and go in JSON."""
