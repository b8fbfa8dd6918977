"""The device of Triton kernel tests: a GPU with compiled kernels, or the CPU with the interpreter."""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
