"""The cost model: bytes of memory and seconds of steps."""
