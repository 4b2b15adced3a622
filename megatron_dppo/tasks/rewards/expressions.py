"""Equality of two expressions, parsed by math-verify's LaTeX parser.

Decimals are made fractions before, so that every value is exact. Two expressions are the same if their quotient is 1:
to 40 digits, and where it has names at fixed points, integers for names that count (n, k, m). Formulas of the kind that
people write do not agree on them all by chance. Relative, never in decimal places: 1/2004! is not 1/2006!. sympy's own
`equals` takes seconds for what it cannot prove, such as that (x + 1)^5000 is not (x + 2)^5000.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import Any

from megatron_dppo.tasks.rewards.canonical import split_top
from megatron_dppo.tasks.rewards.quantity import Number, number, rounds

_LARGEST = 50_000
"""Decimal digits of a power that is still evaluated: 9^{9^{9^9}} would fill the memory."""
_COUNTING = frozenset("nkmjN")
_UNREAD = re.compile(r"(?<![\w\\])\d+\s+\d|\.\.\.|[?'\"]|!!|_\s*$|\^\s*$")
"""What the parser would read as something else: it drops 5' to 5."""
_DERIVATIVE = re.compile(r"(\\[a-zA-Z]+)|([a-z])('|\")(?! ?[(_^\d'\"])")
"""`y'` is a name of its own; what `f'(x)` is the parser cannot say."""
_BOUND = re.compile(r"[<>]|\\(?:[lg]e|ne|setminus)(?![a-z])")
_OR = re.compile(r"\s*(?:(?<![a-zA-Z])or(?![a-zA-Z])|\\lor(?![a-z])|\\cup(?![a-z]))\s*")
_AND = re.compile(r"\s*(?:,? ?(?<![a-zA-Z])and(?![a-zA-Z])|,|\\land(?![a-z]))\s*")


class Unreadable(Exception):
    """No expression, or one that is too large to evaluate."""


def same_expression(one: str, other: str, precision: int) -> bool:
    """Whether two canonical texts are the same expression; False where one is none."""
    try:
        first, second = _parsed(one), _parsed(other)
        if _equal(first, second):
            return True
        for decimal, exact in ((number(one), second), (number(other), first)):
            if decimal is not None and (decimal.digits or 0) >= precision:
                asked_for = exact is first and _value(first).is_Integer  # an integer is not met by a decimal
                return not asked_for and _rounds(exact, decimal)
        return False
    except Unreadable:
        return False


def same_equation(one: list[str], other: list[str]) -> bool:
    """Whether `[left, sign, right]` say the same: the differences of the sides are a constant multiple of each other,
    positive for `<` and `\\le`."""
    try:
        first, second = (_parsed(left) - _parsed(right) for left, _, right in (one, other))
        ratios = _quotients(first, second)
    except (Unreadable, TypeError):
        return False
    if one[1] != other[1] or not ratios or not first.free_symbols or ratios[0] == 0:
        return False
    either = one[1] in ("=", "\\ne") or (ratios[0].is_real and ratios[0] > 0)
    return bool(either) and all(_close(ratio, ratios[0]) for ratio in ratios)


def same_solutions(one: str, other: str, precision: int) -> bool | None:
    """Whether bounds of a name (`x > 1, x < 3`, `x \\ne 2`), intervals and complements leave the same numbers; None
    where one is something else, or there are intervals alone."""
    if not _BOUND.search(one + other) or not (first := _solutions(one)) or not (second := _solutions(other)):
        return None
    return len(first[1] | second[1]) < 2 and _equal(first[0], second[0])


@functools.lru_cache(maxsize=4096)
def _solutions(text: str) -> tuple[Any, frozenset[str]] | None:
    """The set and its name, if it has one. Bounds between commas hold together if they can."""
    import sympy

    alternatives, names = [], frozenset[str]()
    for alternative in split_top(text, _OR):
        sets = []
        for part in split_top(alternative, _AND):
            try:
                parsed = _parsed(part.strip(" ,"))
            except Unreadable:
                return None
            bounds = [_bounded(one) for one in (parsed.args if isinstance(parsed, sympy.And) else (parsed,))]
            if None in bounds:
                return None
            sets.append(sympy.Intersection(*bounds))
            names |= {str(name) for name in parsed.free_symbols}
        together = sympy.Intersection(*sets)
        alternatives.append(sympy.Union(*sets) if together is sympy.S.EmptySet else together)
    return sympy.Union(*alternatives), names


def _bounded(parsed: Any) -> Any:
    """What `x < 3` leaves; a set is itself; None of anything else."""
    import sympy

    if isinstance(parsed, sympy.Set):
        return None if isinstance(parsed, sympy.FiniteSet) else parsed
    if not isinstance(parsed, sympy.Rel) or len(parsed.free_symbols) != 1:
        return None
    parsed = parsed if parsed.lhs.is_Symbol else parsed.reversed
    if not parsed.lhs.is_Symbol or not parsed.rhs.is_extended_real:
        return None
    below, above = sympy.Interval.open(-sympy.oo, parsed.rhs), sympy.Interval.open(parsed.rhs, sympy.oo)
    closed = {"<=": sympy.Interval(-sympy.oo, parsed.rhs), ">=": sympy.Interval(parsed.rhs, sympy.oo)}
    return (closed | {"<": below, ">": above, "!=": sympy.Union(below, above)}).get(parsed.rel_op)


