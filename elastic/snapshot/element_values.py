"""What the bits of elements stand for, as float64 or complex128, for dtypes that numpy lacks too. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic.snapshot.layout import TensorSpec
from elastic.snapshot.reader import numpy_dtype

_FLOAT8 = {
    # exponent bits, mantissa bits, bias, whether it has infinities, and whether 0x80 is its only NaN
    "float8_e4m3fn": (4, 3, 7, False, False),
    "float8_e5m2": (5, 2, 15, True, False),
    "float8_e4m3fnuz": (4, 3, 8, False, True),
    "float8_e5m2fnuz": (5, 2, 16, False, True),
}
Values = npt.NDArray[Any]


def values_of(spec: TensorSpec, raw: npt.NDArray[np.uint8]) -> Values | None:
    """The values of the elements whose bytes are ``raw`` [n × item size]: float64 [n] or complex128 [n]; None for a
    dtype that is not known here. 64-bit integers beyond 2^53 are rounded."""
    with np.errstate(invalid="ignore"):  # a signalling NaN is a value like any other
        return _decoded(spec, raw)


def _decoded(spec: TensorSpec, raw: npt.NDArray[np.uint8]) -> Values | None:
    held = numpy_dtype(spec)
    values: Values
    if spec.dtype == "bfloat16":
        values = (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    elif spec.dtype in _FLOAT8:
        values = _float8_values(*_FLOAT8[spec.dtype])[raw]
    elif spec.dtype == "float8_e8m0fnu":
        values = np.where(raw == 255, np.nan, np.ldexp(1.0, raw.astype(np.int64) - 127))
    elif held.kind == "u" and not spec.dtype.startswith("uint"):
        return None
    else:
        values = raw.view(held).astype(np.complex128 if held.kind == "c" else np.float64)
    return values


@lru_cache
def _float8_values(exponent_bits: int, mantissa_bits: int, bias: int, infinities: bool, unsigned_zero: bool) -> Values:
    """All 256 values of an 8-bit float."""
    code = np.arange(256)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    sign = np.where(code >= 128, -1.0, 1.0)
    fraction = mantissa / (1 << mantissa_bits)
    normal = np.ldexp(1.0 + fraction, exponent - bias)
    values = sign * np.where(exponent == 0, np.ldexp(fraction, 1 - bias), normal)
    if unsigned_zero:
        values[128] = np.nan
        return values
    top = exponent == (1 << exponent_bits) - 1
    if infinities:
        values[top] = np.where(mantissa[top] == 0, sign[top] * np.inf, np.nan)
    else:
        values[top & (mantissa == (1 << mantissa_bits) - 1)] = np.nan
    return values
