"""When an answer is the reference.

Both are brought to one spelling (`canonical`) and compared by the rules in `_RULES`, in that order. A rule looks at
both sides; it decides, or says that it is about something else. Composite answers (lists, tuples, matrices, relations)
are taken apart and their parts compared by the same rules, so that 0.5 in a tuple is the same as in a sum.
What no rule before it decides is compared as an expression by `expressions`, with math-verify's parser.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from megatron_dppo.tasks.rewards.canonical import canonical, depth, matching, split_top, trimmed
from megatron_dppo.tasks.rewards.expressions import same_equation, same_expression
from megatron_dppo.tasks.rewards.final_answer import boxed_answer
from megatron_dppo.tasks.rewards.quantity import number, quantity, same_number
from megatron_dppo.tasks.rewards.structure import MATRIX, NAME, bracketed, interval, lines, rows, sides_of

LONGEST = 4000
"""Characters of an answer; what is longer is none."""
_MOST_PARTS = 64
_DEEPEST = 30
"""Brackets in brackets."""

_COMMAS = re.compile(
    r"\s*(?:[,;]\s*(?:(?:and|or)(?![a-zA-Z]))?|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])|&|\\lor(?![a-z])|\\land(?![a-z]))\s*"
)
_SEPARATORS = re.compile(rf"(?!(?<=\d),\d{{3}}(?!\d))(?:{_COMMAS.pattern})")
"""The same, without the comma of 1,234."""
_SPACE = re.compile(r"(?<![0-9a-zA-Z])\s+|\s+(?![0-9a-zA-Z])|(?<=\d)\s+(?=[a-zA-Z])")
"""Blanks that say nothing."""
_CUPS = re.compile(r"\\cup(?![a-zA-Z])")
_COLONS = re.compile(r"\s*:\s*")
_MEMBER = re.compile(r"^[^\\{}()\[\]]{1,12}\\in(?![a-zA-Z])\s*(.+)$", re.DOTALL)
_CHOICE = re.compile(r"\(?([A-J])\)?[.:)]?")
_CHOSEN = re.compile(r"(?:\(([A-J])\)|([A-J])[.:)]|([A-Ja-j])$)\s*(?P<rest>.*)", re.DOTALL)
_OPTION_AND_VALUE = re.compile(r"\(([A-J])\)\s*(.+)", re.DOTALL)
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
_DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}/\d{1,2}/\d{2,4}|\d{1,2}[-.]\d{1,2}[-.]\d{4}")
_BASED = re.compile(r"\(?([0-9][0-9A-Za-z]*|[A-F][0-9A-F]*)\)?\s*_\s*(?:\{\s*(\w{1,7})\s*\}|(\d{1,2}))")
_BASES = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "sixteen": 16,
}
_OPERATORS = frozenset("+*/^_=<>|!\\{}()[]")
_FUNCTIONS = re.compile(r"\b(?:sin|cos|tan|cot|sec|csc|log|ln|exp|gcd|lcm|max|min|mod|det|lim|arc\w+)\b")


def equal(reference: str, answer: str, *, precision: int = 6) -> bool:
    """Whether `answer` is worth the point. Raises what sympy raises on answers that nobody foresaw; bounded in time
    but for sympy."""
    expected = readable(reference)
    if expected is None or len(answer) > LONGEST or depth(answer) > _DEEPEST:
        return False
    return _same(expected, canonical(answer), precision)


def readable(reference: str) -> str | None:
    """The canonical answer in a reference, None where there is none that an answer could equal."""
    text = reference_text(reference)
    if len(text) > LONGEST:
        return None
    text = canonical(text)
    return text if re.search(r"\w", text) and depth(text) <= _DEEPEST else None


def reference_text(reference: str) -> str:
    """The answer in a reference: the last box of a worked solution, what follows GSM8K's "####", or all of it."""
    if "\\boxed" in reference or "\\fbox" in reference:
        return boxed_answer(reference) or reference
    return reference.rsplit("####", 1)[-1].strip()


