"""Numbers as they are written, and the units beside them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

_MOST_DIGITS = 4000
"""Python reads no longer integers."""
_MOST_EXPONENT = 4000

_PLAIN = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<whole>[1-9]\d{0,2}(?:(?:[,\s]\d{3})+|(?:\.\d{3}){2,})|\d+)?(?:\.(?P<part>\d+))?"
)
_POWER = re.compile(r"\s*(?:(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{?\s*(?P<a>[-+]?\d+)\s*\}?|[eE](?P<b>[-+]?\d+))")
_FRACTION = re.compile(r"(?:\\frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))|(\d+)\s*/\s*(-?\d+))")
_REPEATING = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<whole>\d+)\.(?P<fixed>\d*)(?:\\(?:overline|bar|dot)\s*\{?(?P<a>\d+)\}?|\((?P<b>\d+)\))"
)

_BASED = re.compile(r"\(?([0-9][0-9A-Za-z]*|[A-F][0-9A-F]*)\)?\s*_\s*(?:\{\s*(\w{1,7})\s*\}|(\d{1,2}))")
_BASES = dict(zip("two three four five six seven eight nine ten sixteen".split(), [*range(2, 11), 16], strict=True))  # noqa: SIM905


@dataclass(frozen=True)
class Number:
    """An exact value, and how far a decimal may be from what it rounds."""

    value: Fraction
    digits: int | None = None
    """Significant digits of a decimal; None of an integer or a fraction."""
    place: Fraction = Fraction(0)
    """Worth of its last digit; of a repeating decimal, of the last digit of its first period."""

    def times(self, factor: Fraction) -> Number:
        return Number(self.value * factor, self.digits, self.place * factor)


def number(text: str) -> Number | None:
    """The number that `text` is, None where it is something else. Exact: 0.1 is a tenth."""
    text = text.strip()
    if not text or len(text) > _MOST_DIGITS or not any(sign.isdigit() for sign in text):
        return None
    return _decimal(text) or _mixed(text) or _repeating(text)


def _decimal(text: str) -> Number | None:
    found = _PLAIN.match(text)
    if found is None or (found["whole"] is None and found["part"] is None):
        return None
    exponent = 0
    if found.end() < len(text):
        power = _POWER.fullmatch(text, found.end())
        if power is None:
            return None
        exponent = int(power["a"] or power["b"])
        if abs(exponent) > _MOST_EXPONENT:
            return None
    whole, part = re.sub(r"[,.\s]", "", found["whole"] or ""), found["part"] or ""
    place = Fraction(10) ** (exponent - len(part))
    value = int(whole + part) * place * (-1 if found["sign"] == "-" else 1)
    return Number(value, len((whole + part).lstrip("0")), place) if part else Number(value)


def _mixed(text: str) -> Number | None:
    """`3/4`, `\\frac34`, `1 1/2`, `-1\\frac{1}{2}`."""
    found = re.match(r"([-+]?)\s*(?:(\d+)(?:\s+|(?=\\frac)))?", text)
    assert found is not None  # the pattern takes the empty string
    fraction = _FRACTION.fullmatch(text, found.end())
    if fraction is None:
        return None
    above, below = (int(one) for one in fraction.groups() if one is not None)
    if below == 0 or (found[2] and not 0 < above < below):
        return None
    value = int(found[2] or 0) + Fraction(above, below)
    return Number(-value if found[1] == "-" else value)


def _repeating(text: str) -> Number | None:
    found = _REPEATING.fullmatch(text)
    if found is None:
        return None
    fixed, period = found["fixed"], found["a"] or found["b"]
    nines = 10 ** len(period) - 1
    part = (int(fixed or 0) + Fraction(int(period), nines)) / 10 ** len(fixed)
    value = int(found["whole"]) + part
    return Number(-value if found["sign"] == "-" else value, None, Fraction(1, 10 ** (len(fixed) + len(period))))


def based(text: str) -> tuple[str, int] | None:
    """`204_5`, `(1A)_{16}` as digits and base; None where a digit is none of the base."""
    found = _BASED.fullmatch(text)
    if found is None:
        return None
    name = found[2] or found[3]
    base = int(name) if name.isdecimal() else _BASES.get(name, 0)
    if not 2 <= base <= 36 or any(int(sign, 36) >= base for sign in found[1]):
        return None
    return found[1].casefold(), base


def same_number(one: Number, other: Number, precision: int, *, converted: bool = False) -> bool:
    """Equal, or a decimal of at least `precision` significant digits that rounds or cuts off the other number. Where
    the reference `one` is an integer (and no unit was converted) only the integer is right; where it is a repeating
    decimal, one that stops after the first period has not repeated."""
    if one.value == other.value:
        return True
    if one.digits is None and ((one.value.denominator == 1 and not converted) or 0 < one.place <= other.place):
        return False
    decimals = [n for n in (one, other) if n.digits is not None and n.digits >= precision]
    if not decimals or (one.digits is not None and other.digits is not None and len(decimals) < 2):
        return False
    coarse = max(decimals, key=lambda decimal: decimal.place)
    return rounds(other.value if coarse is one else one.value, coarse)


def rounds(exact: Any, decimal: Number) -> bool:
    """Whether `decimal` is the real number `exact`, rounded to its last digit or cut off after it."""
    over = (abs(exact) - abs(decimal.value)) / decimal.place
    return bool(exact * decimal.value >= 0 and -0.5 <= over < 1)


_UNITS: dict[str, tuple[str, Fraction]] = {}
for _dimension, _line in (
    ("m", "m meter metre:1 cm centimeter centimetre:1/100 mm millimeter millimetre:1/1000 km kilometer kilometre:1000"),
    ("m", "in inch inche:127/5000 ft foot feet:381/1250 yd yard:1143/1250 mi mile:1609344/1000 "
     "nm nanometer:1/1000000000"),
    ("s", "s sec second:1 min minute:60 h hr hour:3600 day:86400 week:604800 ms millisecond:1/1000"),
    ("month", "month:1 yr year:12"),
    ("kg", "kg kilogram:1 g gram:1/1000 mg milligram:1/1000000 lb pound:45359237/100000000 "
     "oz ounce:45359237/1600000000"),
    ("L", "l L liter litre:1 ml mL milliliter millilitre:1/1000"),
    ("J", "J joule:1 kJ kilojoule:1000"), ("N", "N newton:1"), ("W", "W watt:1 kW kilowatt:1000"),
    ("V", "V volt:1"), ("A", "A amp ampere:1"), ("Hz", "Hz hertz:1"), ("Pa", "Pa pascal:1"), ("K", "K kelvin:1"),
    ("m/s", "mph:1397/3125 kmh kph kmph:5/18 fps:381/1250"),
    ("degC", "°C ℃ celsius °celsius:1"), ("degF", "°F ℉ fahrenheit °fahrenheit:1"), ("rad", "rad radian:1"),
    ("angle", "° deg degree:1 arcmin:1/60 arcsec:1/3600"),
    ("$", "¤ dollar USD usd buck:1 ¢ cent:1/100"), ("€", "€ euro EUR:1"), ("£", "£ GBP:1"), ("¥", "¥ yen yuan RMB:1"),
    ("₹", "₹ rupee Rs:1"), ("am", "am AM:1"), ("pm", "pm PM:1"),
    ("", "hundred:100 thousand:1000 million:1000000 billion:1000000000 trillion:1000000000000 dozen:12"),
    ("%", "% percent pct percentage:1"),
):  # fmt: skip
    for _group in re.findall(r"([^:]+):([\d/]+)\s*", _line):
        for _name in _group[0].split():
            _UNITS[_name] = (_dimension, Fraction(_group[1]))
_RELATING = frozenset(
    "or and not no more less fewer least most than at between to from about over under above below plus minus "  # noqa: SIM905
    "times only zero one two three four five six seven eight nine ten half double twice squared cubed remainder".split()
)
"""Words that are no unit: they change what the number says."""
_CURRENCY_FIRST = re.compile(r"([-+]?)\s*([¤€£¥₹])\s*(?=[\d.\\])")
_TRAILING = re.compile(
    r"(?P<value>.*[\d)}!]|.*\\(?:pi|infty))(?P<gap>\s*)"
    r"(?P<unit>%|[¢€£¥₹¤]|°\s*[CF]?|(?:[A-Za-z°(][A-Za-z0-9 ./^{}()°²³-]*))",
    re.DOTALL,
)


@dataclass(frozen=True)
class Quantity:
    """A value in text, and the unit beside it: `dimension` is None where the unit is a word that no table has
    (`apples`), and the value is to be multiplied by `factor`."""

    value: str
    dimension: str | None
    factor: Fraction


def quantity(text: str) -> Quantity | None:
    """`text` as a value with a unit, None where there is no unit."""
    first = _CURRENCY_FIRST.match(text)
    if first is not None:
        inner = quantity(first[1] + text[first.end() :])
        factor = inner.factor if inner is not None and inner.dimension == "" else Fraction(1)
        value = inner.value if inner is not None else first[1] + text[first.end() :]
        return Quantity(value, _UNITS[first[2]][0], factor)
    found = _TRAILING.fullmatch(text)
    if found is None or (
        found["unit"][0] == "°" and "\\" in found["value"] and number(found["value"]) is None
    ):  # \sin 15°
        return None
    dimension, factor = _unit(found["unit"].strip(), spaced=bool(found["gap"]))
    variables = re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", found["value"]))
    if factor == 0 or (variables and re.fullmatch("[a-zA-Z]", found["unit"])):  # h of \pi r^2 h is a height
        return None
    return Quantity(found["value"].strip().removesuffix("\\").strip(), dimension, factor)


def _unit(text: str, *, spaced: bool) -> tuple[str | None, Fraction]:
    """Dimension and factor; factor 0 where `text` is no unit."""
    nothing = (None, Fraction(0))
    text = text.replace(" per ", "/").replace("/ ", "/").replace("p.m", "pm").replace("a.m", "am").strip(". ")
    text = re.sub(r"°\s+|degrees? (?=celsius|fahrenheit)", "°", text, flags=re.IGNORECASE)
    words = re.findall(r"[A-Za-z]+", text)
    if words and words[0] in _UNITS and _UNITS[words[0]][0] == "" and len(words) > 1:
        dimension, factor = _unit(text[len(words[0]) :].strip(), spaced=True)
        return (
            (None, _UNITS[words[0]][1]) if dimension is None and factor else (dimension, factor * _UNITS[words[0]][1])
        )
    above = [_power(part) for part in text.split("/")]
    if all(part is not None for part in above) and (spaced or len(text) > 1 or not text.isalpha()):
        names, factor = [], Fraction(1)
        for number_, part in enumerate(above):
            assert part is not None
            names.append(part[0])
            factor = factor * part[1] if number_ == 0 else factor / part[1]
        return "/".join(names), factor
    if any(word.casefold() in _RELATING for word in words):
        return nothing
    if re.fullmatch(r"\([^()]*\)", text) and spaced and not re.search(r"\d", text):
        return None, Fraction(1)  # "9 (nine)"
    unknown = spaced and words and re.fullmatch(r"[A-Za-z /.-]+(?:\^\{?\d\}?)?", text)
    if unknown and len(words) <= 4 and max(map(len, words)) >= 3:
        return None, Fraction(1)
    return nothing


def _power(text: str) -> tuple[str, Fraction] | None:
    """`cm^2`, `square centimeters`, `cubic feet`, `sq ft`."""
    found = re.fullmatch(
        r"(?:(square|sq\.?|cubic|cu\.?)\s+)?(\S+?)(?:\s*\^\s*\{?\s*(\d)\s*\}?|\s+(squared|cubed))?", text.strip()
    )
    if found is None:
        return None
    name = found[2].rstrip(".")
    known = _UNITS.get(name) or _UNITS.get(name.casefold()) or _UNITS.get(name.casefold().removesuffix("s"))
    if known is None or (len(name) == 1 and name not in _UNITS):
        return None
    word = found[1] or found[4] or ""
    exponent = int(found[3]) if found[3] else 2 if word.startswith("sq") else 3 if word.startswith("cu") else 1
    return f"{known[0]}^{exponent}" if exponent > 1 else known[0], known[1] ** exponent
