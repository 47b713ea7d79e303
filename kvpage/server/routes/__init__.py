"""The paths of the API."""
