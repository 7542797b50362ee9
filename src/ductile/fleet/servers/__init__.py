"""Servers that the run did not start: found, watched, judged, asked."""
