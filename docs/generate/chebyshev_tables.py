"""Write relaxlite/ir/ops/special_tables.py, the series of special functions: python -m docs.generate.chebyshev_tables

Each function is sampled at Chebyshev's nodes in 50 digits by mpmath, which comes with PyTorch. The discrete cosine
transform of the samples gives the coefficients (Trefethen, "Approximation Theory and Approximation Practice", chapter
3), kept as far as they count in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpmath as mp

Function = Callable[[Any], Any]

_TERMS = 56
_LEAST = 1e-17  # share of the greatest coefficient

HEADER = '''"""Chebyshev series of special functions: where they begin and end, and coefficients, highest order first.

Written by docs/generate/chebyshev_tables.py. The coefficient of order 0 counts half.
"""

# fmt: off
'''


def coefficients(f: Function, low: float, high: float) -> list[float]:
    """Return the Chebyshev coefficients of f on [low, high], highest order first."""
    angles = [mp.pi * (k + mp.mpf(1) / 2) / _TERMS for k in range(_TERMS)]
    values = [f(low + (high - low) * (mp.cos(a) + 1) / 2) for a in angles]
    all_of = [
        2 * mp.fsum(y * mp.cos(j * a) for y, a in zip(values, angles, strict=True)) / _TERMS for j in range(_TERMS)
    ]
    least = _LEAST * max(map(abs, all_of))
    count = 1 + max(j for j, c in enumerate(all_of) if abs(c) > least)
    assert count < _TERMS, "the series does not converge in so many terms"
    return [float(c) for c in reversed(all_of[:count])]


# Bessel functions near 0, of z = x^2, and the modulus and phase of their oscillation, of z = 25 / x^2.


def zero(order: int, number: int) -> Any:
    return mp.besseljzero(order, number) ** 2


def j0(z: Any) -> Any:
    return mp.besselj(0, mp.sqrt(z)) / ((z - zero(0, 1)) * (z - zero(0, 2)))


def j1(z: Any) -> Any:
    x = mp.sqrt(z)
    return mp.besselj(1, x) / (x * (z - zero(1, 1)))


def y0(z: Any) -> Any:
    x = mp.sqrt(z)
    return mp.bessely(0, x) - 2 / mp.pi * mp.log(x) * mp.besselj(0, x)


def y1(z: Any) -> Any:
    x = mp.sqrt(z)
    return (mp.bessely(1, x) - 2 / mp.pi * (mp.log(x) * mp.besselj(1, x) - 1 / x)) / x


def wave(order: int, *, is_sine: bool) -> Function:
    """Return the amplitude of the cosine, or of the sine times x / 5, of x - (2 order + 1) pi / 4."""

    def f(z: Any) -> Any:
        x = 5 / mp.sqrt(z)
        phase = x - (2 * order + 1) * mp.pi / 4
        j, y = mp.besselj(order, x), mp.bessely(order, x)
        if is_sine:
            return mp.sqrt(mp.pi * x / 2) * (y * mp.cos(phase) - j * mp.sin(phase)) * x / 5
        return mp.sqrt(mp.pi * x / 2) * (j * mp.cos(phase) + y * mp.sin(phase))

    return f


# Modified Bessel functions: near 0, of x or x^2, and far from it, of 8 / x or 2 / x.


def i_near(order: int) -> Function:
    return lambda x: mp.exp(-x) * mp.besseli(order, x) / x**order


def i_far(u: Any, order: int) -> Any:
    x = 8 / u
    return mp.exp(-x) * mp.sqrt(x) * mp.besseli(order, x)


def k0_near(z: Any) -> Any:
    x = mp.sqrt(z)
    return mp.besselk(0, x) + mp.log(x / 2) * mp.besseli(0, x)


def k1_near(z: Any) -> Any:
    x = mp.sqrt(z)
    return x * (mp.besselk(1, x) - mp.log(x / 2) * mp.besseli(1, x))


def k_far(u: Any, order: int) -> Any:
    x = 2 / u
    return mp.exp(x) * mp.sqrt(x) * mp.besselk(order, x)


# The Airy function far from 0, with zeta = 2/3 |x|^(3/2): of 1 / zeta, and below 0 of 1 / zeta^2.


def airy_far(u: Any) -> Any:
    x = (3 / (2 * u)) ** (mp.mpf(2) / 3)
    return 2 * mp.sqrt(mp.pi) * mp.root(x, 4) * mp.exp(1 / u) * mp.airyai(x)


def airy_wave(*, is_sine: bool) -> Function:
    """Return the amplitude of the sine, or of the cosine times -zeta, of zeta + pi / 4."""

    def f(square: Any) -> Any:
        zeta = 1 / mp.sqrt(square)
        x = (3 * zeta / 2) ** (mp.mpf(2) / 3)
        ai, bi, phase = mp.airyai(-x), mp.airybi(-x), zeta + mp.pi / 4
        scale = mp.sqrt(mp.pi) * mp.root(x, 4)
        if is_sine:
            return scale * (ai * mp.sin(phase) + bi * mp.cos(phase))
        return scale * (bi * mp.sin(phase) - ai * mp.cos(phase)) * zeta

    return f


# The error function's tail from 1 on, of t = 5 / (x + 4), and the quantile of the normal distribution.


def erfc_tail(t: Any) -> Any:
    x = 5 / t - 4
    return x * mp.exp(x * x) * mp.erfc(x)


def quantile_center(square: Any) -> Any:
    """Quantile at 1/2 + q, divided by q, of q^2."""
    q = mp.sqrt(square)
    return mp.sqrt(2) * mp.erfinv(2 * q) / q


def quantile_tail(t: Any) -> Any:
    """Quantile at 1 - exp(-r^2), divided by r, of t = 1 / r."""
    r = 1 / t
    guess = mp.sqrt(2 * r * r - mp.log(4 * mp.pi * r * r)) if r > 2 else mp.sqrt(2) * r - 1
    return mp.findroot(lambda x: mp.log(mp.erfc(x / mp.sqrt(2)) / 2) + r * r, guess) / r


SERIES: dict[str, tuple[Function, float, float]] = {
    "J0": (j0, 0, 25),
    "J1": (j1, 0, 25),
    "Y0": (y0, 0, 25),
    "Y1": (y1, 0, 25),
    "COS0": (wave(0, is_sine=False), 0, 1),
    "SIN0": (wave(0, is_sine=True), 0, 1),
    "COS1": (wave(1, is_sine=False), 0, 1),
    "SIN1": (wave(1, is_sine=True), 0, 1),
    "I0_NEAR": (i_near(0), 0, 8),
    "I0_FAR": (lambda u: i_far(u, 0), 0, 1),
    "I1_NEAR": (i_near(1), 0, 8),
    "I1_FAR": (lambda u: i_far(u, 1), 0, 1),
    "K0_NEAR": (k0_near, 0, 4),
    "K0_FAR": (lambda u: k_far(u, 0), 0, 1),
    "K1_NEAR": (k1_near, 0, 4),
    "K1_FAR": (lambda u: k_far(u, 1), 0, 1),
    "AIRY_FAR": (airy_far, 0, 0.5),
    "AIRY_SIN": (airy_wave(is_sine=True), 0, 0.25),
    "AIRY_COS": (airy_wave(is_sine=False), 0, 0.25),
    "ERFC_TAIL": (erfc_tail, 0, 1),
    "QUANTILE_CENTER": (quantile_center, 0, 0.180625),
    "QUANTILE_SIDE": (quantile_tail, 0.2, 0.625),
    "QUANTILE_TAIL": (quantile_tail, 0.035, 0.2),
}


def table(name: str, low: float, high: float, numbers: list[float]) -> str:
    """Return the assignment of a series."""
    lines, line = [], "   "
    for number in numbers:
        text = f" {number!r},"
        if len(line + text) > 118:
            lines.append(line)
            line = "   "
        line += text
    return "\n".join([f"{name} = ({low}, {high}, (", *lines, line, "))", ""])


def main() -> None:
    mp.mp.dps = 50
    tables = [table(name, low, high, coefficients(f, low, high)) for name, (f, low, high) in SERIES.items()]
    path = Path(__file__).parents[2] / "relaxlite" / "ir" / "ops" / "special_tables.py"
    path.write_text(HEADER + "\n".join(tables), "utf-8")


if __name__ == "__main__":
    main()
