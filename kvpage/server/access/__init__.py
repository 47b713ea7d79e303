"""Who may ask, and how much may come."""
