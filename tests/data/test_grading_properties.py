"""Properties of the readers: what is written is read back, what differs is told apart, nothing raises."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from data.grading import grade
from data.grading.answers import parse_answer
from data.grading.expressions import Unreadable, parse_expression
from data.grading.extraction import strong_answers, visible_part
from data.grading.latex import straighten, tidy
from data.grading.quantities import parse_quantity, show
from data.grading.values import exact, is_unevaluated

WHOLE = st.integers(-(10**12), 10**12)
FRACTIONS = st.builds(Fraction, WHOLE, st.integers(1, 10**6))
MODEST = settings(max_examples=80, deadline=None)


@MODEST
@given(
    WHOLE, st.sampled_from(["{:,}", "{}", "${:,}", "{:,}.00", "{:,} apples", r"\boxed{{{}}}", "{:,} dollars.", "+{}"])
)
def test_a_whole_number_is_read_however_it_is_written(value: int, pattern: str) -> None:
    if value < 0 and pattern.startswith("+"):
        value = -value
    assert grade(f"#### {pattern.format(value)}", str(value)).correct
    assert not grade(f"#### {pattern.format(value)}", str(value + 1)).correct


@MODEST
@given(FRACTIONS)
def test_a_fraction_is_its_own_value_and_no_other(value: Fraction) -> None:
    top, bottom = value.numerator, value.denominator
    for text in (
        f"{top}/{bottom}",
        rf"\frac{{{top}}}{{{bottom}}}",
        rf"\dfrac{{{7 * top}}}{{{7 * bottom}}}",
        show(value),
    ):
        assert parse_quantity(text).value == value
        assert grade(f"\\boxed{{{text}}}", show(value), "math").correct
        assert not grade(f"\\boxed{{{text}}}", show(value + Fraction(1, 10**9)), "math").correct


@MODEST
@given(st.integers(1, 10**6), st.integers(1, 50), st.integers(51, 99))
def test_a_mixed_number_is_a_sum(whole: int, top: int, bottom: int) -> None:
    value = whole + Fraction(top, bottom)
    for text in (f"{whole} {top}/{bottom}", rf"{whole}\frac{{{top}}}{{{bottom}}}"):
        assert grade(f"\\boxed{{{text}}}", show(value), "math").correct
        assert grade(f"#### {text}", show(value), "number").correct


@MODEST
@given(st.lists(st.integers(-99, 99), min_size=2, max_size=6, unique=True), st.randoms())
def test_order_counts_in_tuples_only(items: list[int], draw) -> None:
    shuffled = items[:]
    draw.shuffle(shuffled)
    text, other = (", ".join(map(str, values)) for values in (items, shuffled))
    assert grade(f"\\boxed{{{other}}}", text, "math").correct
    assert grade(rf"\boxed{{\{{{other}\}}}}", rf"\{{{text}\}}", "math").correct
    assert grade(f"\\boxed{{({other})}}", f"({text})", "math").correct is (items == shuffled)
    assert not grade(f"\\boxed{{{text}, 100}}", text, "math").correct
    assert not grade(f"\\boxed{{{text}}}", str(items[0]), "math").correct


@MODEST
@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(1, 9))
def test_exact_values_of_expressions(a: int, b: int, c: int) -> None:
    assert exact(parse_expression(f"({a}+{b})/{c}".replace("+-", "-"))) == Fraction(a + b, c)
    assert exact(parse_expression(rf"\frac{{{a}}}{{{c}}}-({b})")) == Fraction(a, c) - b
    assert exact(parse_expression(f"{c}^{{3}}")) == c**3
    assert is_unevaluated(parse_expression(f"{c}+{c}")) and not is_unevaluated(parse_expression(f"{a}/{c}"))


@MODEST
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_polynomials_are_equal_when_expanded_and_only_then(a: int, b: int, c: int) -> None:
    product = f"({a}x+{b})(x+{c})"
    assert grade(f"\\boxed{{{product}}}", f"{a}x^2+{a * c + b}x+{b * c}", "math").correct
    assert not grade(f"\\boxed{{{product}}}", f"{a}x^2+{a * c + b + 1}x+{b * c}", "math").correct


ALPHABET = st.sampled_from(
    [*list("0123456789abcxyz(){}[]$\\,.;:!?+-*/^_=<>|%# \n\"'"), "\\boxed{", "\\frac", "####", "é", "½"]
)


@MODEST
@given(st.lists(ALPHABET, max_size=60).map("".join), st.sampled_from(["number", "math", "choice", "label", "string"]))
def test_no_text_raises_and_no_answer_is_ever_right_for_a_far_gold(text: str, kind: str) -> None:
    gold = {"number": "918273645", "math": r"\frac{918273}{645546}", "choice": "J", "label": "proved", "string": "qqq"}[
        kind
    ]
    result = grade(text, gold, kind)
    assert not result.correct and isinstance(result.reason, str) and result.reason
    assert visible_part(text) == text
    strong_answers(text)
    assert tidy(tidy(text)) == tidy(tidy(tidy(text)))
    try:
        parse_answer(tidy(text))
    except Unreadable:
        pass


@MODEST
@given(st.text(max_size=40))
def test_unicode_is_straightened_once(text: str) -> None:
    assert isinstance(straighten(text), str)
    grade(text, "5")
    grade(f"\\boxed{{{text}}}", "x", "math")


@MODEST
@given(st.text(alphabet="abc{}\\ ", max_size=30))
def test_a_box_is_closed_where_its_brace_is(inside: str) -> None:
    marks, unfinished = strong_answers("\\boxed{" + inside + "}")
    assert marks or unfinished
    for mark in marks:
        text = mark.text
        assert text.replace("\\\\", "").replace("\\{", "").count("{") == text.replace("\\\\", "").replace(
            "\\}", ""
        ).count("}")
