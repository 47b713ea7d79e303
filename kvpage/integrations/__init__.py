"""The shapes of other libraries, served by kvpage."""
