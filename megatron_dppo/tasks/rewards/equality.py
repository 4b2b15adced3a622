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

from megatron_dppo.tasks.rewards.canonical import canonical, depth, enclosed, split_top, trimmed
from megatron_dppo.tasks.rewards.expressions import rounded, same_equation, same_expression, same_solutions
from megatron_dppo.tasks.rewards.final_answer import boxed_answer
from megatron_dppo.tasks.rewards.notations import (
    dates,
    families,
    residues,
    same_constant,
    several_options,
    times,
    whole,
    yes_or_no,
)
from megatron_dppo.tasks.rewards.quantity import based, number, quantity, same_number
from megatron_dppo.tasks.rewards.structure import (
    MATRIX,
    NAME,
    assignment,
    bracketed,
    is_system,
    lines,
    pieces,
    rows,
    sides_of,
    solutions,
)
from megatron_dppo.tasks.rewards.words import angles, is_words, words

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
_CONSTANT = re.compile(r"\\(?:frac|sqrt|cdot|times|pi|binom)(?![a-zA-Z])")
_UNKNOWN = re.compile(r"[^a-zA-Z\\_'°%¤€£]*([kntuxyz])(?:[^a-zA-Z\\_'°%¤€£]|\1)*")
"""One unknown among signs and digits. `m + n`, `\\sin x`, `AB^2` or `\\pi r^2` is what a question asks for, `2x` is not
(or seldom, then 0 is on the safe side)."""
_CUPS = re.compile(r"\\cup(?![a-zA-Z])")
_COLONS = re.compile(r"\s*:\s*")
_MEMBER = re.compile(r"^[^\\{}()\[\]<>=;]{1,12}\\in(?![a-zA-Z])\s*(.+)$", re.DOTALL)
_CHOICE = re.compile(r"\(?([A-J])\)?[.:)]?")
_CHOSEN = re.compile(r"(?:\(([A-J])\)|([A-J])[.:)]|([A-Ja-j])$)\s*(?P<rest>.*)", re.DOTALL)
_PROSE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,} [a-zA-Z]{2,}")
_OPTION_AND_VALUE = re.compile(r"\(([A-J])\)\s*(.+)", re.DOTALL)
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")


def equal(reference: str, answer: str, *, precision: int = 6) -> bool:
    """Whether `answer` is worth the point. Raises what sympy raises on answers that nobody foresaw; bounded in time
    but for sympy."""
    expected = readable(reference)
    if expected is None or len(answer) > LONGEST or depth(answer) > _DEEPEST:
        return False
    expected, given = families(expected, whole(canonical(answer)))
    return _same(expected, same_constant(expected, given), precision)


def readable(reference: str) -> str | None:
    """The canonical answer in a reference, None where there is none that an answer could equal."""
    text = reference_text(reference)
    if len(text) > LONGEST:
        return None
    text = whole(canonical(text))
    return text if re.search(r"\w", text) and depth(text) <= _DEEPEST else None


def reference_text(reference: str) -> str:
    """The answer in a reference: the last box of a worked solution, what follows GSM8K's "####", or all of it."""
    if "\\boxed" in reference or "\\fbox" in reference:
        return boxed_answer(reference) or reference
    return reference.rsplit("####", 1)[-1].strip()


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
    """C, (C) and `(C) 24` choose C; a second option beside it, or another value than the option's, chooses none."""
    both = _OPTION_AND_VALUE.fullmatch(reference)
    letter = _CHOICE.fullmatch(reference) or both
    if letter is None:
        return None
    chosen = _CHOSEN.fullmatch(answer)
    if chosen is not None and not (chosen["rest"] and (re.search(r"\([A-J]\)|\b[A-J][.:)]", chosen["rest"]))):
        value, rest = trimmed(both[2]) if both else "", trimmed(chosen["rest"])
        reason = any(map(_PROSE.search, (value, rest))) or is_words(value) != is_words(rest)
        another = value and rest and not reason and not _same(value, rest, precision)
        return (chosen[1] or chosen[2] or chosen[3]).upper() == letter[1] and not another
    return _same(trimmed(both[2]), answer, precision) if both else None


