"""A small, strict reader of mathematical expressions in LaTeX or plain text.

It gives trees of tuples: ("num", Fraction), ("sym", name), ("const", "pi" | "e" | "i" | "inf"), ("add", a, b, ...),
("mul", a, b, ...), ("div", a, b), ("pow", a, b), ("neg", a), ("pm", a, b), ("mp", a, b), ("fact", a), ("fn", name,
a, ...).
What is ambiguous (`1/2x`, `\\sin \\pi/5`) or unknown is refused, not guessed: a wrong reading is a wrong verdict.
"""

import re
from fractions import Fraction

from data.grading.quantities import MAX_DIGITS

MAX_DEPTH = 40
MAX_TOKENS = 400

_TOKEN = re.compile(
    r"\s*(?:(?P<num>[0-9]*\.[0-9]*\\overline\{[0-9]+\}|[0-9]+(?:\.[0-9]+)?[eE][0-9]+|[0-9]+\.[0-9]+[eE]-[0-9]+|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    r"|(?P<command>\\[A-Za-z]+|\\[{}|%$])|(?P<word>[A-Za-z]+)|(?P<op>[-+*/^_!(){}\[\]|,']))"
)
_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp sqrt abs min max gcd lcm lg".split()
)
_GREEK = frozenset(
    """alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho sigma tau phi
    varphi chi
    psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell""".split()
)
_OPERANDS = _FUNCTIONS | _GREEK | {"pi", "infty", "frac", "binom", "lfloor", "lceil"}
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}


class Unreadable(ValueError):
    """The text is no expression that this reader understands."""


def parse_expression(text: str) -> tuple:
    """The tree of a tidy text; raises Unreadable."""
    return _Parser(_tokens(text)).whole()


def _tokens(text: str) -> list[tuple[str, str]]:
    found, position = [], 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if not match:
            raise Unreadable("unknown sign")
        position = match.end()
        kind = match.lastgroup
        if kind == "word":
            found.extend(_split_word(match["word"]))
        else:
            found.append((kind, match[kind]))
        if len(found) > MAX_TOKENS:
            raise Unreadable("too long")
    return found


def _split_word(word: str) -> list[tuple[str, str]]:
    """A run of letters: a function's name, pi, or at most three variables written together."""
    if word in _FUNCTIONS or word in ("pi", "inf", "infinity", "oo"):
        return [("command", "\\" + {"inf": "infty", "infinity": "infty", "oo": "infty"}.get(word, word))]
    if word in _GREEK and len(word) > 3:
        return [("command", "\\" + word)]
    if len(word) > 3:
        for name in sorted(_FUNCTIONS, key=len, reverse=True):
            if word.endswith(name) and len(word) - len(name) <= 2:
                return [*(("letter", letter) for letter in word[: -len(name)]), ("command", "\\" + name)]
        raise Unreadable("a word")
    return [("letter", letter) for letter in word]


