"""Matrix products of a model's weights in bf16 by torch's library: the lower bound of a step's time.

The gated weight is multiplied in few bits, too, by the Triton kernels.
"""

import torch
from torch.nn.functional import linear

from benchmarks.cpu.checkpoints import SHAPES
from benchmarks.gpu import clock
from benchmarks.gpu.part import Part
from benchmarks.gpu.processes import Settings
from quire.kernels.contract import FP8, INT4, INT8
from quire.kernels.triton.kernels import TRITON as kernels

COLD_BYTES = 2**28  # of weights: more than any cache
MOST_COPIES = 32
LOW_BIT = "gate and up"  # the weight that is multiplied in few bits
ROWS = (1, 8, 64, 256, 2048)
MOST_LOGITS = 256  # rows; a step has no more logits


def weights(shape: str) -> dict[str, tuple[int, int]]:
    """(out, in) of each product of a layer and of the output head."""
    config = SHAPES[shape]()
    size, inner = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or size // config.num_attention_heads
    heads, kv_heads = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return {
        "qkv": (heads + 2 * kv_heads, size),
        "attention out": (size, heads),
        "gate and up": (2 * inner, size),
        "down": (size, inner),
        "head": (config.vocab_size, size),
    }


def measure(part: Part, settings: Settings) -> None:
    """A row for each weight and number of rows."""
    for shape in settings.shapes:
        for name, (out, size) in weights(shape).items():
            for rows in (1, 4) if settings.tiny else ROWS:
                if name == "head" and rows > MOST_LOGITS:
                    continue
                what = f"{shape} {name}, {rows} rows"
                part.attempt(what, lambda w=what, o=out, s=size, r=rows: one(part, settings, w, o, s, r))
                if name == LOW_BIT:
                    part.attempt(what, lambda w=what, o=out, s=size, r=rows: low_bit(part, settings, w, o, s, r))


def one(part: Part, settings: Settings, what: str, out: int, size: int, rows: int) -> None:
    """Time one weight times `rows` rows. Copies of the weight alternate, so that it is read from memory."""
    num_bytes = 2 * (out * size + rows * (out + size))
    copies = 1 if settings.tiny else max(1, min(MOST_COPIES, -(-COLD_BYTES // (2 * out * size))))
    weight = torch.empty(copies, out, size, dtype=torch.bfloat16, device=settings.device).normal_()
    x = torch.randn(rows, size, device=settings.device).to(torch.bfloat16)
    (seconds,) = clock.seconds([lambda: [linear(x, each) for each in weight]], settings.device)
    seconds /= copies
    figures = {"us": 1e6 * seconds, "gb_per_second": num_bytes / seconds / 1e9}
    figures["tflops"] = 2 * rows * out * size / seconds / 1e12
    read, multiplied = part.limits.get("read_gb_per_second"), part.limits.get("bf16_tflops")
    if read and multiplied:
        by_memory, by_products = num_bytes / read / 1e9, 2 * rows * out * size / multiplied / 1e12
        figures["share_of_bound"] = max(by_memory, by_products) / seconds
        part.row(what, **figures, bound="memory" if by_memory > by_products else "products")
    else:
        part.row(what, **figures)


def low_bit(part: Part, settings: Settings, what: str, out: int, size: int, rows: int) -> None:
    """Time one weight in int8, int4 and fp8 times `rows` rows, rounding of the rows included: see `one`."""
    x = torch.randn(rows, size, device=settings.device).to(torch.bfloat16)
    for name, scheme in (("int8", INT8), ("int4", INT4), ("fp8", FP8)):
        num_bytes = scheme.num_bytes(out, size)
        copies = 1 if settings.tiny else max(1, min(MOST_COPIES, -(-COLD_BYTES // num_bytes)))
        with torch.device(settings.device):
            stack = kernels.allocate_weight((copies, out, size), torch.bfloat16, scheme=scheme)
        for copy in range(copies):
            kernels.write_rows(stack, torch.randn(out, size, device=settings.device), 0, copy)
        some = [stack[copy] for copy in range(copies)]
        (seconds,) = clock.seconds([lambda some=some: [kernels.linear(x, each) for each in some]], settings.device)
        row = part.row(what, **{f"{name}_us": 1e6 * seconds / copies})
        if "us" in row:
            part.row(what, **{f"{name}_speedup": row["us"] / row[f"{name}_us"]})