def _numbers(reference: str, answer: str, precision: int) -> bool | None:
    one, other = (
        # A decimal comma, where the other side has a point; three digits after it would be thousands.
        number(text) or (number(text.replace(",", ".")) if _DECIMAL_COMMA.fullmatch(text) and "." in beside else None)
        for text, beside in ((reference, answer), (answer, reference))
    )
    return same_number(one, other, precision) if one is not None and other is not None else None


def _digits(reference: str, answer: str, precision: int) -> bool | None:
    """Digits in a base. The base may be left out; digits are not converted, the question asked for this base."""
    one, other = based(reference), based(answer)
    if one is None and other is None:
        return None
    digits, base = one or (reference.casefold(), None)
    answered, other_base = other or (re.sub(r"\s", "", answer).casefold(), None)
    return digits == answered and (base is None or other_base is None or base == other_base)


def _piecewise(reference: str, answer: str, precision: int) -> bool | None:
    """Every value with its condition, in any order. The condition of a single value may be left out."""
    one, other = ([] if is_words(text.split(" if ")[0]) else pieces(text) for text in (reference, answer))
    if not one and not other:
        return None
    if max(len(one), len(other)) == 1 and not (one and other):
        return _same(one[0][0] if one else reference, other[0][0] if other else answer, precision)
    alike = [[_same(x[1], y[1], precision) and _same(x[0], y[0], precision) for y in other] for x in one]
    return len(one) == len(other) and all(map(any, alike)) and all(map(any, zip(*alike, strict=True)))


def _matrices(reference: str, answer: str, precision: int) -> bool | None:
    one, other = MATRIX.fullmatch(reference), MATRIX.fullmatch(answer)
    if one is None or other is None or is_system(one) or is_system(other):
        return None  # a scalar before it, a sum of matrices, a list of equations
    tables = [[row.split("&") for row in rows(found["body"])] for found in (one, other)]
    shapes = [
        ([len(row) for row in table], found["kind"][0] in "vV")
        for table, found in zip(tables, (one, other), strict=True)
    ]
    cells = [[trimmed(cell) for row in table for cell in row] for table in tables]
    return shapes[0] == shapes[1] and _each(cells[0], cells[1], precision)


def _intervals_and_tuples(reference: str, answer: str, precision: int) -> bool | None:
    """Same brackets, same length, same order."""
    one, other = bracketed(reference), bracketed(answer)
    if (one is None and other is None) or re.search(r"\\[pm][mp](?![a-z])", reference + answer):
        return None
    if one is not None and other is not None:
        return one[0] == other[0] and one[2] == other[2] and _each(one[1], other[1], precision)
    values, text = (one[1], answer) if one else (other[1] if other else [], reference)
    pairs = [pair for part in _parts(text) if (pair := assignment(part))]
    if len(dict(pairs)) == len(values) == len(pairs):  # (x, y) = (1, 2) and x = 1, y = 2 are (1, 2)
        named = [value for _, value in pairs]
        return _each(values, named, precision) if one else _each(named, values, precision)
    return None if len(sides_of(text)) > 1 or len(_parts(text)) > 1 or _CUPS.search(text) else False


