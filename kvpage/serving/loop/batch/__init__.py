"""The tokens that one step computes, and the tokens that it gives."""
