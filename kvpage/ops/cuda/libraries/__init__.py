"""Attention by libraries where they are installed: FlashInfer, FlashAttention 2 and 3, FlashMLA."""
