"""States of recurrent layers as records beside chunks: their keys, an index of positions, and the search for both."""