def _each(one: Sequence[str], other: Sequence[str], precision: int) -> bool:
    return len(one) == len(other) and all(_same(x, y, precision) for x, y in zip(one, other, strict=True))


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
    if text.startswith("\\{") and enclosed(text) and "\\emptyset" not in text:
        text, separators = text[2:-2], _COMMAS
    if (whole := MATRIX.fullmatch(text)) and is_system(whole):
        return lines(whole["body"])
    signed = [text]
    if "\\pm" in text or "\\mp" in text:  # the upper signs of all of it belong together, and the lower
        signed = [text.replace("\\pm", plus).replace("\\mp", minus) for plus, minus in (("+", "-"), ("-", "+"))]
    parts = [one for text in signed for part in split_top(text, separators) for one in split_top(part, _CUPS)]
    parts = [trimmed(part).lstrip("+ ") for part in parts if trimmed(part)]
    sides = sides_of(parts[0]) if len(parts) == 1 else []
    names, values = (bracketed(sides[0]), bracketed(sides[2])) if len(sides) == 3 and sides[1] == "=" else (None, None)
    if names and values and len(names[1]) == len(values[1]):
        return [f"{name}={value}" for name, value in zip(names[1], values[1], strict=True)]
    return solutions(parts)


def _set(one: Sequence[str], other: Sequence[str], precision: int) -> bool:
    """Every part of one has its like in the other, and the other way round. Bare values for several names are in the
    order of the names: `x = 1, y = 2` is `1, 2` and not `2, 1`."""
    if max(len(one), len(other)) > _MOST_PARTS or not one or not other:
        return False
    pairs = [pair for pair in map(assignment, one) if pair]
    letters = {name.split("_")[0] for name, _ in pairs}
    if len(letters) > 1 and len(pairs) == len(one) and all(len(sides_of(y)) == 1 for y in other):
        return _each([value for _, value in pairs], other, precision)
    labels = [[_label(part) for part in parts] for parts in (one, other)]
    free = set(labels[0]) != set(labels[1])  # else 3 boys and 5 girls are not 5 boys and 3 girls
    alike = [
        [
            (free or label == other_label) and _same(x, y, precision)
            for y, other_label in zip(other, labels[1], strict=True)
        ]
        for x, label in zip(one, labels[0], strict=True)
    ]
    return all(any(row) for row in alike) and all(any(column) for column in zip(*alike, strict=True))


def _label(part: str) -> str:
    """The words at its end, found from there: from every word on it would take the square of the length."""
    found = re.match(r"(?:[a-zA-Z]+ )*[a-zA-Z]{3,}(?![\\a-zA-Z])", part[::-1])
    return found[0][::-1].casefold() if found else ""


def _relations(reference: str, answer: str, precision: int) -> bool | None:
    """Equations and inequalities. `x = 5` is 5, a chain of equations is worth its end, and `1/6 \\approx 0.167` what
    stands before the approximation; two equations are the same if one is a multiple of the other."""
    one, other = sides_of(reference), sides_of(answer)
    if len(one) == len(other) == 1:
        return None
    exact, other_exact = _exact(one), _exact(other)
    if exact != one or other_exact != other:
        if _same(" ".join(exact), " ".join(other_exact), precision):
            return True
        # A reference that is itself rounded, and an answer that gives both.
        literal, rounded = number(reference), number(other[-1])
        given = literal is not None and literal.digits is not None and literal == rounded
        return given and number(other_exact[-1]) != rounded and _same(other_exact[-1], other[-1], 1)
    if all(sign in ("=", "\\approx") for sign in one[1::2] + other[1::2]):
        vector = MATRIX.fullmatch(one[0])
        unknowns = re.split(r"\s*(?:&|\\\\)\s*", vector["body"].strip()) if vector else one[:1]
        named = len(one) > 1 and all(map(NAME.fullmatch, unknowns))
        if len(one) == 1:
            if NAME.fullmatch(other[-1]) and not NAME.fullmatch(reference):  # 5 = x
                other = other[::-1]
            true = all(_true(side, other[-1], precision, first=not at) for at, side in enumerate(other[:-1:2]))
            return true and _same(reference, other[-1], precision)
        if len(other) == 1:
            return named and _same(one[-1], answer, precision)
        if named and NAME.fullmatch(other[0]):
            name = [re.sub(r"\s", "", sides[0]) for sides in (one, other)]
            bare = [
                re.sub(r"_.*", "", one).casefold() if "_" not in name[0] or "_" not in name[1] else one for one in name
            ]
            if bare[0] == bare[1] or ("(" in name[0]) != ("(" in name[1]):  # x_1 and x; f(x) = ..., y = ...
                return _same(one[-1], other[-1], precision)
        return len(one) == len(other) == 3 and same_equation(one, other)
    if len(one) == len(other) == 3:
        return same_equation(one, other)
    return one[1::2] == other[1::2] and _each(one[::2], other[::2], precision)


