"""Whether two answers are the same, by the policy of docs/grading.md. Where in doubt they are not."""

from fractions import Fraction

from data.grading import symbolic
from data.grading.answers import parse_answer, words_of
from data.grading.expressions import Unreadable
from data.grading.latex import compact
from data.grading.values import TooLarge, exact, is_unevaluated, surely_different, symbols

_MAX_ITEMS = 64
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
_FUNCTION_NAMES = frozenset("fghpqFGHPQ")


class Undecided(ValueError):
    """The comparison could not be finished: its reason is the grade's."""


def same_answer(prediction: str, gold: str) -> bool:
    """Whether two tidy texts are the same answer; raises Unreadable or Undecided."""
    if compact(prediction) == compact(gold):
        return True
    expected = parse_answer(gold)
    if expected[0] == "words":
        return _without_article(words_of(prediction)) == _without_article(expected[1])
    given = parse_answer(prediction)
    if expected[0] == "based" and given[0] == "expr":
        return compact(prediction) == expected[1]  # the base is left out: the digits must be these
    return same(given, expected)


def is_finite(text: str) -> bool:
    """Whether a tidy text is a mathematical answer that can be read, neither words nor infinite."""
    try:
        answer = parse_answer(text)
    except Unreadable:
        return False
    return answer[0] != "words" and not (answer[0] == "expr" and _is_infinite(answer[1]))


def _without_article(words: str) -> str:
    first, _, rest = words.partition(" ")
    return rest if first in ("a", "an", "the") and rest else words


def same(given: tuple, expected: tuple) -> bool:
    """Whether two answers are the same."""
    if given == expected:
        return True
    if "rel" in (given[0], expected[0]):
        return _same_relation(given, expected)
    given, expected = _as_union(given), _as_union(expected)
    given, expected = _values_of_one_name(given), _values_of_one_name(expected)
    if {given[0], expected[0]} == {"set", "list"}:
        return _same_items(_distinct(given[1]), _distinct(expected[1]))
    if given[0] != expected[0]:
        return False
    compare = _COMPARISONS.get(expected[0])
    return compare is not None and compare(given, expected)


def _same_expression(given: tuple, expected: tuple) -> bool:
    _, tree, unit, percent = given
    _, gold_tree, gold_unit, gold_percent = expected
    if unit and gold_unit and unit != gold_unit:
        return False
    if equal_trees(tree, gold_tree):
        return _is_finished(tree, gold_tree)
    hundred = ("num", Fraction(100))
    if percent and not gold_percent:
        return _is_finished(tree, gold_tree) and equal_trees(("div", tree, hundred), gold_tree)
    if gold_percent and not percent:
        return _is_finished(tree, gold_tree) and equal_trees(tree, ("div", gold_tree, hundred))
    return False


def _is_finished(tree: tuple, gold_tree: tuple) -> bool:
    """A sum like 2+3 is not accepted for 5, unless the gold itself is left standing like that."""
    return not is_unevaluated(tree) or is_unevaluated(gold_tree)


def equal_trees(first: tuple, second: tuple) -> bool:
    """Equality of two expressions: exactly where both are rational, else by the symbolic worker. Raises Undecided."""
    if first == second:
        return True
    if _is_infinite(first) or _is_infinite(second):
        return False
    try:
        a, b = exact(first), exact(second)
    except TooLarge as error:
        raise Undecided("too_large") from error
    if a is not None and b is not None:
        return a == b
    if symbols(first) ^ symbols(second) and (not symbols(first) or not symbols(second)):
        return False  # a variable against a number; x - x + 5 is not an answer either
    if surely_different(first, second):
        return False
    return symbolic.equal(first, second)


def _is_infinite(tree: tuple) -> bool:
    return tree == ("const", "inf") or any(_is_infinite(part) for part in tree[1:] if isinstance(part, tuple))


def _same_items(given: tuple, expected: tuple) -> bool:
    """Unordered: every item has its own partner."""
    if len(given) != len(expected) or len(given) > _MAX_ITEMS:
        return False
    left = list(given)
    for item in expected:
        partner = next((other for other in left if same(other, item)), None)
        if partner is None:
            return False
        left.remove(partner)
    return True


