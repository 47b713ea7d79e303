"""Groups of layers that keep less than all tokens: a window of them, a state after them, or a draft model's."""