def _true(side: str, value: str, precision: int, *, first: bool) -> bool:
    """False for what no value follows from: a constant of another value (5 + 5 = 12), an equation that is not solved
    (2x = 10). A decimal may be the constant rounded; an integer not, for 1/2 = 1 and 1/3 = 0 are false."""
    bare = _CONSTANT.sub("", side)
    unknown = first and not NAME.fullmatch(side) and side != "|z|" and _UNKNOWN.fullmatch(bare)
    if not side or (not unknown and re.search("[a-zA-Z]", bare)) or _same(side, value, precision):
        return True
    unit = quantity(value)
    decimal = number(unit.value if unit else value)
    if unknown or decimal is None or decimal.digits is None:
        return False
    percent = unit is not None and unit.dimension == "%"
    return rounded(side, decimal) or (percent and rounded(side, decimal.times(Fraction(1, 100))))


def _exact(sides: list[str]) -> list[str]:
    """The sides before an approximation, all of them where a mere name stands there."""
    at = sides.index("\\approx") if "\\approx" in sides else 0
    named = at == 1 and sides[0] != "\\pi" and (NAME.fullmatch(sides[0]) or is_words(sides[0]) or not sides[0])
    return sides if at == 0 or named else sides[:at]


def _membership(reference: str, answer: str, precision: int) -> bool | None:
    one, other = _MEMBER.match(reference), _MEMBER.match(answer)
    if one is None and other is None:
        return None
    return _same(trimmed(one[1]) if one else reference, trimmed(other[1]) if other else answer, precision)


def _ratios(reference: str, answer: str, precision: int) -> bool | None:
    """a:b:c and times of day, term by term; a ratio of two terms is also a fraction."""
    one, other = ([trimmed(term) for term in split_top(text, _COLONS)] for text in (reference, answer))
    if len(one) == len(other):
        return None if len(one) == 1 else _each(one, other, precision)
    fraction = {len(one), len(other)} == {1, 2} and re.search(r"/|\\frac", reference + answer)
    return bool(fraction) and _same("/".join(one), "/".join(other), precision)


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
            converted = scale != other_scale and "" not in dimensions
            return same_number(numbers[0].times(scale), numbers[1].times(other_scale), precision, converted=converted)
        if scale == other_scale:
            return _same(left, right, precision)
        return same_expression(f"({left})*({scale})", f"({right})*({other_scale})", precision)

    if one and other and one.dimension != other.dimension and (None not in dimensions or "%" in dimensions):
        return False
    if dimensions.count("%") == 1:
        plain = number(reference if one is None else answer)
        below_one = one is None and plain is not None and abs(plain.value) < 1
        hundred = Fraction(100)
        return (alike(other_scale=hundred) if one else alike(hundred)) or (not below_one and alike())
    if "\\pi" in left + right and "angle" in dimensions and None in (one, other):
        radians = [f"{text}°" if q else text for q, text in ((one, left), (other, right))]
        return same_expression(radians[0], radians[1], precision) or alike()
    if factors[0] != factors[1] and (None not in dimensions or "" in dimensions):
        return alike(*factors)
    return alike()


# fmt: off
_RULES: tuple[Rule, ...] = (
    _choice, several_options, _numbers, dates, times, residues, _digits, _piecewise, yes_or_no,
    _matrices, _membership, same_solutions, _intervals_and_tuples, _lists, _relations, _ratios, _quantities, words,
    angles, same_expression,
)
# fmt: on
