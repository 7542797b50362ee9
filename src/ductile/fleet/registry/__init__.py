"""Registries, where servers announce themselves, and the rule over those that are there."""
