"""Checkpoints that several test files read and none may change; products of one order where kernels are interpreted."""

import importlib.util

import checkpoints
import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("native", deadline=None, derandomize=True, max_examples=3)  # under sanitizers, see Makefile


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """kind -> (folder, the transformers model), made once."""
    made = {}

    def get(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = (folder, checkpoints.save(folder, kind))
        return made[kind]

    return get


class Numpy:
    """numpy, but products add their terms in the order of their numbers.

    Triton's interpreter multiplies tiles by numpy's matmul. OpenBLAS may give a row other bits at another place in its
    tile (it does on AMD Zen 5), which tensor cores do not.
    """

    def __getattr__(self, name):
        return getattr(np, name)

    def matmul(self, a, b, dtype):
        return (a.astype(dtype)[..., :, :, None] * b.astype(dtype)[..., None, :, :]).sum(axis=-2)


@pytest.fixture(scope="session", autouse=True)
def interpreted_products_have_one_order():
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter  # noqa: PLC0415  (an optional package)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "np", Numpy())
        yield
