"""Small checkpoints in published layouts of quantized layers, packed here by hand, with the numbers that they mean."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

KIND = "llama-gqa-tied"  # hidden size 64
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble, the lowest first


def packed(codes, bits, order=None):
    """int32 with 32 / bits neighbouring columns in each number, the first in the lowest bits or in this order."""
    many = 32 // bits
    order = order or range(many)
    out = torch.zeros(codes.shape[0], codes.shape[1] // many, dtype=torch.int64)
    for place, column in enumerate(order):
        out |= codes[:, column::many].long() << (bits * place)
    return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)


def drawn(weight, bits, group_size, seed):
    """Random codes, zeros and scales (out, groups) for a weight of this shape, and the numbers that they mean."""
    draw = torch.Generator().manual_seed(seed)
    rows, columns = weight.shape
    groups = columns // (group_size or columns)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=draw)
    zeros = torch.randint(1, 1 << bits, (rows, groups), generator=draw)
    scales = (0.01 + 0.02 * torch.rand(rows, groups, generator=draw)).half()
    return codes, zeros, scales


def meant(codes, zeros, scales, groups=None):
    groups = torch.arange(codes.shape[1]) * scales.shape[1] // codes.shape[1] if groups is None else groups
    return (codes - zeros[:, groups]) * scales.float()[:, groups]


def awq(name, weight, seed):
    codes, zeros, scales = drawn(weight, 4, 32, seed)
    tensors = {"qweight": packed(codes.T, 4, AWQ_ORDER), "qzeros": packed(zeros.T, 4, AWQ_ORDER), "scales": scales.T}
    return tensors, meant(codes, zeros, scales)


def gptq(name, weight, seed, *, bits=4, any_order=False, symmetric=False, lowest=1):
    codes, zeros, scales = drawn(weight, bits, 32, seed)
    if symmetric:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    groups = torch.arange(codes.shape[1]) // 32
    if any_order:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))]
    tensors = {
        "qweight": packed(codes, bits).T,
        "qzeros": packed((zeros - lowest).T, bits),
        "scales": scales.T,
        "g_idx": groups.int(),
    }
    return tensors, meant(codes, zeros, scales, groups)


def pack_quantized(name, weight, seed, *, bits=4, symmetric=True, group_size=32):
    codes, zeros, scales = drawn(weight, bits, group_size, seed)
    if symmetric:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    tensors = {"weight_packed": packed(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        tensors["weight_zero_point"] = packed(zeros.T, bits).T
    return tensors, meant(codes, zeros, scales)


def int_quantized(name, weight, seed):
    codes, _, scales = drawn(weight, 8, 0, seed)
    numbers = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales.bfloat16()}
    return numbers, (codes - 128) * scales.bfloat16().float()


def float_quantized(name, weight, seed):
    scales = drawn(weight, 8, 0, seed)[2].float()
    eight = (weight.float() / scales).to(torch.float8_e4m3fn)
    return {"weight": eight, "weight_scale": scales}, eight.float() * scales


def blocks(name, weight, seed):
    """FP8 with a scale for each block of 16 rows and 32 columns."""
    eight = weight.float().to(torch.float8_e4m3fn)
    shape = -(-weight.shape[0] // 16), -(-weight.shape[1] // 32)
    scales = 1 + torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    spread = scales.repeat_interleave(16, 0).repeat_interleave(32, 1)[: weight.shape[0], : weight.shape[1]]
    return {"weight": eight, "weight_scale_inv": scales}, eight.float() * spread


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fp4(name, weight, seed, *, size, packed_name, factor_name=None, divides=False):
    """Random codes of e2m1: NVFP4 with a factor of all scales, which may divide; MXFP4 without."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, weight.shape, dtype=torch.uint8, generator=draw)
    shape, factor = (weight.shape[0], weight.shape[1] // size), torch.tensor([0.0123])
    if factor_name is None:
        scales = torch.randint(119, 124, shape, dtype=torch.uint8, generator=draw)
        numbers = 2.0 ** (scales.float() - 127)
    else:
        scales = (1 + 3 * torch.rand(shape, generator=draw)).to(torch.float8_e4m3fn)
        numbers = scales.float() * factor
    tensors = {packed_name: codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales}
    if factor_name is not None:
        tensors |= {factor_name: 1 / factor if divides else factor, "input_scale": torch.tensor(1.0)}
    return tensors, E2M1[codes.long()] * numbers.repeat_interleave(size, 1)


def mxfp8(name, weight, seed):
    draw = torch.Generator().manual_seed(seed)
    scales = torch.randint(119, 124, (weight.shape[0], weight.shape[1] // 32), dtype=torch.uint8, generator=draw)
    spread = (2.0 ** (scales.float() - 127)).repeat_interleave(32, 1)
    eight = (weight.float() / spread).to(torch.float8_e4m3fn)
    return {"weight": eight, "weight_scale": scales}, eight.float() * spread


def one_scale(name, weight, seed):
    eight, scale = (weight.float() / 0.01).to(torch.float8_e4m3fn), torch.tensor(0.01)
    return {"weight": eight, "weight_scale": scale, "input_scale": torch.tensor(1.0)}, eight.float() * scale


def compressed_blocks(name, weight, seed):
    tensors, numbers = blocks(name, weight, seed)
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}, numbers


def compressed(bits, kind, **more):
    weights = {"num_bits": bits, "type": kind, "symmetric": True, **more}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


def with_options(pack, **options):
    return lambda name, weight, seed: pack(name, weight, seed, **options)


IN_GROUPS = {"strategy": "group", "group_size": 32}
GPTQ = {"quant_method": "gptq", "group_size": 32, "desc_act": False}
LAYOUTS = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "gptq-4": (gptq, {**GPTQ, "bits": 4, "sym": False}),
    "gptq-4-sym": (with_options(gptq, symmetric=True), {**GPTQ, "bits": 4, "sym": True}),
    "gptq-8": (with_options(gptq, bits=8), {**GPTQ, "bits": 8}),
    "gptq-v2": (with_options(gptq, lowest=0), {**GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"}),
    "gptq-act-order": (with_options(gptq, any_order=True), {**GPTQ, "bits": 4, "desc_act": True}),
    "pack-quantized": (pack_quantized, compressed(4, "int", **IN_GROUPS)),
    "pack-quantized-zeros": (
        with_options(pack_quantized, symmetric=False),
        compressed(4, "int", **{**IN_GROUPS, "symmetric": False}),
    ),
    "pack-quantized-channel": (with_options(pack_quantized, group_size=0), compressed(4, "int", strategy="channel")),
    "pack-quantized-8": (with_options(pack_quantized, bits=8), compressed(8, "int", **IN_GROUPS)),
    "int-quantized": (int_quantized, compressed(8, "int", strategy="channel")),
    "float-quantized": (float_quantized, compressed(8, "float", strategy="channel")),
    "float-quantized-blocks": (
        compressed_blocks,
        compressed(8, "float", strategy="block", block_structure=[16, 32]),
    ),
    "nvfp4-pack-quantized": (
        with_options(fp4, size=16, packed_name="weight_packed", factor_name="weight_global_scale", divides=True),
        compressed(4, "float"),
    ),
    "mxfp4-pack-quantized": (with_options(fp4, size=32, packed_name="weight_packed"), compressed(4, "float")),
    "mxfp8-quantized": (mxfp8, compressed(8, "float", **IN_GROUPS)),
    "modelopt-nvfp4": (
        with_options(fp4, size=16, packed_name="weight", factor_name="weight_scale_2"),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
    ),
    "modelopt-fp8": (one_scale, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt-mxfp8": (mxfp8, {"quant_method": "modelopt", "quant_algo": "MXFP8"}),
    "fp8-blocks": (blocks, {"quant_method": "fp8", "weight_block_size": [16, 32]}),
}
EXPANDED = ("gptq-act-order",)  # no scheme holds its numbers
EXACT = [name for name in LAYOUTS if "fp4" in name or "fp8" in name or name == "float-quantized"]


def write(source, folder, layout, change=lambda tensors: None, *, pack=None, file=None, **changes):
    """The checkpoint in `source` with all projections in a layout. Returns the numbers of each of their weights.

    change: receives all tensors. pack: in place of the layout's function. changes: of its settings. file: that has the
    settings in place of config.json.
    """
    shutil.copytree(source, folder)
    layout_pack, settings = LAYOUTS[layout]
    pack, settings = pack or layout_pack, {**settings, **changes}
    config = json.loads((folder / "config.json").read_text())
    if file is None:
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    else:
        (folder / file).write_text(json.dumps(settings))
    tensors, numbers = load_file(folder / "model.safetensors"), {}
    for seed, name in enumerate([name for name in tensors if name.endswith("_proj.weight")]):
        parts, numbers[name] = pack(name, tensors.pop(name), seed)
        base = name.removesuffix("weight")
        tensors |= {base + last: tensor.contiguous() for last, tensor in parts.items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return numbers


def write_stacks(source, folder, change=lambda tensors: None):
    """The Mixtral checkpoint in `source` with its experts in MXFP4, stacked. Returns the numbers of their weights."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    tensors, numbers, stacks = load_file(folder / "model.safetensors"), {}, {}
    for seed, name in enumerate(sorted(name for name in tensors if ".experts." in name)):
        parts, numbers[name] = fp4(name, tensors.pop(name), seed, size=32, packed_name="blocks")
        before, _, after = name.removesuffix(".weight").partition(".experts.")
        stack = stacks.setdefault(f"{before}.experts.{after.partition('.')[2]}", [])
        stack.append((parts["blocks"].unflatten(1, (-1, 16)), parts["weight_scale"]))
    for stack, experts in stacks.items():
        for last, some in zip(("blocks", "scales"), zip(*experts, strict=True), strict=True):
            tensors[f"{stack}_{last}"] = torch.stack(some)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return numbers
