"""Equality of two expressions, parsed by math-verify's LaTeX parser.

Decimals are made fractions before, so that every value is exact. Constants are compared to 40 significant digits,
expressions with variables at fixed points, integers for names that count (n, k, m): two different formulas of the kind
that people write do not agree on them all. Relative, never in decimal places: 1/2004! is not 1/2006!.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import Any

from megatron_dppo.tasks.rewards.quantity import Number, number

_DIGITS = 50
_AGREE = Fraction(1, 10**38)
_LARGEST = 50_000
"""Decimal digits of a power that is still evaluated: 9^{9^{9^9}} would fill the memory."""
_COUNTING = frozenset("nkmjN")
_POINTS = ((7, 3), (13, 5), (-11, 7), (29, 8), (-17, 19))
_WHOLE_POINTS = (3, 4, 7, 10, 21)


_UNREAD = re.compile(r"(?<![\w\\])\d+\s+\d|\.\.\.|[?'\"]|!!|_\s*$|\^\s*$")
"""What the parser would read as something else: it drops 5' to 5."""


_DERIVATIVE = re.compile(r"(\\[a-zA-Z]+)|([a-zA-Z])('|\")(?! ?[(_^\d'\"])")
"""Of a name: `y'` is one name, of its own; what `f'(x)` is the parser cannot say."""


class Unreadable(Exception):
    """No expression, or one that is too large to evaluate."""


def same_expression(one: str, other: str, precision: int) -> bool:
    """Whether two canonical texts are the same expression; False where one is none."""
    try:
        return _equal(_parsed(one), _parsed(other)) or _rounds(one, other, precision)
    except Unreadable:
        return False


def same_equation(one: tuple[str, str], other: tuple[str, str], sign: str, other_sign: str) -> bool:
    """Whether `left sign right` says the same twice: the differences of the sides are a constant multiple of each
    other, positive for inequalities, which a negative one turns round."""
    turned = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
    try:
        first = _parsed(one[0]) - _parsed(one[1])
        second = _parsed(other[0]) - _parsed(other[1])
        ratios = [a / b for a, b in _values(first, second) if b != 0]
    except (Unreadable, TypeError):
        return False
    if len(ratios) < 2 or any(not _close(ratio, ratios[0]) for ratio in ratios) or ratios[0] == 0:
        return False
    if sign == other_sign and sign not in turned:
        return True
    return bool(ratios[0].is_real) and other_sign == (sign if ratios[0] > 0 else turned.get(sign))


