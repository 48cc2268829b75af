"""The decoder: a target and its draft, without changing one token of the target's law."""
