"""The device of Triton kernel tests: a GPU with compiled kernels, or the CPU with the interpreter."""

import torch

with torch.device("cpu"):  # torch lists its constructors at the first one, before a test replaces torch.empty
    torch.empty(0)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
