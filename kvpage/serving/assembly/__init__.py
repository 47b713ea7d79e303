"""An engine's assembly: its parts are made for a model, and put together."""