def is_words(text: str) -> bool:
    """Whether a canonical answer is to be read as words: letters are no variables that are multiplied."""
    if not re.search(r"[a-zA-Z]{2}", text) or _FUNCTIONS.search(text):
        return False
    letters = re.fullmatch(r"[a-zA-Z]+", text)
    if letters:
        return len(text) >= 3
    return not (_OPERATORS & set(re.sub(r"\([^()]*\)", "", text))) and bool(re.search(r"[a-zA-Z]{3}|^[a-zA-Z]+ ", text))


def _same(reference: str, answer: str, precision: int) -> bool:
    if not reference or not answer:
        return False
    if _SPACE.sub("", reference) == _SPACE.sub("", answer):
        return True
    for rule in _RULES:
        verdict = rule(reference, answer, precision)
        if verdict is not None:
            return verdict
    return False


Rule = Callable[[str, str, int], bool | None]


def _choice(reference: str, answer: str, precision: int) -> bool | None:
    """C, (C) and `(C) 24` choose C; a second option beside it chooses nothing."""
    both = _OPTION_AND_VALUE.fullmatch(reference)
    letter = _CHOICE.fullmatch(reference) or both
    if letter is None:
        return None
    chosen = _CHOSEN.fullmatch(answer)
    if chosen is not None and not (chosen["rest"] and (re.search(r"\([A-J]\)|\b[A-J][.:)]", chosen["rest"]))):
        return (chosen[1] or chosen[2] or chosen[3]).upper() == letter[1]
    return _same(trimmed(both[2]), answer, precision) if both else None


def _numbers(reference: str, answer: str, precision: int) -> bool | None:
    one, other = number(reference), number(answer)
    # A decimal comma, where the other side has a point; three digits after it would be thousands.
    if one is not None and other is None and _DECIMAL_COMMA.fullmatch(answer) and "." in reference:
        other = number(answer.replace(",", "."))
    elif one is None and other is not None and _DECIMAL_COMMA.fullmatch(reference) and "." in answer:
        one = number(reference.replace(",", "."))
    return same_number(one, other, precision) if one is not None and other is not None else None


def _dates(reference: str, answer: str, precision: int) -> bool | None:
    if not (_DATE.fullmatch(reference) or _DATE.fullmatch(answer)):
        return None
    fields = [re.findall(r"\d+", text) for text in (reference, answer) if _DATE.fullmatch(text)]
    return len(fields) == 2 and [int(one) for one in fields[0]] == [int(one) for one in fields[1]]


def _digits(reference: str, answer: str, precision: int) -> bool | None:
    """Digits in a base. The base may be left out; digits are not converted, the question asked for this base."""
    one, other = _based(reference), _based(answer)
    if one is None and other is None:
        return None
    digits, base = one or (reference.casefold(), None)
    answered, other_base = other or (re.sub(r"\s", "", answer).casefold(), None)
    return digits == answered and (base is None or other_base is None or base == other_base)


def _based(text: str) -> tuple[str, int] | None:
    found = _BASED.fullmatch(text)
    if found is None:
        return None
    name = found[2] or found[3]
    base = int(name) if name.isdecimal() else _BASES.get(name, 0)
    if not 2 <= base <= 36 or any(int(sign, 36) >= base for sign in found[1]):
        return None
    return found[1].casefold(), base


def _matrices(reference: str, answer: str, precision: int) -> bool | None:
    one, other = MATRIX.fullmatch(reference), MATRIX.fullmatch(answer)
    if one is None and other is None:
        return None
    if one is not None and one["kind"] in ("cases", "aligned", "align", "gathered"):
        return _set(lines(one["body"]), _parts(answer) if other is None else lines(other["body"]), precision)
    if one is None or other is None:
        return None  # a scalar before it, or a sum of matrices
    cells, others = rows(one["body"]), rows(other["body"])
    shapes = [[len(row) for row in cells], [len(row) for row in others]]
    if shapes[0] != shapes[1] or (one["kind"][0] in "vV") != (other["kind"][0] in "vV"):
        return False
    return all(
        _same(x, y, precision)
        for row, other_row in zip(cells, others, strict=True)
        for x, y in zip(row, other_row, strict=True)
    )


