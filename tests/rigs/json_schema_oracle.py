"""Faults of a JSON text under a schema, from the jsonschema library."""

import json
import sys
from collections.abc import Iterator
from decimal import Decimal, localcontext

import jsonschema
import jsonschema_rs


def faults(schema: object, data: bytes) -> Iterator[str]:
    """Errors of an output by two independent validators."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)  # so that 0.3 is a multiple of 0.1
    value = json.loads(data.decode(), parse_float=_exact)
    validator = jsonschema.validators.validator_for(exact, jsonschema.Draft202012Validator)
    with localcontext(prec=2000):
        yield from (error.message for error in validator(exact).iter_errors(value))
    other = jsonschema_rs.validator_for(json.dumps(schema), validate_formats=True)
    if "multipleOf" not in json.dumps(schema):  # this validator computes it with floats
        yield from (error.message for error in other.iter_errors(json.loads(data, parse_float=_finite)))


def _exact(number: str) -> Decimal:
    """Decimals have a limited exponent, too."""
    exponent = number.lower().partition("e")[2]
    return Decimal(number) if len(exponent) < 4 else Decimal("1.5e300")


def _finite(number: str) -> float:
    """JSON numbers may exceed the range of floats."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(number)))