def _distinct(items: tuple) -> tuple:
    kept: list[tuple] = []
    for item in items[: _MAX_ITEMS + 1]:
        if not any(same(item, other) for other in kept):
            kept.append(item)
    return tuple(kept)


def _same_sequence(given: tuple, expected: tuple) -> bool:
    if given[1:3] != expected[1:3] or len(given[3]) != len(expected[3]):
        return False
    return all(same(a, b) for a, b in zip(given[3], expected[3], strict=True))


def _same_matrix(given: tuple, expected: tuple) -> bool:
    if [len(row) for row in given[1]] != [len(row) for row in expected[1]]:
        return False
    pairs = [pair for rows in zip(given[1], expected[1], strict=True) for pair in zip(*rows, strict=True)]
    return all(same(a, b) for a, b in pairs)


def _same_ratio(given: tuple, expected: tuple) -> bool:
    first, second = given[1], expected[1]
    if len(first) != len(second) or not all(first) or not all(second):
        return False
    return all(a * second[0] == b * first[0] for a, b in zip(first, second, strict=True))


def _same_relation(given: tuple, expected: tuple) -> bool:
    """At least one of the two is a relation."""
    if given[0] == expected[0] == "rel":
        return _both_relations(given, expected)
    if expected[0] == "rel":
        value = _assigned(expected) or _membership(expected) or _interval(expected)
        return value is not None and given[0] != "rel" and same(given, value)
    value = _membership(given) or _interval(given) or _end_of_chain(given)
    return value is not None and same(value, expected)


def _both_relations(given: tuple, expected: tuple) -> bool:
    for reading in (_assigned, _membership, _interval):
        a, b = reading(given), reading(expected)
        if a is not None and b is not None:
            return same(a, b)
    if _membership(expected) or _membership(given):
        a, b = _membership(given) or _interval(given), _membership(expected) or _interval(expected)
        return a is not None and b is not None and same(a, b)
    return _equivalent(given, expected)


def _name(side: tuple) -> str | None:
    """The variable, or function of one variable, that a side is."""
    if side[0] != "expr" or side[2] or side[3]:
        return None
    tree = side[1]
    if tree[0] == "sym":
        return tree[1]
    if tree[0] == "mul" and len(tree) == 3 and tree[1][0] == tree[2][0] == "sym" and tree[1][1] in _FUNCTION_NAMES:
        return f"{tree[1][1]}({tree[2][1]})"
    return None


def _assigned(relation: tuple) -> tuple | None:
    """The value of `x = value`; None for another relation."""
    if relation[1] != ("=",):
        return None
    left, right = relation[2]
    if _name(left) is not None:
        return right
    return left if _name(right) is not None else None


def _membership(relation: tuple) -> tuple | None:
    """The set of `x \\in set`."""
    return relation[2][1] if relation[1] == ("\\in",) and _name(relation[2][0]) is not None else None


def _end_of_chain(relation: tuple) -> tuple | None:
    """The last side of a = b = c, whose plain numbers must agree (5 = 6 says nothing)."""
    if set(relation[1]) != {"="}:
        return None
    sides = relation[2]
    if len(sides) == 2 and (value := _assigned(relation)) is not None:
        return value
    last = sides[-1]
    if last[0] == "expr":
        end = _exact_or_none(last[1])
        others = [_exact_or_none(side[1]) for side in sides[:-1] if side[0] == "expr"]
        if any(other is not None and other != end for other in others):
            return None
    return last


def _exact_or_none(tree: tuple) -> Fraction | None:
    try:
        return exact(tree)
    except TooLarge as error:
        raise Undecided("too_large") from error


