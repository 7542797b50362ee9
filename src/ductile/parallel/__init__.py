"""Parallelism, put on the textbook model from outside."""
