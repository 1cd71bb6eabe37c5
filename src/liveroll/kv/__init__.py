"""Where keys and values live: paged storage and the cache that writes it."""
