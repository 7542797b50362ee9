"""The trainer behind its Protocol, and what its ranks are at."""
