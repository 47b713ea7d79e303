"""Chunks that outlive the process and leave the machine."""
