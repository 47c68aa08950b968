"""LaTeX and typography brought to one spelling, without changing what is meant."""

import re
import unicodedata

_SYMBOLS = {
    "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "/", "π": "\\pi ", "√": "\\sqrt ",
    "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "±": "\\pm ", "∓": "\\mp ", "∪": "\\cup ", "∩": "\\cap ",
    "∈": "\\in ", "°": "^\\circ ", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "∅": "\\emptyset ", "ℝ":
    "\\mathbb{R}",
    "’": "'", "‘": "'", "“": '"', "”": '"', "\u2061": "", "\u200b": "", "\ufeff": "",
}  # fmt: skip
_INVISIBLE = re.compile("(?<=[0-9])[\u2061\u200b\ufeff]+(?=[0-9])")
"""Between digits these keep two numbers apart."""
_SPACES = re.compile(
    r"\\[,;:!> ]|~|\\(?:quad|qquad|enspace|thinspace|displaystyle|textstyle|limits|nolimits)(?![A-Za-z])"
)
_SIZES = re.compile(r"\\(?:left|right|bigl|bigr|Bigl|Bigr|big|Big|bigg|Bigg|middle)(?![A-Za-z])\s*(\.(?![0-9]))?")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textsf|mbox|hbox|mathrm|operatorname\*?|rm)\s*\{([^{}]*)\}")
_NUMBER = re.compile(r"-?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_NUMBER_IN_BRACKETS = re.compile(r"\(\s*-?[0-9][0-9,]*(?:\.[0-9]+)?\s*\)")
_STYLES = re.compile(r"\\(?:mathbf|mathit|mathsf|boldsymbol|bm|ensuremath|mathcal|underline)\s*\{([^{}]*)\}")
_RENAMED = [
    (re.compile(rf"\\(?:{old})(?![A-Za-z])"), new)
    for old, new in (
        ("dfrac|tfrac|cfrac", r"\\frac"),
        ("leq|leqslant", r"\\le"),
        ("geq|geqslant", r"\\ge"),
        ("neq|not\\s*=", r"\\ne"),
        ("lt", "<"),
        ("gt", ">"),
        ("lbrace", r"\\{"),
        ("rbrace", r"\\}"),
        ("lvert|rvert|vert|mid", "|"),
        ("cdot|times|ast", "*"),
        ("div", "/"),
        ("colon", ":"),
        ("varnothing", r"\\emptyset"),
        ("dbinom|tbinom", r"\\binom"),
        ("degree", r"^\\circ"),
        ("Rightarrow|implies|to|rightarrow", r"\\Rightarrow"),
    )
]
_ROW_END = re.compile(r"\\\\(?:\[-?[0-9.]+[a-z]{2}\])?")
_CHOOSE = re.compile(r"\{([^{}\\]+)\\choose(?![A-Za-z])([^{}\\]+)\}")
_THIN_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|\\!\s*,|,\\!\s*|\\,|\\!|\\;|\\ )\s*(?=[0-9]{3}(?![0-9]))")


def straighten(text: str) -> str:
    """Unicode to the ASCII or LaTeX that it stands for: minus signs, superscripts, vulgar fractions, full-width
    digits."""
    if text.isascii():
        return text
    text = _INVISIBLE.sub(" ", text)
    out = []
    for character in text:
        if character in _SYMBOLS:
            out.append(_SYMBOLS[character])
        elif character in "\u2009\u202f":
            out.append("\\,")
        elif character.isascii():
            out.append(character)
        else:
            out.append(_decomposed(character))
    return re.sub(r"\}\^\{", "", "".join(out)) if "}^{" in "".join(out) else "".join(out)


def _decomposed(character: str) -> str:
    kind = unicodedata.decomposition(character).partition(" ")[0]
    plain = unicodedata.normalize("NFKC", character).replace("−", "-")
    if kind == "<circle>" and plain.isdigit():
        return character  # the number of a list's item, no digit
    if kind == "<super>":
        return f"^{{{plain}}}"
    if kind == "<sub>":
        return f"_{{{plain}}}"
    if kind == "<fraction>":
        return " " + plain.replace("\u2044", "/")
    return plain


def tidy(text: str) -> str:
    """One spelling of an answer in LaTeX or plain text; "" where nothing is left."""
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", _ROW_END.sub(r"\\cr ", straighten(text)))
    text = _THIN_THOUSANDS.sub("", text)
    text = _SPACES.sub(" ", text)
    text = _SIZES.sub(" ", text)
    for pattern, new in _RENAMED:
        text = pattern.sub(new, text)
    text = _STYLES.sub(r"{\1}", text)
    whole = _TEXT.fullmatch(text.strip())
    text = whole[1] if whole and _NUMBER.fullmatch(whole[1].strip()) else _TEXT.sub(_keep_text, text)
    text = text.replace("\\(", "").replace("\\)", "").replace("\\[", "").replace("\\]", "").replace("**", "^")
    text = re.sub(r"(?<!\\)\$", "", text)
    text = re.sub(r"\s+", " ", text).strip(" \t`")
    while len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1].strip()
    return re.sub(r"[\s.,;:]+$", "", text) if not text.endswith("...") else text


def _keep_text(match: re.Match) -> str:
    inside = match[1].strip()
    if (len(inside) == 1 and inside.isalpha()) or _NUMBER_IN_BRACKETS.fullmatch(inside):
        return inside  # \\mathrm{e}, \\text{B}: the letter itself; \\textbf{(540)}: the number
    return f"\\text{{{match[1]}}}"


def balanced(text: str) -> bool:
    """Whether every brace is closed and none is closed that was not opened."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth < 0:
            return False
    return depth == 0


def compact(text: str) -> str:
    """Without white space, but for what keeps two numbers apart: equal compact texts are the same answer."""
    return re.sub(r"(?<![0-9.])\s+|\s+(?![0-9.])", "", text)
