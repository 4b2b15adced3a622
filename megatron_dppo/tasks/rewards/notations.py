"""Answers in a notation of their own: times, dates, residues, options, yes and no, and what is written in parts.

The rules have the form of those in `equality`; `whole` brings to one expression what is written in two.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise
from math import gcd

from megatron_dppo.tasks.rewards.quantity import number, quantity

_PART = re.compile(r" ?(?:and )?(\d+(?:/\d+)?) ?(°|¤|[A-Za-z]+)\.?")
_INTEGERS = re.compile(
    r"(?<![ ,;(])[ ,;(]*(?<!\\)(?<![a-zA-Z])(?:(?:where|for|with|all|any|some|every|integers?|\\forall) ?)*"
    r"(?P<name>[a-z]) ?(?:\\in ?(?:\\math[a-z]+ ?)?\{? ?Z ?\}?|is (?:an|any) integer)[\s)]*$"
)
_INEQUALITY = re.compile(r"[<>]|\\[lg]e(?![a-z])")
_DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}/\d{1,2}/\d{2,4}|\d{1,2}[-.]\d{1,2}[-.]\d{4}")
_TIME = re.compile(r"(\d{1,2}) ?: ?([0-5]\d)(?: ?: ?([0-5]\d))?(?: ?([ap])\.? ?m\.?)?", re.IGNORECASE)
_INTEGER = re.compile(r"[-+]?\d+")
_RESIDUE = re.compile(r"(?:[a-zA-Z] ?\\equiv ?)?([-+]?\d+) ?[({]? ?\\?[pb]?mod(?![a-z]) ?\{? ?(\d+)[\s})]*")
_CLASS = re.compile(r"(?:[a-zA-Z] ?= ?)?(?:(?P<r>\d+) ?\+ ?)?(?P<n>\d+) ?[a-z] ?(?P<s>[-+] ?\d+)?")
_MARKED = re.compile(r"(\d+(?:\.\d+)?) ?(['\"])")
_OPTIONS = re.compile(r"[A-J]{2,10}")
_VERDICTS = {"yes": True, "no": False, "true": True, "false": False}
_CLAUSES = re.compile(r"\s*(?:[,.;:()]|\b(?:or|but)\b)\s*")
_ABOUT = re.compile(
    r"(?:(?:and|also|maybe|perhaps|actually|it|that|this|the|statement|claim|final|answer|is|rather)\b\s*)*"
)
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_FREE = re.compile(r"[cC](?= ?_ ?\{? ?\d)|[cC](?= ?e ?\^)|(?:^|=) ?[cC](?= ?[-+])|[-+] ?[cC](?= ?$)")
"""Where a constant stands: `c_1`, `c e^x`, `c - x`, `x + c`."""
_BETWEEN_OPTIONS = re.compile(r"(?:[\s,;&()]|\band\b)+")


def whole(text: str) -> str:
    """`8 ft 6 in`, falling units of one dimension, as their sum `17/2 ft`; any other text as it is."""
    marks = ("arcmin", "arcsec") if "°" in text else ("ft", "in")
    spelled = text.replace("'", f" {marks[0]} ").replace('"', f" {marks[1]}")
    at, total, units = 0, Fraction(0), []
    while part := _PART.match(spelled, at):
        unit, value = quantity(f"1 {part[2]}"), number(part[1])
        if unit is None or not unit.dimension or value is None:
            return text
        units.append((unit.dimension, unit.factor, part[2]))
        total, at = total + value.value * unit.factor, part.end()
    falling = all(a[0] == b[0] and a[1] > b[1] for a, b in pairwise(units))
    if len(units) < 2 or not falling or spelled[at:].strip():
        return text
    return f"{total / units[0][1]} {units[0][2]}"


def families(reference: str, answer: str) -> tuple[str, str]:
    """`n\\pi, n \\in \\mathbb{Z}` without its condition, and one name for its integer in both. An answer that leaves
    the condition out has one of k, l, m, n for it; where the reference has none, the name says something."""
    (values, name), (answered, other) = _family(reference), _family(answer)
    free = set(re.findall("[k-n]", _COMMAND.sub("", answer)))
    other = other or (free.pop() if name and len(free) == 1 else "")
    if not name or not other:
        return values, answered
    return _renamed(values, name), _renamed(answered, other)


def _family(text: str) -> tuple[str, str]:
    found = _INTEGERS.search(text)
    if found is None or not found.start() or _INEQUALITY.search(text):
        return text, ""
    values, name = text[: found.start()], found["name"]
    return (values, name) if _renamed(values, name) != values and not re.match(rf"{name}\s*=", values) else (text, "")


def _renamed(text: str, name: str) -> str:
    """With a name that nobody writes."""
    return re.sub(rf"(?<![\\a-zA-Z]){name}(?![a-zA-Z])", r"\\varsigma ", text)


def same_constant(reference: str, answer: str) -> str:
    """`answer` with `x^2 + C` for `x^2 + c` where the reference has it: the constant of an integral or of a
    differential equation. Beside a b it may be the third of a, b, c: then C is 0, to be on the safe side."""
    one, other = (
        _COMMAND.sub(lambda found: " " * len(found[0]) if found[0] != r"\theta" else "t".ljust(6), text)
        for text in (reference, answer)
    )
    kinds = [set(re.findall("[cC]", text)) for text in (one, other)]
    constants = [list(_FREE.finditer(text)) for text in (one, other)]
    if len(kinds[0]) != 1 or len(kinds[1]) != 1 or kinds[0] == kinds[1] or re.search("[bB]", one + other):
        return answer
    if any(
        len(re.findall("[cC]", t)) != len(c) or not re.search("[t-z]", t)
        for t, c in zip((one, other), constants, strict=True)
    ):
        return answer
    letter = kinds[0].pop()
    for found in constants[1]:
        answer = answer[: found.end() - 1] + letter + answer[found.end() :]
    return answer


def dates(reference: str, answer: str, precision: int) -> bool | None:
    if not (_DATE.fullmatch(reference) or _DATE.fullmatch(answer)):
        return None
    fields = [re.findall(r"\d+", text) for text in (reference, answer) if _DATE.fullmatch(text)]
    return len(fields) == 2 and [int(one) for one in fields[0]] == [int(one) for one in fields[1]]


def times(reference: str, answer: str, precision: int) -> bool | None:
    """14:30 is 2:30 p.m.; `a.m.` and `p.m.` may be left out. A ratio would be in lowest terms."""
    one, other = _TIME.fullmatch(reference), _TIME.fullmatch(answer)
    if one is None:
        return None
    if other is None:
        return False if ":" not in answer and gcd(int(one[1]), int(one[2])) > 1 else None
    (hour, *fields, half), (other_hour, *other_fields, other_half) = _clock(one), _clock(other)
    if fields != other_fields:
        return False
    if hour == other_hour:
        return not (half and other_half and half != other_half)
    of_day = other_hour if half else hour
    return bool(half) != bool(other_half) and not 1 <= of_day <= 12 and _of_day(one) == _of_day(other)


def feet_or_minutes(reference: str, answer: str, precision: int) -> bool | None:
    """`6'` is 6 ft beside a length and 6 minutes of arc beside an angle, and never 6; `"` accordingly."""
    for marked, plain in ((reference, answer), (answer, reference)):
        found, other = _MARKED.fullmatch(marked), quantity(plain)
        factors = (
            {"m": ("381/1250", "127/5000"), "angle": ("1/60", "1/3600")}.get(other.dimension or "") if other else None
        )
        value = number(other.value) if other else None
        if found and other and factors and value:
            return Fraction(found[1]) * Fraction(factors[found[2] == '"']) == value.value * other.factor
    return None


def _clock(found: re.Match[str]) -> tuple[int, int, int, str]:
    return int(found[1]), int(found[2]), int(found[3] or 0), (found[4] or "").lower()


def _of_day(found: re.Match[str]) -> int:
    hour, _, _, half = _clock(found)
    return hour % 12 + 12 * (half == "p") if half else hour


def residues(reference: str, answer: str, precision: int) -> bool | None:
    """`3 \\pmod 7` is 3, `10 \\pmod 7` and `7k + 3`."""
    one, other = _RESIDUE.fullmatch(reference), _RESIDUE.fullmatch(answer)
    if one is None:
        if other is None or not _INTEGER.fullmatch(reference) or int(other[2]) == 0:
            return None
        if re.search(r"pmod|\(", other[0]):  # a class, else the operation
            return int(reference) == int(other[1]) and abs(int(reference)) < int(other[2])
        return int(reference) == int(other[1]) % int(other[2])
    if _INTEGER.fullmatch(answer):  # reduced, or the negative of the class
        same = abs(int(answer)) < int(one[2]) and (int(answer) - int(one[1])) % int(one[2]) == 0
        return same or int(answer) == int(one[1])
    if other is None and (found := _CLASS.fullmatch(answer)):
        value, modulus = re.sub(r"\s", "", found["r"] or found["s"] or "0"), found["n"]
    elif other is not None:
        value, modulus = other.groups()
    else:
        return False
    return int(modulus) == int(one[2]) > 0 and (int(value) - int(one[1])) % int(modulus) == 0


def several_options(reference: str, answer: str, precision: int) -> bool | None:
    """`A, C and D` for ACD, in any order."""
    letters = [letter for letter in _BETWEEN_OPTIONS.split(answer) if letter]
    if not _OPTIONS.fullmatch(reference) or len(letters) < 2 or any(len(letter) != 1 for letter in letters):
        return None
    return sorted(reference) == sorted(letters)


def yes_or_no(reference: str, answer: str, precision: int) -> bool | None:
    """The word that an answer begins with, where a comma or a full stop parts it from a reason."""
    if reference.casefold() not in _VERDICTS:
        return None
    if answer.casefold() in _VERDICTS:
        return reference.casefold() == answer.casefold()
    first, *reasons = _CLAUSES.split(answer.casefold())
    if not reasons or first not in _VERDICTS:
        return None
    positive = {_VERDICTS[verdict] for reason in reasons if (verdict := _ABOUT.sub("", reason, 1).strip()) in _VERDICTS}
    return first == reference.casefold() and positive <= {_VERDICTS[first]}  # not "Yes, no"
