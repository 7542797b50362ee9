"""Gradients, the optimizer and everything the train slots do with them."""
