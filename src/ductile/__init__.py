"""ductile: elastic RL post-training for language models, native to PyTorch."""

__version__ = "0.1.0"