@functools.lru_cache(maxsize=4096)  # all samples of a prompt share their reference
def _parsed(text: str) -> Any:
    """The sympy object that `text` spells."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy, normalize_latex

    literal = number(text)
    if literal is not None:
        return sympy.Rational(literal.value.numerator, literal.value.denominator)
    text = _DERIVATIVE.sub(lambda found: found[0] if found[1] else f"{found[2]}_{{9{ord(found[3])}}}", text)
    if len(text) > 1000 or not _balanced(text) or _UNREAD.search(text):
        raise Unreadable(text)
    text = re.sub(r"\^\s*\{?\s*T\s*\}?(?![a-zA-Z])", r"^{\\tau}", text)  # the parser drops a transposition
    text = re.sub(r"(\d+)\s*°", r"(\1\\cdot\\frac{\\pi}{180})", text)
    text = re.sub(r"\d*\.\d+", lambda found: _as_fraction(found[0]), text)
    config = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
    )
    try:
        parsed = latex2sympy(
            normalize_latex(text, config), is_real=True, convert_degrees=False, normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )  # fmt: skip
    except Exception as error:  # the parser raises many kinds
        raise Unreadable(text) from error
    if isinstance(parsed, sympy.Basic):
        parsed = parsed.xreplace({one: sympy.I for one in parsed.free_symbols if one.name == "i"})
    return parsed


def _as_fraction(decimal: str) -> str:
    literal = number(decimal)
    assert literal is not None  # the pattern is a decimal's
    return f"{{\\frac{{{literal.value.numerator}}}{{{literal.value.denominator}}}}}"


def _balanced(text: str) -> bool:
    return text.count("{") == text.count("}") and len(re.findall(r"[(\[{]", text)) <= 100


def _equal(one: Any, other: Any) -> bool:
    import sympy

    if isinstance(one, sympy.MatrixBase | sympy.MatrixExpr) or isinstance(other, sympy.MatrixBase | sympy.MatrixExpr):
        one, other = (m.doit() if hasattr(m, "doit") else m for m in (one, other))
        if not (isinstance(one, sympy.MatrixBase) and isinstance(other, sympy.MatrixBase) and one.shape == other.shape):
            return False
        return all(_equal(x, y) for x, y in zip(one, other, strict=True))
    if isinstance(one, sympy.Set) and isinstance(other, sympy.Set):
        return bool(one.doit() == other.doit())
    if not (isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)):
        return bool(one == other)
    if one == other and one not in (sympy.nan, sympy.zoo):
        return True
    if one.is_Rational and other.is_Rational:
        return False
    pairs = list(_values(one, other))
    return len(pairs) > 0 and all(_close(a, b) for a, b in pairs)


def rounded(exact: str, decimal: Number) -> bool:
    """Whether the constant `exact` is `decimal` when it is rounded to its last digit or cut off after it."""
    try:
        value = _number(_parsed(exact))
    except (Unreadable, AttributeError):  # a tuple has no value
        return False
    if value is None or not value.is_real or value * decimal.value.numerator < 0:
        return False
    over = (abs(value) - abs(_parsed(str(decimal.value)))) / _parsed(str(decimal.place))
    return bool(-0.5 <= over < 1)


def _rounds(one: str, other: str, precision: int) -> bool:
    """A decimal of enough digits that rounds or cuts off a constant: 1.414213 and \\sqrt{2}."""
    for decimal, exact in ((one, other), (other, one)):  # the reference comes first
        literal = number(decimal)
        if literal is not None and literal.digits is not None and literal.digits >= precision:
            value = _number(_parsed(exact))
            if exact == one and value is not None and value.is_Integer:
                return False
            if value is not None and value.is_real:
                return bool(abs(value - _parsed(decimal)) < float(literal.place))
    return False


def _values(one: Any, other: Any) -> Any:
    """Pairs of values at the same points, those left out where one of them has none."""
    names = sorted(one.free_symbols | other.free_symbols, key=str)
    if not names:
        points: list[dict[Any, Any]] = [{}]
    else:
        points = [_point(names, number_) for number_ in range(len(_POINTS))]
    for point in points:
        a, b = _number(one.subs(point)), _number(other.subs(point))
        if (a is None) != (b is None) and names == []:
            return
        if a is not None and b is not None:
            yield a, b


def _point(names: list[Any], number_: int) -> dict[Any, Any]:
    import sympy

    point = {}
    for place, name in enumerate(names):
        if str(name) in _COUNTING:
            point[name] = sympy.Integer(_WHOLE_POINTS[number_] + 2 * place)
        else:
            above, below = _POINTS[(number_ + place) % len(_POINTS)]
            point[name] = sympy.Rational(above + 4 * place, below)
    return point


def _number(expression: Any) -> Any:
    """Its value to many digits, None where it has none."""
    import sympy

    if _digits(expression) > _LARGEST:
        raise Unreadable(str(type(expression)))
    if expression.is_Rational:
        return expression
    whole = expression.doit()
    if whole.is_Rational:
        return whole
    value = whole.evalf(_DIGITS)
    return (
        value if value.is_number and value.is_finite and not value.has(sympy.nan, sympy.zoo, sympy.Function) else None
    )


def _digits(expression: Any) -> float:
    """A bound on the decimal digits that evaluating needs."""
    import sympy

    worst = max((_digits(argument) for argument in expression.args), default=0.0)
    if worst > _LARGEST:
        return worst
    if isinstance(expression, sympy.Pow):
        base, exponent = expression.args
        power = abs(exponent.evalf(5)) if exponent.is_number else 0
        size = max(abs(base.evalf(5)), 2) if base.is_number else 2
        if not (power.is_number if hasattr(power, "is_number") else True):
            return worst
        return max(worst, float(sympy.log(size, 10).evalf(5) * power)) if power else worst
    if isinstance(expression, sympy.factorial | sympy.binomial) and expression.args[0].is_number:
        many = abs(expression.args[0].evalf(5))
        return max(worst, float(many) * 4)
    if expression.is_Integer:
        return expression.p.bit_length() * 0.302
    return worst


def _close(a: Any, b: Any) -> bool:
    if a.is_Rational and b.is_Rational:
        return bool(a == b)
    size = max(abs(a), abs(b))
    return bool(size == 0 or abs(a - b) / size < float(_AGREE))
