"""How a composite answer is built: brackets, relations, rows and cells. All work on canonical text."""

from __future__ import annotations

import re

from megatron_dppo.tasks.rewards.canonical import matching, split_top, trimmed
from megatron_dppo.tasks.rewards.quantity import number

_RELATIONS = re.compile(r"\s*(?:\\le|\\ge|\\ne|<=|>=|!=|\\approx|<|>|=)(?![a-zA-Z])\s*")
NAME = re.compile(
    r"\\?[a-zA-Z]+(?:'+)?(?:_\{?\w+\}?)?(?:\s*\^\s*\{-1\})?(?:\s*\(\s*[^()]*\))?|\(\s*\\?[a-zA-Z]\w*(?:\s*,\s*\\?[a-zA-Z]\w*)+\s*\)|\|?[A-Z]{2,3}\|?"
)
"""What may stand alone on the left of an equation: x, x_1, f(x), \\theta, (x, y), AB."""
MATRIX = re.compile(
    r"(?:[(\[]\s*)?\\begin\{(?P<kind>[pbBvV]?matrix|smallmatrix|array|cases|aligned?|gathered)\*?\}(?P<body>.*)\\end\{(?P=kind)\*?\}(?:\s*[)\]])?",
    re.DOTALL,
)


def rows(body: str) -> list[list[str]]:
    body = re.sub(r"^\s*\{[lcr|\s]*\}|\\hline", "", body)
    return [[trimmed(cell) for cell in row.split("&")] for row in re.split(r"\\\\", body) if row.strip()]


def lines(body: str) -> list[str]:
    return [trimmed(row.replace("&", " ")) for row in re.split(r"\\\\", body) if row.strip()]


def bracketed(text: str) -> tuple[str, list[str], str] | None:
    if not text or text[0] not in "([" or matching(text, 0) != len(text) - 1:
        return None
    if len(text) > 2 and (number(text[1:-1]) is not None):
        return None
    parts = [trimmed(part) for part in split_top(text[1:-1], re.compile(r"\s*[,;]\s*"))]
    return (text[0], parts, text[-1]) if len(parts) > 1 else None


def interval(relation: str) -> tuple[str, list[str], str] | None:
    """`1 < x \\le 4` as the interval (1, 4]; None for what is no inequality of one name."""
    sides = sides_of(relation)
    if len(sides) == 3:
        left, sign, right = sides
        if not NAME.fullmatch(left):
            left, sign, right = right, flipped(sign), left
        if not NAME.fullmatch(left) or (number(right) is None and NAME.fullmatch(right)):
            return None
        if sign in ("<", "\\le"):
            return "(", ["-\\infty", right], ")" if sign == "<" else "]"
        if sign in (">", "\\ge"):
            return "(" if sign == ">" else "[", [right, "\\infty"], ")"
        return None
    if len(sides) == 5 and NAME.fullmatch(sides[2]):
        if sides[1] in (">", "\\ge") and sides[3] in (">", "\\ge"):
            sides = [sides[4], flipped(sides[3]), sides[2], flipped(sides[1]), sides[0]]
        if sides[1] in ("<", "\\le") and sides[3] in ("<", "\\le"):
            return "(" if sides[1] == "<" else "[", [sides[0], sides[4]], ")" if sides[3] == "<" else "]"
    return None


def sides_of(text: str) -> list[str]:
    """`a < b = c` as [a, <, b, =, c]; one entry where there is no relation."""
    sides: list[str] = []
    begin = 0
    for part in split_top(text, _RELATIONS)[:-1]:
        sides.append(trimmed(part))
        begin += len(part)
        sign = _RELATIONS.match(text, begin)
        assert sign is not None  # split_top found it here
        sides.append({"<=": "\\le", ">=": "\\ge", "!=": "\\ne"}.get(sign[0].strip(), sign[0].strip()))
        begin = sign.end()
    return [*sides, trimmed(text[begin:])]


def flipped(sign: str) -> str:
    return {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}.get(sign, sign)
