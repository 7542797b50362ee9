"""Benchmarks are scripts beside each other, and import each other by their names."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
