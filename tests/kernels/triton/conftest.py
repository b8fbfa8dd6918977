"""Matrix products with a fixed order of terms in Triton's interpreter."""

import importlib.util

import numpy as np
import pytest


class Numpy:
    """numpy, but matrix products add their terms in index order.

    Triton's interpreter multiplies tiles by numpy's matmul. OpenBLAS may give a row different bits at another place in
    its tile (it does on AMD Zen 5). Tensor cores do not.
    """

    def __getattr__(self, name):
        return getattr(np, name)

    def matmul(self, a, b, dtype):
        if dtype == np.int32:  # exact in any order
            return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype)
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
