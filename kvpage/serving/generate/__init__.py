"""KVPageCache: `model.generate` over paged blocks."""