def rounded(exact: str, decimal: Number) -> bool:
    """Whether the constant `exact` is `decimal` when it is rounded to its last digit or cut off after it."""
    try:
        return _rounds(_parsed(exact), decimal)
    except Unreadable:
        return False


@functools.lru_cache(maxsize=4096)  # all samples of a prompt share their reference
def _parsed(text: str) -> Any:
    """The sympy object that `text` spells."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy

    literal = number(text)
    if literal is not None:
        return sympy.Rational(literal.value)
    text = _DERIVATIVE.sub(lambda found: found[1] or f"{found[2]}_{{9{ord(found[3])}}}", text)
    if len(text) > 1000 or text.count("{") != text.count("}") or _UNREAD.search(text):
        raise Unreadable(text)
    text = re.sub(r"\^\s*\{?\s*T\s*\}?(?![a-zA-Z])", r"^{\\tau}", text)  # the parser drops a transposition
    text = re.sub(r"(\d+)\s*°", r"(\1\\cdot\\frac{\\pi}{180})", text)
    text = re.sub(
        r"\d*\.\d+", lambda found: "{{\\frac{{{}}}{{{}}}}}".format(*Fraction(found[0]).as_integer_ratio()), text
    )
    spelling = NormalizationConfig(units=False, nits=False, boxed="none", basic_latex=True, malformed_operators=True)
    try:
        parsed = sympy.sympify(
            latex2sympy(text, None, True, False, spelling, ConversionConfig(lowercase_symbols=False))
        )
    except Exception as error:  # the parser raises many kinds
        raise Unreadable(text) from error
    if not isinstance(parsed, sympy.Basic):
        raise Unreadable(text)
    return parsed.xreplace({one: sympy.I for one in parsed.free_symbols if one.name == "i"})


def _equal(one: Any, other: Any) -> bool:
    import sympy

    if _digits(one) > _LARGEST or _digits(other) > _LARGEST:
        raise Unreadable(str(type(one)))
    one, other = one.doit(), other.doit()
    if isinstance(one, sympy.MatrixBase) and isinstance(other, sympy.MatrixBase):
        return one.shape == other.shape and all(map(_equal, one, other))
    if any(side.is_Matrix or not isinstance(side, sympy.Expr) for side in (one, other)):
        return bool(one == other)
    if one == other:
        return one not in (sympy.nan, sympy.zoo)
    ratios = _quotients(one, other)
    return len(ratios) > 0 and all(_close(ratio, 1) for ratio in ratios)


def _quotients(one: Any, other: Any) -> list[Any]:
    """`one / other` at fixed points, those left out where it has no value. Of three names one is negative at times."""
    import sympy

    quotient = one / other
    names = sorted(quotient.free_symbols, key=str)
    values = []
    for number_ in range(4 if names else 1):
        point = {}
        for place, name in enumerate(names):
            size = sympy.Integer(7 + 4 * place + 3 * number_)
            third = size / (-3 if number_ and (number_ + place) % 3 == 0 else 3)
            point[name] = size if str(name) in _COUNTING else third
        values.append(_value(quotient.subs(point)))
    return [value for value in values if value.is_finite and all(part.is_Number for part in value.as_real_imag())]


def _close(one: Any, other: Any) -> bool:
    return bool(one == other if one.is_Rational else abs(one / other - 1) < 1e-38)


def _rounds(exact: Any, decimal: Number) -> bool:
    value = _value(exact)
    return bool(value.is_real and value.is_number and rounds(value, decimal))


def _value(constant: Any) -> Any:
    """To 50 digits; itself where it has names."""
    import sympy

    if constant.is_Matrix or not isinstance(constant, sympy.Expr) or _digits(constant) > _LARGEST:
        raise Unreadable(str(type(constant)))
    whole = constant.doit()
    return whole if whole.is_Rational else whole.evalf(50)


def _digits(expression: Any) -> float:
    """A bound on the decimal digits that evaluating needs."""
    import sympy

    worst = max(map(_digits, expression.args), default=0.0)
    if expression.is_Integer:
        return expression.p.bit_length() * 0.302
    if worst > _LARGEST or not isinstance(expression, sympy.Pow | sympy.factorial | sympy.binomial):
        return worst
    values = [abs(one.evalf(5)) for one in expression.args]
    sizes = [value if value.is_Number else 2 for value in values]
    if not isinstance(expression, sympy.Pow):
        return max(worst, 4 * float(sizes[0]))
    return max(worst, float(sympy.log(max(sizes[0], 2), 10).evalf(5) * sizes[1]))
