"""Arguments checked, in one place; interrupts, threads and forks."""
