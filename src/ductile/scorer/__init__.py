"""Log-probs under the trainer's numerics, without gradients."""