def _intervals_and_tuples(reference: str, answer: str, precision: int) -> bool | None:
    """Same brackets, same length, same order."""
    one, other = bracketed(reference), bracketed(answer)
    if one is None and other is None:
        return None
    if one is not None and other is None:
        assigned = [sides_of(part) for part in _parts(answer)]
        if len(assigned) == len(one[1]) and all(len(sides) == 3 and sides[1] == "=" for sides in assigned):
            return all(_same(x, sides[2], precision) for x, sides in zip(one[1], assigned, strict=True))  # x = 1, y = 2
    if one is None or other is None:
        text = answer if one is not None else reference
        as_interval = interval(text)
        if as_interval is not None:
            one, other = one or as_interval, other or as_interval
        elif len(sides_of(text)) > 1 or len(_parts(text)) > 1 or _CUPS.search(text):
            return None
    if one is None or other is None:
        return False
    alike = one[0] == other[0] and one[2] == other[2] and len(one[1]) == len(other[1])
    return alike and all(_same(x, y, precision) for x, y in zip(one[1], other[1], strict=True))


def _lists(reference: str, answer: str, precision: int) -> bool | None:
    """Parts in any order: `1, 2`, `1 and 2`, `\\{1, 2\\}`, `\\pm 2`, unions of intervals."""
    tried = None
    for separators in (_SEPARATORS, _COMMAS):
        one, other = _parts(reference, separators), _parts(answer, separators)
        if len(one) == len(other) == 1 and (
            "\\{" not in reference + answer or (one == [reference] and other == [answer])
        ):
            return None
        if (one, other) != tried and _set(one, other, precision):
            return True
        tried = one, other
    return False


def _parts(text: str, separators: re.Pattern[str] | None = None) -> list[str]:
    separators = separators or _SEPARATORS
    if text.startswith("\\{") and matching(text, 1) == len(text) - 1:
        text, separators = text[2:-2], _COMMAS
    sides = sides_of(text)
    if len(sides) == 3 and sides[1] == "=" and (names := bracketed(sides[0])) and (values := bracketed(sides[2])):
        return [f"{name}={value}" for name, value in zip(names[1], values[1], strict=False)]
    parts = [one for part in split_top(text, separators) for one in split_top(part, _CUPS)]
    signed = []
    for part in parts:
        if "\\pm" in part or "\\mp" in part:
            signed += [re.sub(r"\\pm", plus, re.sub(r"\\mp", minus, part)) for plus, minus in (("+", "-"), ("-", "+"))]
        else:
            signed.append(part)
    return [trimmed(part).lstrip("+ ") for part in signed if trimmed(part)]


def _set(one: Sequence[str], other: Sequence[str], precision: int) -> bool:
    """Every part of one has its like in the other, and the other way round."""
    if max(len(one), len(other)) > _MOST_PARTS or not one or not other:
        return False
    alike = [[_same(x, y, precision) for y in other] for x in one]
    return all(any(row) for row in alike) and all(any(column) for column in zip(*alike, strict=True))


def _relations(reference: str, answer: str, precision: int) -> bool | None:
    """Equations and inequalities. `x = 5` is 5, a chain of equations is worth its end; two equations are the same if
    one is a multiple of the other."""
    one, other = sides_of(reference), sides_of(answer)
    if len(one) == len(other) == 1:
        return None
    if all(sign in ("=", "\\approx") for sign in one[1::2] + other[1::2]):
        named = len(one) > 1 and NAME.fullmatch(one[0]) is not None
        if len(one) == 1:
            return _same(reference, other[-1], precision)
        if len(other) == 1:
            return named and _same(one[-1], answer, precision)
        if named and NAME.fullmatch(other[0]):
            name = [re.sub(r"\s", "", sides[0]) for sides in (one, other)]
            function = any("(" in text for text in name)
            if name[0] == name[1] or function:
                return _same(one[-1], other[-1], precision)
        return len(one) == len(other) == 3 and same_equation((one[0], one[2]), (other[0], other[2]), "=", "=")
    if len(one) == 1 or len(other) == 1:
        return False
    expected, answered = interval(reference), interval(answer)
    if expected is not None and answered is not None:
        names = [{side for side in sides[::2] if NAME.fullmatch(side)} for sides in (one, other)]
        same = expected[0] == answered[0] and expected[2] == answered[2] and names[0] == names[1]
        return same and all(_same(x, y, precision) for x, y in zip(expected[1], answered[1], strict=True))
    if len(one) == len(other) == 3:
        return same_equation((one[0], one[2]), (other[0], other[2]), one[1], other[1])
    return (
        len(one) == len(other)
        and one[1::2] == other[1::2]
        and all(_same(x, y, precision) for x, y in zip(one[::2], other[::2], strict=True))
    )


