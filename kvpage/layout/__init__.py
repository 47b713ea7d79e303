"""Where the bytes of a cache are: configurations, backends, layouts, views, scales."""
