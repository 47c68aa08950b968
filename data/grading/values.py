"""Values of expression trees: exact rationals where they are rational, binary64 for telling different ones apart."""

import cmath
import math
from fractions import Fraction

from data.grading.expressions import Unreadable

MAX_BITS = 20_000
"""Numerators and denominators longer than this are not computed (2006! has 19,100 bits)."""


class TooLarge(ValueError):
    """The value has more digits than are computed."""


def exact(tree: tuple) -> Fraction | None:
    """The rational value of a tree; None where it is not rational or not seen to be. Raises TooLarge, and Unreadable
    for 0^0, which sympy and mpmath take for 1."""
    return _evaluated(tree)[0]


def is_unevaluated(tree: tuple) -> bool:
    """Whether a sum or product of plain rational numbers was left standing (`2+3`): it may only repeat the question.

    A quotient, power, root, factorial or binomial of numbers is an answer's usual form, and so is `3 \\times 10^5`.
    """
    return not _evaluated(tree)[1]


def _evaluated(tree: tuple) -> tuple[Fraction | None, bool]:
    """The rational value, if any, and whether every sum and product of numbers in the tree has been carried out."""
    kind = tree[0]
    if kind == "num":
        return tree[1], True
    if kind in ("sym", "const"):
        return None, True
    results = [_evaluated(part) for part in tree[1:] if isinstance(part, tuple)]
    parts = [value for value, _ in results]
    finished = all(done for _, done in results)
    if kind in ("add", "mul") and sum(part is not None for part in parts) > 1:
        finished = finished and kind == "mul" and _is_scientific(tree)
    if any(part is None for part in parts):
        return None, finished
    return _value(kind, tree, parts), finished


def _is_scientific(tree: tuple) -> bool:
    return (
        len(tree) == 3
        and tree[1][0] in ("num", "neg")
        and tree[2][0] == "pow"
        and tree[2][1] == ("num", Fraction(10))
        and tree[2][2][0] in ("num", "neg")
    )


def _value(kind: str, tree: tuple, parts: list[Fraction]) -> Fraction | None:
    if kind == "fn":
        return _exact_function(tree[1], parts)
    if kind == "neg":
        return -parts[0]
    if kind == "add":
        return _bounded(sum(parts))
    if kind == "mul":
        return _product(parts)
    if kind == "div":
        return _bounded(parts[0] / parts[1]) if parts[1] else None
    if kind == "pow":
        return _power(parts[0], parts[1])
    if kind == "fact":
        return _factorial(parts[0])
    return None  # plus-minus: two values


def _product(parts: list[Fraction]) -> Fraction:
    value = Fraction(1)
    for part in parts:
        value = _bounded(value * part)
    return value


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
        raise TooLarge("too many digits")
    return value


def _factorial(value: Fraction) -> Fraction | None:
    if value.denominator != 1 or value < 0:
        return None
    if value > 3000:
        raise TooLarge("factorial")
    return _bounded(Fraction(math.factorial(int(value))))


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        if exponent.denominator > 12 or base < 0:
            return None
        root = _root(base, exponent.denominator)
        return None if root is None else _power(root, Fraction(exponent.numerator))
    power = exponent.numerator
    if base in (0, 1, -1):
        if base == 0:
            if power == 0:
                raise Unreadable("0^0 has no value")
            return None if power < 0 else Fraction(0)
        return Fraction(1) if base == 1 or power % 2 == 0 else Fraction(-1)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(power) * (bits - 1) > MAX_BITS:
        raise TooLarge("power")
    return _bounded(base**power)


def _root(value: Fraction, degree: int) -> Fraction | None:
    """The rational root of a value that is not negative, if there is one."""
    parts = [_integer_root(part, degree) for part in (value.numerator, value.denominator)]
    return None if None in parts else Fraction(parts[0], parts[1])


def _integer_root(value: int, degree: int) -> int | None:
    if degree == 2:
        root = math.isqrt(value)
        return root if root * root == value else None
    if value.bit_length() > 2000:
        return None
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high) // 2
        if middle**degree < value:
            low = middle + 1
        else:
            high = middle
    return low if low**degree == value else None


def _exact_function(name: str, parts: list[Fraction]) -> Fraction | None:
    if name == "sqrt":
        return _root(parts[0], 2) if parts[0] >= 0 else None
    if name == "abs":
        return abs(parts[0])
    if name == "floor":
        return Fraction(math.floor(parts[0]))
    if name == "ceil":
        return Fraction(math.ceil(parts[0]))
    if name == "binomial":
        n, k = parts
        if n.denominator != 1 or k.denominator != 1 or n < 0 or k < 0:
            return None
        if n > 3000:
            raise TooLarge("binomial")
        return _bounded(Fraction(math.comb(int(n), int(k))))
    return None


def symbols(tree: tuple) -> set[str]:
    """Names of the variables in a tree."""
    if tree[0] == "sym":
        return {tree[1]}
    return set().union(*(symbols(part) for part in tree[1:] if isinstance(part, tuple)))


def approximate(tree: tuple, values: dict[str, complex]) -> complex:
    """The binary64 value with `values` for the variables; raises ArithmeticError or ValueError where it has none."""
    kind = tree[0]
    if kind == "num":
        return complex(tree[1].numerator / tree[1].denominator)
    if kind == "sym":
        return values[tree[1]]
    if kind == "const":
        if tree[1] == "inf":
            raise ValueError("infinite")
        return {"pi": math.pi, "e": math.e, "i": 1j}[tree[1]]
    if kind == "fn":
        return _approximate_function(tree[1], [approximate(part, values) for part in tree[2:]])
    parts = [approximate(part, values) for part in tree[1:]]
    if kind == "neg":
        return 0 - parts[0]  # not -x: the sign of a zero imaginary part would choose the other root
    if kind == "add":
        return sum(parts)
    if kind == "mul":
        return math.prod(parts)
    if kind == "div":
        return parts[0] / parts[1]
    if kind == "pow":
        return parts[0] ** parts[1]
    raise ValueError(kind)


def _approximate_function(name: str, parts: list[complex]) -> complex:
    value = parts[0]
    if name == "ln":
        return cmath.log(value)
    if name == "logbase":
        return cmath.log(value) / cmath.log(parts[1])
    if name == "abs":
        return complex(abs(value))
    if name in ("sec", "csc", "cot"):
        return 1 / {"sec": cmath.cos, "csc": cmath.sin, "cot": cmath.tan}[name](value)
    function = {"arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan}.get(name) or getattr(
        cmath, name, None
    )
    if function is None:
        raise ValueError(name)
    return function(value)


def surely_different(first: tuple, second: tuple) -> bool:
    """Whether two trees differ by more than rounding at a point; False says nothing."""
    names = sorted(symbols(first) | symbols(second))
    for shift in (0.0, 0.37):
        values = {name: complex(0.713 + 0.291 * place + shift, 0.157 + shift / 3) for place, name in enumerate(names)}
        try:
            a, b = approximate(first, values), approximate(second, values)
        except (ArithmeticError, ValueError):
            continue
        if not (cmath.isfinite(a) and cmath.isfinite(b)):
            continue
        if abs(a - b) > 1e-6 * max(abs(a), abs(b), 1e-9):
            return True
    return False