def _membership(reference: str, answer: str, precision: int) -> bool | None:
    one, other = _MEMBER.match(reference), _MEMBER.match(answer)
    if one is None and other is None:
        return None
    return _same(trimmed(one[1]) if one else reference, trimmed(other[1]) if other else answer, precision)


def _ratios(reference: str, answer: str, precision: int) -> bool | None:
    """a:b:c and times of day, term by term; a ratio of two terms is also a fraction."""
    one, other = split_top(reference, _COLONS), split_top(answer, _COLONS)
    if len(one) == len(other) == 1:
        return None
    if 1 in (len(one), len(other)) and len(one) + len(other) == 3:
        as_fraction = ["/".join(terms) if len(terms) == 2 else terms[0] for terms in (one, other)]
        if "/" in reference + answer or "\\frac" in reference + answer:
            return _same(as_fraction[0], as_fraction[1], precision)
        return False
    return len(one) == len(other) and all(
        _same(trimmed(x), trimmed(y), precision) for x, y in zip(one, other, strict=True)
    )


def _quantities(reference: str, answer: str, precision: int) -> bool | None:
    """Values with units. A unit may be left out, another one is wrong unless it converts; `p%` is p or p/100."""
    one, other = quantity(reference), quantity(answer)
    if one is None and other is None:
        return None

    left, right = (one.value if one else reference), (other.value if other else answer)
    dimensions = [q.dimension if q else None for q in (one, other)]
    factors = [q.factor if q else Fraction(1) for q in (one, other)]

    def alike(scale: Fraction = Fraction(1), other_scale: Fraction = Fraction(1)) -> bool:
        numbers = number(left), number(right)
        if numbers[0] is not None and numbers[1] is not None:
            return same_number(numbers[0].times(scale), numbers[1].times(other_scale), precision)
        if scale == other_scale:
            return _same(left, right, precision)
        return same_expression(f"({left})*({scale})", f"({right})*({other_scale})", precision)

    if "%" in dimensions:
        if dimensions == ["%", "%"]:
            return alike()
        if any(q is not None and q.dimension != "%" for q in (one, other)):
            return False
        plain = number(reference if one is None else answer)
        below_one = one is None and plain is not None and abs(plain.value) < 1
        hundred = Fraction(100)
        return (alike(other_scale=hundred) if one else alike(hundred)) or (not below_one and alike())
    if None not in dimensions and dimensions[0] != dimensions[1]:
        return False
    if "\\pi" in left + right and "angle" in dimensions and None in (one, other):
        radians = [f"{text}°" if q else text for q, text in ((one, left), (other, right))]
        return same_expression(radians[0], radians[1], precision) or alike()
    if factors[0] != factors[1] and (None not in dimensions or "" in dimensions):
        return alike(*factors)
    return alike()


def _words(reference: str, answer: str, precision: int) -> bool | None:
    """Without regard to case and punctuation; never as products of letters."""
    if not is_words(reference) and not is_words(answer):
        return None
    return _plain(reference) == _plain(answer) != ""


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[^\w]+", " ", re.sub(r"(?<=\w)\.(?=\w|$|\s)|'", "", text.casefold())).split())


def _expressions(reference: str, answer: str, precision: int) -> bool | None:
    return same_expression(reference, answer, precision)


# fmt: off
_RULES: tuple[Rule, ...] = (
    _choice, _numbers, _dates, _digits, _matrices, _membership, _intervals_and_tuples, _lists, _relations, _ratios,
    _quantities, _words, _expressions,
)
# fmt: on