def _interval(relation: tuple) -> tuple | None:
    """`1 < x \\le 2` as the interval (1, 2]; None where it is none."""
    operators, sides = relation[1], relation[2]
    infinity = ("expr", ("const", "inf"), "", False)
    minus_infinity = ("expr", ("neg", ("const", "inf")), "", False)
    if len(sides) == 2 and _name(sides[1]) is not None and _name(sides[0]) is None:
        operators, sides = (_FLIPPED.get(operators[0], "?"),), (sides[1], sides[0])
    if len(sides) == 2 and _name(sides[0]) is not None and _is_constant(sides[1]):
        if operators[0] in ("<", "<="):
            return ("seq", "(", ")" if operators[0] == "<" else "]", (minus_infinity, sides[1]))
        if operators[0] in (">", ">="):
            return ("seq", "(" if operators[0] == ">" else "[", ")", (sides[1], infinity))
    if len(sides) == 3 and _name(sides[1]) is not None and _is_constant(sides[0]) and _is_constant(sides[2]):
        low, high = sides[0], sides[2]
        if set(operators) <= {">", ">="}:
            operators, low, high = (_FLIPPED[operators[1]], _FLIPPED[operators[0]]), high, low
        if set(operators) <= {"<", "<="}:
            opening, closing = "(" if operators[0] == "<" else "[", ")" if operators[1] == "<" else "]"
            return ("seq", opening, closing, (low, high))
    return None


def _is_constant(side: tuple) -> bool:
    return side[0] == "expr" and not symbols(side[1])


def _as_union(answer: tuple) -> tuple:
    """`x < 1 or x > 2` as a union of intervals."""
    if answer[0] != "list" or not all(item[0] == "rel" for item in answer[1]):
        return answer
    intervals = [_interval(item) for item in answer[1]]
    return answer if None in intervals else ("union", tuple(intervals))


def _values_of_one_name(answer: tuple) -> tuple:
    """`x = 1, x = 2` as the list 1, 2; assignments to several names keep their names."""
    if answer[0] != "list" or not all(item[0] == "rel" and item[1] == ("=",) for item in answer[1]):
        return answer
    if len({_name(item[2][0]) for item in answer[1]}) != 1 or _name(answer[1][0][2][0]) is None:
        return ("assignments", answer[1])
    return ("list", tuple(item[2][1] for item in answer[1]))


def _same_assignments(given: tuple, expected: tuple) -> bool:
    """x = 1, y = 2 against y = 2, x = 1: by name, in any order."""
    values, golds = ({_name(item[2][0]): item[2][1] for item in answer[1]} for answer in (given, expected))
    if None in golds or len(golds) != len(expected[1]) or len(given[1]) != len(golds) or set(values) != set(golds):
        return False
    return all(same(values[name], golds[name]) for name in golds)


def _equivalent(given: tuple, expected: tuple) -> bool:
    """Relations of two sides: left - right of one is a constant multiple of the other's (positive for inequalities)."""
    differences = []
    for relation in (given, expected):
        if len(relation[2]) != 2 or any(side[0] != "expr" for side in relation[2]):
            return False
        operator, (left, right) = relation[1][0], relation[2]
        if operator in (">", ">="):
            operator, left, right = _FLIPPED[operator], right, left
        differences.append((operator, ("add", left[1], ("neg", right[1]))))
    (operator, first), (gold_operator, second) = differences
    if operator != gold_operator or symbols(first) != symbols(second) or not symbols(first):
        return False
    values = {name: Fraction(7 + 4 * place, 3) for place, name in enumerate(sorted(symbols(second)))}
    a, b = _exact_or_none(_substituted(first, values)), _exact_or_none(_substituted(second, values))
    if not a or not b or (operator in ("<", "<=") and a / b < 0):
        return False
    return equal_trees(("mul", ("num", b / a), first), second)


def _substituted(tree: tuple, values: dict[str, Fraction]) -> tuple:
    if tree[0] == "sym":
        return ("num", values[tree[1]])
    return tuple(_substituted(part, values) if isinstance(part, tuple) else part for part in tree)


_COMPARISONS = {
    "expr": _same_expression,
    "list": lambda given, expected: _same_items(given[1], expected[1]),
    "set": lambda given, expected: _same_items(_distinct(given[1]), _distinct(expected[1])),
    "union": lambda given, expected: _same_items(given[1], expected[1]),
    "seq": _same_sequence,
    "matrix": _same_matrix,
    "ratio": _same_ratio,
    "assignments": _same_assignments,
}

__all__ = ["Undecided", "Unreadable", "equal_trees", "is_finite", "same", "same_answer"]
