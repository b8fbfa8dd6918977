"""Triton's interpreter for tests: matrix products with a fixed order of terms, and less work around each operation."""

import importlib.util
import inspect
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest


def matmul(a, b, dtype):
    """Like numpy's, but terms are added in index order.

    Triton's interpreter multiplies tiles by numpy's matmul. OpenBLAS may give a row different bits at another place in
    its tile (it does on AMD Zen 5). Tensor cores do not.
    """
    if dtype == np.int32:  # exact in any order
        return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype)
    return (a.astype(dtype)[..., :, :, None] * b.astype(dtype)[..., None, :, :]).sum(axis=-2)


def faster(interpreter):
    """Replacements for three functions of the interpreter, with the same results: half of its time was in them.

    They look through all names of triton.language at each launch and at each call of a function by a kernel, and make a
    dictionary of types at each operation. Here a function's names are replaced once in a launch.
    """
    tl, numpy_type_of, patch_whole_lang = interpreter.tl, interpreter._get_np_dtype, interpreter._patch_lang
    patched = set()  # functions in this launch

    @cache
    def builtins_of(package):
        return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]

    for package in (tl, tl.core, tl.tensor, tl.core.tensor, tl.math, tl.core.tensor_descriptor_base):
        builtins_of(package)  # before the interpreter replaces any of them

    def patch_builtin(package, builder, scope):
        for name in builtins_of(package):
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    def patch_lang(fn):
        if fn in patched:  # called by a kernel, which does not restore anything
            return None
        patched.add(fn)
        scope = patch_whole_lang(fn)
        return SimpleNamespace(restore=lambda: (patched.clear(), scope.restore()))

    by_name = {}

    def get_np_dtype(type_):
        of = type_.element_ty if isinstance(type_, tl.block_type) else type_
        if isinstance(of, tl.pointer_type):
            return numpy_type_of(of)
        if of.name not in by_name:
            by_name[of.name] = numpy_type_of(of)
        return by_name[of.name]

    return {"_patch_lang": patch_lang, "_patch_builtin": patch_builtin, "_get_np_dtype": get_np_dtype}


def faster_types(core):
    """Replacements for the constructors of two types, with the same attributes. Equal shapes share theirs.

    Each operation makes several types and tensors, and each of those checks its shape and wraps its sizes.
    """
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks, names, tensors = {}, {}, {}

    def block(self, element_ty, shape):
        sizes = tuple([each.value if isinstance(each, core.constexpr) else each for each in shape])
        key = (type(shape), sizes, *map(type, sizes))  # a size of 2.0 is refused, although it equals 2
        name = (element_ty.name, sizes)
        if key not in blocks or name not in names:
            make_block(self, element_ty, shape)
            blocks[key], names[name] = (self.shape, self.numel), self.name
        else:
            self.element_ty, self.name = element_ty, names[name]
            self.shape, self.numel = blocks[key]

    def tensor(self, handle, type):
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in tensors:
            make_tensor(self, handle, type)
            tensors[sizes] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = tensors[sizes]

    return {core.block_type: block, core.tensor: tensor}


@pytest.fixture(scope="session", autouse=True)
def interpreter_for_tests():
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter  # noqa: PLC0415  (an optional package)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "np", SimpleNamespace(**{**vars(np), "matmul": matmul}))
        for name, function in faster(interpreter).items():
            patch.setattr(interpreter, name, function)
        for of, constructor in faster_types(interpreter.tl.core).items():
            patch.setattr(of, "__init__", constructor)
        # the interpreter computes whether integers overflow, and ignores the result
        builder = interpreter.interpreter_builder
        assert not builder.options.debug
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield
