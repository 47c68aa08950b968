"""The process that knows sympy and math-verify. It decides whether two expression trees are equal.

Accepted is what both say: mpmath, that the values agree to 60 of 90 digits at several points (math-verify alone
rounds, and
accepts 1/2^99 for 1/2^98), and math-verify or sympy's simplification, that the expressions are equal.
"""

import faulthandler
import os
import resource
import signal

from data.workers import serve

_DIGITS, _AGREE = 90, 60
_MAX_EXPONENT = 200


class _SoftTimeout(BaseException):
    """Raised by the alarm; BaseException so that no library swallows it."""


class _TooLarge(ValueError):
    """An exponent or number beyond what this comparison can tell apart."""


def _alarm(number, frame) -> None:
    raise _SoftTimeout


def build(tree: list):
    """The sympy expression of a tree."""
    import sympy

    kind = tree[0]
    if kind == "num":
        top, bottom = tree[1].split("/")
        if len(top) + len(bottom) > _AGREE:
            raise _TooLarge("number")
        return sympy.Rational(int(top), int(bottom))
    if kind == "sym":
        return sympy.Symbol(tree[1])
    if kind == "const":
        return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I}[tree[1]]
    if kind == "fn":
        return _build_function(tree[1], [build(part) for part in tree[2:]])
    parts = [build(part) for part in tree[1:]]
    if kind == "neg":
        return -parts[0]
    if kind == "add":
        return sympy.Add(*parts)
    if kind == "mul":
        return sympy.Mul(*parts)
    if kind == "div":
        return parts[0] / parts[1]
    if kind == "pow":
        if parts[1].is_number and abs(parts[1]) > _MAX_EXPONENT:
            raise _TooLarge("exponent")
        return parts[0] ** parts[1]
    if kind == "fact":
        if parts[0].is_number and abs(parts[0]) > _MAX_EXPONENT:
            raise _TooLarge("factorial")
        return sympy.factorial(parts[0])
    raise ValueError(kind)


def _build_function(name: str, parts: list):
    import sympy

    names = {
        "arcsin": "asin", "arccos": "acos", "arctan": "atan", "abs": "Abs", "ceil": "ceiling", "ln": "log",
    }  # fmt: skip
    if name == "logbase":
        return sympy.log(parts[0], parts[1])
    return getattr(sympy, names.get(name, name))(*parts)


def _agree_at(first, second, values: dict) -> bool | None:
    """Whether the values agree to many digits at a point; None where one has no value there."""
    import mpmath
    import sympy

    pair = []
    for expression in (first, second):
        number = sympy.N(expression.subs(values), _DIGITS, maxn=4 * _DIGITS)
        if not number.is_number or number.has(sympy.zoo, sympy.nan, sympy.oo, sympy.S.NegativeInfinity):
            return None
        real, imaginary = number.as_real_imag()
        pair.append(mpmath.mpc(mpmath.mpf(str(real)), mpmath.mpf(str(imaginary))))
    gap, scale = abs(pair[0] - pair[1]), max(abs(pair[0]), abs(pair[1]))
    return bool(gap <= scale * mpmath.mpf(10) ** -_AGREE)


def numerically_equal(first, second) -> bool:
    """Agreement at complex, positive and negative points, at least two of them."""
    import sympy

    names = sorted(first.free_symbols | second.free_symbols, key=str)
    seen = 0
    for turn, (real, imaginary) in enumerate(((0.713, 0.157), (1.37, 0), (-0.59, 0), (-1.21, 0.77), (3.19, 0))):
        if not names and turn:
            break
        values = {}
        for place, name in enumerate(names):
            shift = sympy.Rational(37 * place + 11 * turn, 101)
            values[name] = sympy.Rational(str(real)) + shift + sympy.I * sympy.Rational(str(imaginary))
        agree = _agree_at(first, second, values)
        if agree is False:
            return False
        seen += agree is True
    return seen >= (2 if names else 1)


def equal(first, second) -> bool:
    """Whether two sympy expressions are equal."""
    import mpmath
    import sympy
    from math_verify import verify

    mpmath.mp.dps = _DIGITS
    if first == second:
        return True
    if not numerically_equal(first, second):
        return False
    if verify([second], [first], timeout_seconds=None):
        return True
    return sympy.simplify(first - second) == 0


def answer(message: dict) -> dict:
    """One comparison, under an alarm that this process survives and a watchdog that it does not."""
    faulthandler.dump_traceback_later(message["seconds"] + 2.0, exit=True, file=_nowhere)
    signal.setitimer(signal.ITIMER_REAL, message["seconds"])
    try:
        first, second = (build(tree) for tree in message["trees"])
        return {"equal": bool(equal(first, second))}
    except _SoftTimeout:
        return {"equal": None, "reason": "timeout"}
    except _TooLarge:
        return {"equal": None, "reason": "too_large"}
    except Exception as error:  # whatever sympy raises on this input decides nothing
        return {"equal": None, "reason": f"undecided: {type(error).__name__}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


_nowhere = open(os.devnull, "w")


def main() -> None:
    """Entry point of the worker process: imports first, so that a comparison's limit does not pay for them."""
    import math_verify
    import sympy

    del math_verify
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    signal.signal(signal.SIGALRM, _alarm)
    equal(sympy.sqrt(2) / 2, 1 / sympy.sqrt(2))
    serve(answer)
