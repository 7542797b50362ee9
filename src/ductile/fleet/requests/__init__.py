"""Requests to generators and samples to scorers: who takes them, and where each one is."""
