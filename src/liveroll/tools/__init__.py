"""Programs built on the engine."""
