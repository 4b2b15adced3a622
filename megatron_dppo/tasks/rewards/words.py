"""Answers that are words or names, and no products of letters. The rules have the form of those in `equality`."""

from __future__ import annotations

import re

_ANGLE = re.compile(r"(?:m\s*)?\\(?:angle|widehat)\s*\{?\s*([A-Z]{3})\s*\}?")
_OPERATORS = frozenset("+*/^_=<>|!\\{}()[]")
_FUNCTIONS = re.compile(r"\b(?:sin|cos|tan|cot|sec|csc|log|ln|exp|gcd|lcm|max|min|mod|det|lim|arc\w+)\b")


def is_words(text: str) -> bool:
    """Whether a canonical answer is to be read as words: letters are no variables that are multiplied."""
    if not re.search(r"[a-zA-Z]{2}", text) or _FUNCTIONS.search(text):
        return False
    letters = re.fullmatch(r"[a-zA-Z]+", text)
    if letters:
        return len(text) >= 3
    return not (_OPERATORS & set(re.sub(r"\([^()]*\)", "", text))) and bool(re.search(r"[a-zA-Z]{3}|^[a-zA-Z]+ ", text))


def words(reference: str, answer: str, precision: int) -> bool | None:
    """Without regard to case and punctuation; never as products of letters."""
    if not is_words(reference) and not is_words(answer):
        return None
    return _plain(reference) == _plain(answer) != ""


def _plain(text: str) -> str:
    text = re.sub(
        r"(?<=\w)\.(?=\w|$|\s)|(?<=[a-z])'(?=[a-z])|(?<=\b[A-Z])'(?=[A-Z][a-z])|^(?:[Aa]n?|[Tt]he) (?=\w\w)", "", text
    )
    return " ".join(re.sub(r"[^\w']+", " ", text.casefold()).split())


def angles(reference: str, answer: str, precision: int) -> bool | None:
    """Named from either side; the vertex stays in the middle."""
    one, other = _ANGLE.fullmatch(reference), _ANGLE.fullmatch(answer)
    return None if one is None or other is None else other[1] in (one[1], one[1][::-1])
