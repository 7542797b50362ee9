"""Registries: servers announce themselves there, and one run rules those that do."""
