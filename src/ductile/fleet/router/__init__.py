"""A router: one address before several servers."""
