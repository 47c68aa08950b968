"""Cuts a rationale into steps whose concatenation is the rationale, byte for byte.

A cut never lies inside a word or a number. Newlines stay at the end of the step before the cut; a space before a word
goes with that word, because tokenizers of the GPT-2 and Llama kind keep it there.
"""

import re

from data.settings import Segmentation

TOKEN_STEPS = 20
"""Steps of about equal token counts in the segmentation `tokens` (our choice: the fifths of R³ are whole steps)."""

_WORD_GAP = re.compile(r"[ \t\r\n\f\v]+")
_SENTENCE_END = re.compile(
    r"""[.!?…]+["'”’)\]}]*(?=[ \t\r\n\f\v]+[^\s\#a-z])  # a closing mark, then a word that starts a sentence
      | [。！？]["”’」』）]*(?=[^\s])""",
    re.VERBOSE,
)
_ABBREVIATION = re.compile(
    r"""(?:^|[\s(])(?:Mr|Mrs|Ms|Dr|Prof|St|Mt|No|Nos|Fig|Eq|vs|etc|approx|e\.g|i\.e|cf|a\.m|p\.m|Jr|Sr|[A-Z])\.$
      | (?:^|\n)[ \t]*\d+\.$                             # the number of a list item""",
    re.VERBOSE,
)
_TOKEN = re.compile(r"[^\W\d_]{1,6}|\d{1,3}|[^\w\s]|_")
_HALF_A_WORD = 3


def split_steps(rationale: str, how: Segmentation) -> list[str]:
    """The steps of `rationale`; `"".join(steps) == rationale`. An empty rationale has no steps.

    - `lines`: one step a line; blank lines belong to the line before (R³ on GSM8K, prose).
    - `code_lines`: the same, but never inside brackets or a triple-quoted string (R³ on GSM8K, programs).
    - `sentences`: at sentence ends and line ends (R³ on BoardgameQA).
    - `tokens`: up to 20 steps of about equal token counts, at word starts (R³ on SVAMP, SNLI, MNLI: uniform fifths).
      Tokens are estimated, since this room knows no tokenizer: letters six to a token, digits three (our choice).
    - `whitespace`: one step a word.
    """
    if how == "lines":
        cuts = _line_cuts(rationale)
    elif how == "code_lines":
        cuts = _code_cuts(rationale)
    elif how == "sentences":
        cuts = _sentence_cuts(rationale)
    elif how == "tokens":
        cuts = _token_cuts(rationale)
    elif how == "whitespace":
        cuts = _word_cuts(rationale)
    else:
        raise ValueError(f"segmentation is {how!r}; use lines, sentences, code_lines, tokens or whitespace")
    return _pieces(rationale, cuts)


def _pieces(text: str, cuts: list[int]) -> list[str]:
    """`text` cut at `cuts`; pieces without a visible character join their neighbour."""
    pieces: list[str] = []
    start = 0
    for cut in [*cuts, len(text)]:
        piece = text[start:cut]
        start = cut
        if not piece:
            continue
        if pieces and (piece.isspace() or pieces[-1].isspace()):
            pieces[-1] += piece
        else:
            pieces.append(piece)
    return pieces


def _line_cuts(text: str) -> list[int]:
    cuts = []
    position = text.find("\n")
    while position >= 0:
        cuts.append(position + 1)
        position = text.find("\n", position + 1)
    return cuts


_CODE_MARK = re.compile(r'"""|\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*|\\\n|[\[\](){}]|\n')


def _code_cuts(text: str) -> list[int]:
    """Line ends outside brackets, triple-quoted strings and continued lines: the ends of logical lines."""
    cuts = []
    depth, position = 0, 0
    while match := _CODE_MARK.search(text, position):
        mark, position = match.group(), match.end()
        if mark in ('"""', "'''"):
            end = text.find(mark, position)
            position = len(text) if end < 0 else end + 3
        elif mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth = max(depth - 1, 0)
        elif mark == "\n" and depth == 0:
            cuts.append(position)
    return cuts


def _word_cuts(text: str) -> list[int]:
    """Where words start: after the last newline of a gap, else before the gap. Never between the parts of a number."""
    cuts = (_cut_of_gap(text, *gap.span()) for gap in _WORD_GAP.finditer(text))
    return [cut for cut in cuts if cut is not None]


def _cut_of_gap(text: str, start: int, end: int) -> int | None:
    if start == 0 or end == len(text):
        return None
    if end - start > 1 or text[start] == "\n":
        newline = text.rfind("\n", start, end)
        if newline >= 0:
            return newline + 1
    return None if _one_number(text[start - 1], text[end]) else start


def _one_number(before: str, after: str) -> bool:
    """Whether the characters around a gap belong to one number: `10 000`, `2 1/2`, `5 %`, `$ 5`, `- 5`."""
    return (before.isdigit() and (after.isdigit() or after in "%‰°")) or (before in "$€£¥" and after.isdigit())


def _sentence_cuts(text: str) -> list[int]:
    cuts = set(_line_cuts(text))
    for match in _SENTENCE_END.finditer(text):
        if not _ABBREVIATION.search(text[max(0, match.start() - 12) : match.start() + 1]):
            cuts.add(match.end())
    return sorted(cuts)


def _token_cuts(text: str) -> list[int]:
    """Word starts nearest to equal shares of the estimated tokens; every word start where words are few."""
    if len(text) < 2 * TOKEN_STEPS * _HALF_A_WORD * 2:
        cuts = _word_cuts(text)
        if len(cuts) < 2 * TOKEN_STEPS:
            return cuts
    starts = [token.start() for token in _TOKEN.finditer(text)]
    cuts: list[int] = []
    last = 0
    for step in range(1, TOKEN_STEPS if starts else 0):
        position = max(starts[step * len(starts) // TOKEN_STEPS] - _HALF_A_WORD, last)
        while gap := _WORD_GAP.search(text, position):
            cut, position = _cut_of_gap(text, *gap.span()), gap.end()
            if cut is not None:
                if cut > last:
                    cuts.append(cut)
                    last = cut
                break
    return cuts