class _Parser:
    """Recursive descent over the tokens; depth is bounded."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens = tokens
        self.place = 0
        self.depth = 0

    def whole(self) -> tuple:
        if not self.tokens:
            raise Unreadable("empty")
        tree = self.sum()
        if self.place != len(self.tokens):
            raise Unreadable("text left over")
        return tree

    def peek(self) -> str:
        return self.tokens[self.place][1] if self.place < len(self.tokens) else ""

    def kind(self) -> str:
        return self.tokens[self.place][0] if self.place < len(self.tokens) else ""

    def take(self) -> str:
        if self.place >= len(self.tokens):
            raise Unreadable("ends too early")
        self.place += 1
        return self.tokens[self.place - 1][1]

    def expect(self, text: str) -> None:
        if self.take() != text:
            raise Unreadable(f"{text} is missing")

    def sum(self) -> tuple:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        first = self.peek()
        if first in ("\\pm", "\\mp"):
            self.take()
            tree = (first[1:], ("num", Fraction(0)), self.product())
        else:
            tree = self.signed()
        terms = [tree]
        while self.peek() in ("+", "-", "\\pm", "\\mp"):
            sign = self.take()
            if sign in ("\\pm", "\\mp"):
                terms = [(sign[1:], _sum_of(terms), self.product())]
            elif sign == "+":
                terms.append(self.signed())
            else:
                terms.append(("neg", self.signed()))
        self.depth -= 1
        return _sum_of(terms)

    def signed(self) -> tuple:
        """A product with at most one sign before it (`3 + -4` is read, `3 - - 4` too, `+ + 3` is not)."""
        sign = self.peek()
        if sign in ("+", "-"):
            self.take()
            if self.peek() in ("+", "-"):
                raise Unreadable("two signs")
            return ("neg", self.product()) if sign == "-" else self.product()
        return self.product()

    def product(self) -> tuple:
        factors = [self.power()]
        divided = False
        while True:
            sign = self.peek()
            if sign == "*":
                self.take()
                factors.append(self.signed_factor())
                divided = False
            elif sign == "/":
                self.take()
                factors[:] = [("div", _product_of(factors), self.signed_factor())]
                divided = True
            elif self._starts_factor():
                if divided:
                    raise Unreadable("a product after a slash is ambiguous")
                before, number_next = factors[-1], self.kind() == "num"
                if number_next and (
                    before[0] in ("num", "mixed") or self.tokens[self.place - 1][0] in ("num", "letter")
                ):
                    mixed = self._plain_mixed(before)
                    if mixed is None:
                        raise Unreadable("two numbers side by side")
                    factors[-1] = mixed
                    continue
                following = self.power()
                factors[-1:] = _mixed_or_both(before, following)
            else:
                break
        return _product_of([("num", factor[1]) if factor[0] == "mixed" else factor for factor in factors])

    def _plain_mixed(self, before: tuple) -> tuple | None:
        """`3 1/2` in plain text: a whole number, then a proper fraction of whole numbers."""
        rest = [text for _, text in self.tokens[self.place : self.place + 3]]
        kinds = [kind for kind, _ in self.tokens[self.place : self.place + 3]]
        if before[0] != "num" or before[1].denominator != 1 or kinds[:3] != ["num", "op", "num"] or rest[1] != "/":
            return None
        top, bottom = _number(rest[0]), _number(rest[2])
        if bottom == 0 or top >= bottom or top.denominator != 1 or bottom.denominator != 1:
            return None
        self.place += 3
        if self._starts_factor() or self.peek() in ("^", "!", "/"):
            raise Unreadable("text after a mixed number")
        return ("mixed", before[1] + top / bottom)

    def signed_factor(self) -> tuple:
        if self.peek() in ("-", "+"):
            sign = self.take()
            inner = self.power()
            return ("neg", inner) if sign == "-" else inner
        return self.power()

    def _starts_factor(self) -> bool:
        kind, text = self.kind(), self.peek()
        if kind in ("num", "letter"):
            return True
        if kind == "command":
            return text[1:] in _OPERANDS
        return text in ("(", "[", "{") and kind == "op"

    def power(self) -> tuple:
        tree = self.atom()
        while True:
            if self.peek() == "!":
                self.take()
                tree = ("fact", tree)
            elif self.peek() == "^":
                self.take()
                exponent = self.script()
                if self.peek() == "^":
                    exponent = ("pow", exponent, (self.take(), self.script())[1])
                    if self.peek() == "^":
                        raise Unreadable("a tower of powers")
                tree = ("pow", tree, exponent)
            else:
                return tree

    def script(self) -> tuple:
        """What stands above or below: a group, or one sign of it; plain texts also write `x^10` and `2^-3`."""
        if self.peek() == "{":
            return self.group("{", "}")
        if self.peek() == "(":
            return self.group("(", ")")
        if self.peek() in ("-", "+"):
            sign = self.take()
            inner = self.atom()
            return ("neg", inner) if sign == "-" else inner
        return self.atom()

    def group(self, opening: str, closing: str) -> tuple:
        self.expect(opening)
        tree = self.sum()
        self.expect(closing)
        return tree

    def atom(self) -> tuple:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        tree = self._atom()
        self.depth -= 1
        return tree

    def _atom(self) -> tuple:
        kind, text = self.kind(), self.peek()
        if kind == "num":
            return ("num", _number(self.take()))
        if kind == "letter":
            return self.variable(self.take())
        if text in ("(", "[", "{") and kind == "op":
            return self.group(text, {"(": ")", "[": "]", "{": "}"}[text])
        if text == "|":
            return self.absolute()
        if kind == "command":
            return self.command(self.take()[1:])
        raise Unreadable("no operand")

    def absolute(self) -> tuple:
        self.expect("|")
        tree = self.sum()
        self.expect("|")
        return ("fn", "abs", tree)

    def variable(self, name: str) -> tuple:
        if self.peek() == "_":
            self.take()
            name += "_" + self.subscript()
        while self.peek() == "'":
            name += self.take()
        if name in ("e", "i"):
            return ("const", name)
        return ("sym", name)

    def subscript(self) -> str:
        if self.peek() != "{":
            return self.take()
        self.take()
        parts = []
        while self.peek() != "}":
            parts.append(self.take())
        self.take()
        return "".join(parts)

    def command(self, name: str) -> tuple:
        if name == "frac":
            return ("div", self.argument(), self.argument())
        if name == "binom":
            return ("fn", "binomial", self.argument(), self.argument())
        if name == "sqrt":
            return self.root()
        if name in ("pi", "infty"):
            return ("const", "inf" if name == "infty" else "pi")
        if name in _GREEK:
            return self.variable(name)
        if name in ("lfloor", "lceil"):
            tree = self.sum()
            self.expect("\\r" + name[1:])
            return ("fn", "floor" if name == "lfloor" else "ceil", tree)
        if name in _FUNCTIONS:
            return self.function(name)
        raise Unreadable(f"\\{name} is not known")

    def argument(self) -> tuple:
        """TeX's argument: a group, or one digit, letter or command."""
        if self.peek() == "{":
            return self.group("{", "}")
        kind, text = self.kind(), self.peek()
        if kind == "num" and len(text) > 1 and text.isdigit():
            self.tokens[self.place : self.place + 1] = [("num", digit) for digit in text]
        return self.atom()

    def root(self) -> tuple:
        if self.peek() == "[":
            degree = self.group("[", "]")
            return ("pow", self.argument(), ("div", ("num", Fraction(1)), degree))
        if self.peek() == "(":
            return ("fn", "sqrt", self.group("(", ")"))
        return ("fn", "sqrt", self.argument())

    def function(self, name: str) -> tuple:
        exponent = base = None
        for _ in range(2):
            if self.peek() == "^":
                self.take()
                exponent = self.script()
            elif self.peek() == "_" and name == "log":
                self.take()
                base = self.script()
        if name in ("min", "max", "gcd", "lcm"):
            raise Unreadable(f"{name} is not evaluated")
        if self.peek() in ("(", "{", "[", "|"):
            opening = self.peek()
            inner = self.absolute() if opening == "|" else self.group(opening, {"(": ")", "{": "}", "[": "]"}[opening])
            tree = _apply(name, base, inner)
        else:
            tree = _apply(name, base, self.bare_argument())
            if self.peek() == "/":
                raise Unreadable("a function's argument before a slash is ambiguous")
        if exponent == ("neg", ("num", Fraction(1))) and name in _INVERSE:
            return ("fn", _INVERSE[name], *tree[2:])
        if exponent is None:
            return tree
        return ("pow", tree, exponent)

    def bare_argument(self) -> tuple:
        """`\\sin 2x`: the factors up to the next sign, slash, product sign or function."""
        factors = [self.power()]
        while self._starts_factor() and not (self.kind() == "command" and self.peek()[1:] in _FUNCTIONS - {"sqrt"}):
            if self.peek() == "(" or (self.kind() == "num" and factors[-1][0] == "num"):
                raise Unreadable("a function's argument is ambiguous")
            factors.append(self.power())
        return _product_of(factors)


