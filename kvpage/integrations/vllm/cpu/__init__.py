"""vLLM's offloading in its build for CPUs."""
