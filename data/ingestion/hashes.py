"""Content hashes of rows, and a set of them that takes 12 to 24 bytes an entry."""

import hashlib
import unicodedata
from array import array


def question_key(question: str) -> str:
    """A question without what does not make it another one: case, white space and Unicode composition (our choice)."""
    folded = question.casefold()
    return " ".join((folded if folded.isascii() else unicodedata.normalize("NFC", folded)).split())


def hash64(*parts: str) -> int:
    """The first 64 bits of the SHA-256 of `parts`, never 0. Two of 10 million rows share one with probability 3e-6."""
    digest = hashlib.sha256("\x1f".join(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") or 1


def item_id(question: str, response: str) -> str:
    """128 bits of the SHA-256 of a demonstration's question and response, in hexadecimal."""
    return hashlib.sha256(f"{question}\x1f{response}".encode()).hexdigest()[:32]


class HashSet:
    """64-bit hashes in an open-addressing table at most two thirds full. A Python set takes 70 bytes an entry."""

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 * 1024))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, value: int) -> bool:
        """Adds `value` (never 0) and returns whether it was new."""
        if not _insert(self._table, value):
            return False
        self._count += 1
        if 3 * self._count > 2 * len(self._table):
            old = self._table
            self._table = array("Q", bytes(8 * 2 * len(old)))
            for entry in old:
                if entry:
                    _insert(self._table, entry)
        return True


def _insert(table: array, value: int) -> bool:
    mask = len(table) - 1
    place = value & mask
    while entry := table[place]:
        if entry == value:
            return False
        place = (place + 1) & mask
    table[place] = value
    return True