def _apply(name: str, base: tuple | None, inner: tuple) -> tuple:
    if name == "exp":
        return ("pow", ("const", "e"), inner)
    if name == "ln" or (name == "log" and base == ("const", "e")):
        return ("fn", "ln", inner)
    if name == "log" and base is not None:
        return ("fn", "logbase", inner, base)
    if name == "lg":
        return ("fn", "logbase", inner, ("num", Fraction(10)))
    if name == "log":  # of no stated base: only what holds for every base may be equal
        return ("div", ("fn", "ln", inner), ("sym", "log base"))
    return ("fn", name, inner)


def _sum_of(terms: list[tuple]) -> tuple:
    return terms[0] if len(terms) == 1 else ("add", *terms)


def _product_of(factors: list[tuple]) -> tuple:
    return factors[0] if len(factors) == 1 else ("mul", *factors)


def _mixed_or_both(before: tuple, following: tuple) -> list[tuple]:
    """`3\\frac{1}{2}` is three and a half; any other neighbours are a product."""
    if before[0] == "num" and before[1].denominator == 1 and following[0] == "div":
        top, bottom = following[1], following[2]
        if top[0] == bottom[0] == "num" and top[1].denominator == bottom[1].denominator == 1 and 0 < top[1] < bottom[1]:
            return [("mixed", before[1] + top[1] / bottom[1])]
    return [before, following]


def _number(text: str) -> Fraction:
    if len(text) > MAX_DIGITS:
        raise Unreadable("too many digits")
    if "e" in text.lower() and "\\" not in text:
        digits, _, exponent = text.lower().partition("e")
        if len(exponent) > 5 or abs(int(exponent)) > MAX_DIGITS:
            raise Unreadable("too large an exponent")
        return Fraction(digits) * Fraction(10) ** int(exponent)
    if "\\overline" not in text:
        return Fraction(text.rstrip(".")) if text != "." else Fraction(0)
    plain, _, repeated = text.partition("\\overline")
    repeated = repeated.strip("{}")
    places = len(plain.partition(".")[2])
    head = Fraction(plain.rstrip(".") or "0") if plain != "." else Fraction(0)
    return head + Fraction(int(repeated), (10 ** len(repeated) - 1) * 10**places)
