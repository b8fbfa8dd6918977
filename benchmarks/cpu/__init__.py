"""quire beside other engines on CPUs, in one run: `python -m benchmarks.cpu`."""
