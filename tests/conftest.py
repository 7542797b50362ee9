"""One thread a process, as in the product's CPU workers: the suite must not depend on how many cores there are."""

import torch

torch.set_num_threads(1)
