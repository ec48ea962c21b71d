"""Floor 3: how numbers shrink. Knows formats and blocks; does not know the engine."""
