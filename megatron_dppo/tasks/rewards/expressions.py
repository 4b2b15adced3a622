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

from megatron_dppo.tasks.rewards.quantity import Number, number, rounds

_LARGEST = 50_000
"""Decimal digits of a power that is still evaluated: 9^{9^{9^9}} would fill the memory."""
_COUNTING = frozenset("nkmjN")
_UNREAD = re.compile(r"(?<![\w\\])\d+\s+\d|\.\.\.|[?'\"]|!!|_\s*$|\^\s*$")
"""What the parser would read as something else: it drops 5' to 5."""
_DERIVATIVE = re.compile(r"(\\[a-zA-Z]+)|([a-zA-Z])('|\")(?! ?[(_^\d'\"])")
"""Of a name: `y'` is one name, of its own; what `f'(x)` is the parser cannot say."""


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


def same_equation(one: tuple[str, str], other: tuple[str, str], sign: str, other_sign: str) -> bool:
    """Whether `left sign right` says the same twice: the differences of the sides are a constant multiple of each
    other, positive for inequalities, which a negative one turns round."""
    turned = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
    try:
        first, second = _parsed(one[0]) - _parsed(one[1]), _parsed(other[0]) - _parsed(other[1])
        ratios = _quotients(first, second)
    except (Unreadable, TypeError):
        return False
    if not ratios or not first.free_symbols or ratios[0] == 0 or not all(_close(one, ratios[0]) for one in ratios):
        return False
    if sign == other_sign and sign not in turned:
        return True
    return bool(ratios[0].is_real) and other_sign == (sign if ratios[0] > 0 else turned.get(sign))


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
    text = _DERIVATIVE.sub(lambda found: found[0] if found[1] else f"{found[2]}_{{9{ord(found[3])}}}", text)
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
