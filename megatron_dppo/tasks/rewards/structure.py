"""How a composite answer is built: brackets, relations, rows and cells. All work on canonical text."""

from __future__ import annotations

import re

from megatron_dppo.tasks.rewards.canonical import enclosed, split_top, top, trimmed
from megatron_dppo.tasks.rewards.quantity import number

_RELATIONS = re.compile(r"\s*(?:\\(?:le|ge|ne|approx)(?![a-zA-Z])|<=|>=|!=|<|>|=)\s*")
_SIGNS = {"<=": "\\le", ">=": "\\ge", "!=": "\\ne"}
_OVER = r"\\(?:vec|hat|bar|tilde|overline|overrightarrow|angle|triangle|widehat)(?![a-zA-Z])\s*(?:\{\s*\w+\s*\}|\w+)"
NAME = re.compile(
    rf"(?:{_OVER}|\\?[a-zA-Z]+)(?:'+)?(?:_\{{?\w+\}}?)?(?:\s*\^\s*\{{-1\}})?(?:\s*\(\s*[^()]*\))?|"
    r"\(\s*\\?[a-zA-Z]\w*(?:\s*,\s*\\?[a-zA-Z]\w*)+\s*\)|\|?[A-Z]{2,3}\|?"
)
"""What may stand alone on the left of an equation: x, x_1, f(x), \\theta, \\vec{v}, (x, y), AB."""
MATRIX = re.compile(
    r"(?:(?P<open>[(\[]|\\\{)\s*)?\\begin\{(?P<kind>[pbBvV]?matrix|smallmatrix|array|cases|aligned?|gathered)\*?\}(?P<body>(?:(?!\\end\{(?P=kind)).)*)\\end\{(?P=kind)\*?\}(?:\s*[)\]])?",
    re.DOTALL,
)
_LEADS = r"(?:if|when|for|where)(?![a-zA-Z])"
_CONDITION = re.compile(
    rf"\s*&\s*(?!(?:[=<>+]|\\(?:le|ge|ne|approx)(?![a-zA-Z])))(?:{_LEADS})?\s*|"
    rf"\s*,?\s*(?<![\\a-zA-Z])(?:{_LEADS}\s*|(?=(?:otherwise|else)\s*$))"
)
"""Between a value and the condition on which it holds; an `&` before a relation or a sum only aligns."""
_BETWEEN_PIECES = re.compile(
    rf"\s*(?:[,;]\s*(?:and\s)?(?!\s*(?:{_LEADS}|otherwise|else))|(?<![a-zA-Z])and\s(?=[^,;]*\s(?:{_LEADS}|otherwise|else)))\s*"
)
_NEGATED = {"=": "\\ne", "\\ne": "=", "<": "\\ge", "\\le": ">", "even": "odd", "odd": "even"}


def pieces(text: str) -> list[tuple[str, str]]:
    """`\\begin{cases} 1 & n = 0 \\\\ 0 & \\text{otherwise} \\end{cases}`, and the same in words, as values with their
    conditions; empty where a part has none. Of two pieces, "otherwise" is what the other condition leaves."""
    sides = sides_of(text)
    whole = MATRIX.fullmatch(sides[2] if len(sides) == 3 and sides[1] == "=" and NAME.fullmatch(sides[0]) else text)
    if whole and not is_system(whole):
        return []
    found: list[tuple[str, str]] = []
    for row in rows(whole["body"]) if whole else split_top(text, _BETWEEN_PIECES):
        parts = [trimmed(part) for part in split_top(row, _CONDITION)]
        if len(parts) != 2 or not all(parts):
            return []
        condition = re.sub(
            rf"\bis\b|^{_LEADS}|^else$", lambda word: "otherwise" if word[0] == "else" else " ", parts[1]
        )
        found.append((parts[0], " ".join(condition.split())))
    if len(found) == 2:
        (one, on_one), (other, on_other) = found
        found = [(one, _negated(on_other, on_one)), (other, _negated(on_one, on_other))]
    return [(value, re.sub(r"^(even|odd) (\S+)$", r"\2 \1", condition)) for value, condition in found]


def is_system(found: re.Match[str]) -> bool:
    """Whether a match of MATRIX holds lines of their own, in any order, and no cells."""
    return found["kind"] in ("cases", "aligned", "align", "gathered") or found["open"] == "\\{"


def _negated(beside: str, condition: str) -> str:
    """What "otherwise" says beside one relation, or beside what is even or odd; any other `condition` itself."""
    sides = sides_of(beside)
    words = sides if len(sides) == 3 else beside.split()
    turned = [_NEGATED.get(word, word) for word in words]
    several = len(sides) > 3 or re.search(r",|\b(?:and|or)\b|\\(?:land|lor|cup)\b", beside)
    known = not several and sum(word in _NEGATED for word in words) == 1
    return " ".join(turned) if known and condition == "otherwise" else condition


def assignment(part: str) -> tuple[str, str] | None:
    """`x = 5` as x and 5."""
    sides = sides_of(part)
    if len(sides) != 3 or sides[1] != "=" or not NAME.fullmatch(sides[0]):
        return None
    return re.sub(r"\s", "", sides[0]), sides[2]


def solutions(parts: list[str]) -> list[str]:
    """`x = 1, y = 2, x = 3, y = 4` as the two solutions that it lists, so that no value changes its partner."""
    names = [pair[0] for pair in map(assignment, parts) if pair]
    many = len(set(names))
    if not 1 < many < len(parts) == len(names) or any(
        set(names[start : start + many]) != set(names) for start in range(0, len(names), many)
    ):
        return parts
    return [", ".join(parts[start : start + many]) for start in range(0, len(parts), many)]


def rows(body: str) -> list[str]:
    body = re.sub(r"^\s*\{[lcr|\s]*\}|\\hline", "", body)
    return [row for row in re.split(r"\\\\", body) if row.strip()]


def lines(body: str) -> list[str]:
    return [trimmed(row.replace("&", " ")) for row in rows(body)]


def bracketed(text: str) -> tuple[str, list[str], str] | None:
    if not text or text[0] not in "([" or not enclosed(text):
        return None
    if len(text) > 2 and (number(text[1:-1]) is not None):
        return None
    parts = [trimmed(part) for part in split_top(text[1:-1], re.compile(r"\s*[,;]\s*"))]
    return (text[0], parts, text[-1]) if len(parts) > 1 else None


def sides_of(text: str) -> list[str]:
    """`a < b = c` as [a, <, b, =, c], `b > a` as [a, <, b]; one entry where there is no relation."""
    sides: list[str] = []
    begin = 0
    for sign in _RELATIONS.finditer(top(text)):
        sides += [trimmed(text[begin : sign.start()]), _SIGNS.get(sign[0].strip(), sign[0].strip())]
        begin = sign.end()
    sides.append(trimmed(text[begin:]))
    if all(sign in (">", "\\ge") for sign in sides[1::2]):
        sides = [{">": "<", "\\ge": "\\le"}.get(side, side) for side in reversed(sides)]
    return sides
