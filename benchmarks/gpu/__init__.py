"""quire on a GPU: its kernels, steps and serving beside what the device can do, and beside other engines."""
