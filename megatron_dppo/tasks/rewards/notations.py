"""Answers in a notation of their own: times, dates, residues, options, yes and no, and what is written in parts.

The rules have the form of those in `equality`; `whole` brings to one expression what is written in two.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime, time
from fractions import Fraction
from itertools import pairwise
from math import gcd

import regex

from megatron_dppo.tasks.rewards.quantity import number, quantity

_PART = re.compile(r" ?(?:and )?(\d+(?:/\d+)?) ?(°|¤|[A-Za-z]+)\.?")
_INTEGERS = re.compile(
    r"(?<![ ,;(])[ ,;(]*(?<!\\)(?<![a-zA-Z])(?:(?:where|for|with|all|any|some|every|integers?|\\forall) ?)*"
    r"(?P<name>[a-z]) ?(?:\\in ?(?:\\math[a-z]+ ?)?\{? ?Z ?\}?|is (?:an|any) integer)[\s)]*$"
)
_INEQUALITY = re.compile(r"[<>]|\\[lg]e(?![a-z])")
_DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}/\d{1,2}/\d{2,4}|\d{1,2}[-.]\d{1,2}[-.]\d{4}")
_INTEGER = re.compile(r"[-+]?\d+")
_RESIDUE = re.compile(
    r"(?:[a-zA-Z] ?\\equiv ?)?(?P<value>[-+]?\d+) ?[({]? ?\\?[pb]?mod(?![a-z]) ?\{? ?(?P<modulus>\d+)[\s})]*"
)
_CLASS = regex.compile(
    r"(?:[a-zA-Z] ?= ?)?"
    r"(?:(?:(?P<value>\d+) ?\+ ?)?(?P<modulus>\d+) ?[a-z]|(?P<modulus>\d+) ?[a-z] ?(?P<value>[-+] ?\d+))"
)
_OPTIONS = re.compile(r"[A-J]{2,10}")
_VERDICTS = {"yes": True, "no": False, "true": True, "false": False}
_CLAUSES = re.compile(r"\s*(?:[,.;:()]|\b(?:or|but)\b)\s*")
_ABOUT = re.compile(
    r"(?:(?:and|also|maybe|perhaps|actually|it|that|this|the|statement|claim|final|answer|is|rather)\b\s*)*"
)
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_FREE = re.compile(r"(?<![\\a-zA-Z])[cC](?= ?_ ?\{? ?\d| ?e ?\^)|(?:^|=) ?[cC](?= ?[-+])|[-+] ?[cC](?= ?$)")
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
    bare = [_COMMAND.sub(" ", text.replace(r"\theta", " t")) for text in (reference, answer)]
    letters = [re.findall("[bBcC]", text) for text in bare]
    free = [
        len(_FREE.findall(t)) == len(found) and re.search("[t-z]", t) for t, found in zip(bare, letters, strict=True)
    ]
    if all(free) and sorted(map(set, letters), key=str) == [{"C"}, {"c"}]:
        return _FREE.sub(lambda found: found[0].swapcase(), answer)
    return answer


def dates(reference: str, answer: str, precision: int) -> bool | None:
    found = [_DATE.fullmatch(text) for text in (reference, answer)]
    if not any(found):
        return None
    fields = [[int(field) for field in re.findall(r"\d+", text)] for text in (reference, answer)]
    return all(found) and fields[0] == fields[1]


def times(reference: str, answer: str, precision: int) -> bool | None:
    """14:30 is 2:30 p.m.; `a.m.` and `p.m.` may be left out. A ratio would be in lowest terms."""
    one, other = _clock(reference), _clock(answer)
    if one is None or other is None:
        ratio = one is None or ":" in answer or gcd(*(int(term) for term in re.findall(r"\d+", reference)[:2])) == 1
        return None if ratio else False
    if one == other or one[1] == other[1]:
        return one == other
    (half, _), (plain, _) = sorted((one, other), key=lambda clock: not clock[1])
    same_half = 1 <= plain.hour <= 12 and plain.replace(hour=plain.hour % 12) == half.replace(hour=half.hour % 12)
    return plain == half or same_half


def _clock(text: str) -> tuple[time, bool] | None:
    """The time of day, and whether it says which half."""
    text = re.sub(r"[ .]", "", text)
    for form in () if re.search(r":\d(?!\d)", text) else ("%H:%M", "%H:%M:%S", "%I:%M%p", "%I:%M:%S%p"):
        with suppress(ValueError):
            return datetime.strptime(text, form).time(), "%p" in form
    return None


def residues(reference: str, answer: str, precision: int) -> bool | None:
    """`3 \\pmod 7` is 3, `10 \\pmod 7` and `7k + 3`."""
    one, other = _RESIDUE.fullmatch(reference), _RESIDUE.fullmatch(answer)
    if one is None:
        if other is None or not _INTEGER.fullmatch(reference) or int(other["modulus"]) == 0:
            return None
        value, modulus = int(other["value"]), int(other["modulus"])
        operation = not re.search(r"pmod|\(", other[0])  # else a class
        return int(reference) == (value % modulus if operation else value) and abs(int(reference)) < modulus
    value, modulus = int(one["value"]), int(one["modulus"])
    if _INTEGER.fullmatch(answer):  # reduced, or the negative of the class
        given = int(answer)
        return given == value or (abs(given) < modulus and (given - value) % modulus == 0)
    found = other or _CLASS.fullmatch(answer)
    if found is None or int(found["modulus"]) != modulus or modulus == 0:
        return False
    return (int((found["value"] or "0").replace(" ", "")) - value) % modulus == 0


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
