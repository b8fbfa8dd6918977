"""Choice of the schemes of low-bit weights, and of the kernels that multiply them."""

from dataclasses import replace
from typing import get_args

from quire.config import EngineOptions, QuantMethod
from quire.errors import ConfigError
from quire.kernels.choose import Chosen, choose
from quire.kernels.contract import Kernels, Requirements, Scheme
from quire.models.model import Description
from quire.weights.checkpoint import Checkpoint
from quire.weights.schemes import AT_LOAD, Schemes, simpler, summary


def choose_schemes(
    options: EngineOptions, description: Description, requirements: Requirements
) -> tuple[Schemes, Chosen, str]:
    """The schemes of low-bit weights, the kernels, and a line about the schemes.

    Codes of a checkpoint are kept if the kernels that would run without them multiply them, and fast. Weights that are
    rounded at load need kernels that multiply them. Raises ConfigError.
    """
    quantization = _quantization(options, description.checkpoint)
    schemes = description.schemes(quantization)
    needed = replace(requirements, schemes=tuple(dict.fromkeys(schemes.values())))
    if quantization not in (None, "none"):
        return schemes, choose(options.kernels, needed), f"rounded: {summary(schemes)}"
    chosen = choose(options.kernels, requirements)
    if not schemes:
        return schemes, chosen, ""
    nearest = {  # each scheme itself, or one that holds it
        scheme: next(
            (one for one in (scheme, *simpler(scheme)) if not _refusal(chosen.kernels, requirements, one)), None
        )
        for scheme in needed.schemes
    }
    kept = {parameter: one for parameter, scheme in schemes.items() if (one := nearest[scheme]) is not None}
    line = [f"as stored: {summary(kept)}; --quantization none expands them"] if kept else []
    expanded = next((scheme for scheme, one in nearest.items() if one is None), None)
    if expanded is not None:
        reason = _refusal(chosen.kernels, requirements, [expanded, *simpler(expanded)][-1])
        line.append(f"expanded from low bits to {requirements.dtype}: {chosen.kernels.NAME}: {reason}")
    return kept, chosen, "; ".join(line)


def _quantization(options: EngineOptions, checkpoint: Checkpoint) -> str | None:
    """The option, without a name of the layout that the checkpoint has. Raises ConfigError for another layout."""
    asked, stored = options.quantization, checkpoint.quant_method
    if asked == stored or (asked, stored) == ("modelopt_fp4", "modelopt"):
        return None
    if asked not in get_args(QuantMethod) or (asked in AT_LOAD and stored is None):  # fp8 is both
        return asked
    has = f"has the layout {stored!r}" if stored else "is not quantized"
    raise ConfigError(
        f"quantization {asked!r} names the layout of a checkpoint, but {checkpoint.path} {has}; leave it out, or "
        "use int8 or int4 to round weights at load"
    )


def _refusal(kernels: Kernels, requirements: Requirements, scheme: Scheme) -> str | None:
    """Why codes in a scheme are not kept, or None if they are."""
    if kernels.NAME == "reference":
        return "it multiplies codes slowly"
    return kernels.unsupported_reason(replace(requirements, schemes=(scheme,)))
