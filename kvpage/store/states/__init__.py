"""Records of groups: states beside chunks, with their keys, index and search, and chunks of some layers alone."""
