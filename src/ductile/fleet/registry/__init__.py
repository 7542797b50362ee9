"""Where servers announce themselves, and which run rules those that are there."""
