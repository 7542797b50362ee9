"""One thread a process, as in the product's CPU workers: the suite must not depend on how many cores there are. Nor on
how fast they are: no example of hypothesis has a deadline."""

import hypothesis
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("ductile", deadline=None)
hypothesis.settings.load_profile("ductile")
