"""Where tests of Triton kernels run: compiled on a GPU, or in the interpreter on the CPU."""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
