"""One spelling for the many of the same answer: Unicode signs, spacing and fonts of LaTeX, delimiters, words around."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

import regex

_SIGNS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "÷": "/", "⁄": "/", "∕": "/", "π": r"\pi ", "∞": r"\infty ", "±": r"\pm ", "∓": r"\mp ", "≤": r"\le ",
    "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ",
    "∈": r"\in ", "∅": r"\emptyset ", "∶": ":", "º": "°", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
    "γ": r"\gamma ", "λ": r"\lambda ", "μ": r"\mu ", "φ": r"\phi ", "ω": r"\omega ", "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "△": r"\triangle ",
    "≡": r"\equiv ", "″": '"', "\u200b": "", "\u2060": "", "\ufeff": "",
    "⟨": "(", "⟩": ")", "°": "°", "√": "√", "“": '"', "”": '"', "’": "'", "′": "'",
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_VULGAR = re.compile("[¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\w+))")
_DOLLARS = re.compile(r"\$\$(.+?)\$\$|\$([^$]+)\$(?!\d)", re.DOTALL)
"""A formula has no digit after its second dollar (Pandoc's rule): `$5 and $7` is money."""
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|textsf|texttt|mathrm|mathbf|mathit|mathsf|mbox|hbox|emph|operatorname|"
    r"boldsymbol|bm|underline|textup)\s*\{([^{}]*)\}"
)
_FONT = re.compile(r"\\(?:math(?:bf|rm|it|sf)|boldsymbol|bm|underline|text(?:bf|it|rm|normal)?)\s*(?=\{)")
_ASIDE = re.compile(r"(?<=\S)\s*\([A-Za-z]{3}[A-Za-z ,.-]*\)$")
"""`9 (nine)`"""
_INDEX = r"(?:\{ ?([^\W_]{1,4}) ?\}|(\d{1,4}(?!\d)|[a-zA-Z]))"
_COMMANDS = {
    "leq|leqslant|le": r"\\le ", "geq|geqslant|ge": r"\\ge ", "neq|ne": r"\\ne ", "lt": "<", "gt": ">",
    "colon|ratio": ":", "approxeq|simeq": r"\\approx ", "lbrace": r"\\{", "rbrace": r"\\}", "langle|lparen": "(",
    "rangle|rparen": ")", "lbrack": "[", "rbrack": "]", "varnothing": r"\\emptyset ", "ldots|dots|cdots": "...",
    "div": "/", "bmod": r"\\mod", "pounds": "£", "[dtcs]frac|nicefrac": r"\\frac",
}  # fmt: skip
_SPELLINGS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (
        r"\\(?:left|right) ?\.|\\(?:left|right|bigl?|bigr|Bigl?|Bigr|biggl?|biggr|displaystyle|textstyle|limits|!|"
        r"bf|rm|it|large|Large|LARGE|huge|Huge|small)(?![a-zA-Z])|"
        r"\\(?:tag|label|phantom|(?:text)?color) ?\{[^{}]*\}",
        "",
    ),
    (r"(?<!\\)\\(?:[,;:> ]|quad(?![a-zA-Z])|qquad(?![a-zA-Z]))|~", " "),
    (r"(?<!\\)\\[()\[\]]", " "),
    (r"\\math(?:bin|rel|punct|ord)\s*(?![a-zA-Z])", ""),
    (r"(?<![\^_])\{\s*([,;:.=<>+*/-])\s*\}", r"\1"),  # braces that only change the space: 10{:}45, 1{,}234
    (r"\\%", "%"),
    (r"\{([^{}\\]+)\\choose(?![a-zA-Z])([^{}\\]+)\}", r"\\binom{\1}{\2}"),
    *((rf"\\(?:{names})(?![a-zA-Z])", sign) for names, sign in _COMMANDS.items()),
    (r"(?<=\S)\s*\(\s*\\approx([^()]*)\)\s*$", r" \\approx \1"),
    (r"\\\{\s*\\\}", r"\\emptyset "),
    (r"\\degree(?![a-zA-Z])|\^\s*(?:\{\s*)?\\circ\s*\}?", "°"),
    (r"\*\*", "^"),
    (r"\\log\s*_\s*(?:\{\s*)?e\s*\}?(?![a-zA-Z])", r"\\ln "),
    (r"\\sqrt\s*(\[[^\[\]]*\])\s*(\d)", r"\\sqrt\1{\2}"),
    (r"\s+", " "),  # from here on a blank is one
    (r"\+ ?/ ?-", r"\\pm "),
    (r"\^ ?(?:\{ ?)?((?:\\prime ?)+)\}?", lambda found: "'" * found[1].count("prime")),
    (r"''", '"'),
    (r"(?<=\d)'(?=\d{3}(?!\d))", ","),
    (
        r"^ ?((?:[a-zA-Z]{3,9} ){0,3}\d{0,9}?"
        r"(?:(?<!1)(?:1(?=\W*st)|2(?=\W*nd)|3(?=\W*rd))|(?:1[1-3]|[04-9])(?=\W*th)))"
        r"(?: ?\^ ?\{? ?| ?)(?:st|nd|rd|th)(?: ?\}|(?= [a-zA-Z]|\.? ?$))",
        r"\1",
    ),
    (r"(?<=\\mathbb\{R\}) ?(?:-|\\backslash(?![a-z])) ?(?=\\\{)", r"\\setminus "),
    (r"(?<![a-zA-Z])(?:Rs\.?|INR)(?= ?\d)", "₹"),
    (r"(?<![a-zA-Z])US(?:D|¤)(?= ?\d)", "¤"),
    (
        rf"(?<![\w\\}}^])C ?\( ?([^\W_]{{1,4}}) ?, ?([^\W_]{{1,4}}) ?\)(?! ?=)|"
        rf"(?<![\w\\}}^])C ?_ ?{_INDEX} ?\^ ?{_INDEX}|"
        rf"(?:\{{ ?\}}|^ ?|(?<=[-+*/=(\[{{,<>])|(?<=[-+*/=(\[{{,<>] )|(?<=\\cdot )|(?<=\\times ))"
        rf"[_^] ?{_INDEX} ?C ?_ ?{_INDEX}",
        lambda found: _combinations(found),
    ),
    (r"\\?(?<![a-zA-Z])(arc)?tg(?![a-zA-Z])", r"\\\1tan "),
    (r"\\?(?<![a-zA-Z])(arc)?ctg(?![a-zA-Z])", r"\\\1cot "),
    (r"(?<![\\a-zA-Z])(?=(?:sin|cos|tan|cot|ln|log)(?![a-zA-Z]))", r"\\"),
    (r"(?<![\d.])(?=\.(?:\d|\\overline|\\bar|\\dot))", "0"),
    (r"\\dot ?\{?(\d)\}?(\d*)\\dot ?\{?(\d)\}?", r"\\overline{\1\2\3}"),
    (r"(\d\.\d{0,12}?)(\d{1,6}?)\2++\.\.\.$", r"\1\\overline{\2}"),
    (r"^ ?(?i:(?:the )?empty set|no solutions?) ?$", r"\\emptyset "),
    (r"^\s*\\\{ ?[a-zA-Z] ?(?:\\mid(?![a-z])|[|:]) ?(.*)\\\}\s*$", r"\1"),  # the condition of a set builder
    (r"^\s*(\d+) to (\d+)\s*$", r"\1:\2"),
    (
        r"^\s*(?:the set of )?(?:all )?reals?(?: numbers?)?\s*$|^\s*\(-\s*\\infty\s*,\s*\\infty\s*\)\s*$",
        r"\\mathbb{R}",
    ),
    (r"(?:^|(?<=\\cup)) ?\](?=[^\[\](),;]+[,;][^\[\]()]+[\[\]])", "("),  # ]0, 1], written in French and German
    (r"(?<=[,;])([^\[\](),;]+)\[(?= ?(?:\\cup|\.? ?$))", r"\1)"),
    (r"(?<![a-zA-Z])\\?sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![\\a-zA-Z])(sqrt|pi|infty|theta|alpha|beta)(?![a-zA-Z])", r"\\\1 "),
    (r"(?<![\\a-zA-Z])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty "),
    (r"\\(frac|binom) ?(\d|[a-z]|\\pi) ?(\d|[a-z]|\\pi)(?!\{)", r"\\\1{\2}{\3}"),
)
_SUBSTITUTIONS = tuple((re.compile(pattern), replacement) for pattern, replacement in _SPELLINGS)
_INSIDE = regex.compile(
    r"(?P<brackets>\\?[(\[{](?:[^()\[\]{}\\]++|\\[^()\[\]{}]|(?&brackets))*+\\?[)\]}])|"
    r"\\begin\{(\w+\*?)\}.*?\\end\{\2\}",
    regex.DOTALL,
)
_QUOTED = re.compile(r"^([\"'])([^\"']*)\1$")
_LEAD = re.compile(
    r"(?:(?:so|thus|hence|therefore|the|final|correct|answer|option|choice|result|total|value|solution|solutions|"
    r"is|are|equals?)\b(?!\s*=)[\s,:]*)+(?=[^\s,:])",
    re.IGNORECASE,
)
"""Words that lead to an answer and are none."""


def canonical(text: str) -> str:
    """The usual spelling of an answer; the same function is used on references. Idempotent but for cases of no use."""
    text = _QUOTED.sub(r"\2", _unicode(text.strip("`* \n\t").rstrip("\\ ")))
    text = re.sub(r"(?<!\*)\*\*(?!\*)(.+?)\*\*", r"\1", text) if text.startswith("**") else text
    text = text.replace("\\$", "¤")
    text = _DOLLARS.sub(lambda found: f" {found[1] or found[2]} ", text).replace("$", "¤")
    for pattern, replacement in _SUBSTITUTIONS[:1]:
        text = pattern.sub(replacement, text)
    for _ in range(3):
        text = _TEXT.sub(r" \1", text)
    text = _FONT.sub("", text)
    for pattern, replacement in _SUBSTITUTIONS[1:]:
        text = pattern.sub(replacement, text)
    return without_lead(_ASIDE.sub("", trimmed(text)))


def _combinations(found: re.Match[str]) -> str:
    """`C(5, 2)`, `C_5^2` and `{}_5C_2` as `\\binom{5}{2}`; a constant C_1^2 stays, and so does x^2C_1."""
    above, below = (one for one in found.groups() if one)
    impossible = above.isdecimal() and below.isdecimal() and int(above) < int(below)
    return found[0] if impossible else f"\\binom{{{above}}}{{{below}}}"


def trimmed(text: str) -> str:
    """Without blanks and punctuation at the ends, and without braces or parentheses around the whole."""
    for _ in range(8):  # nobody who means it nests deeper, and each round is as long as the text
        before = text
        text = text.strip()
        if not text.endswith("..."):
            text = text.rstrip(".,;: ")
        if text.startswith(("{", "(")) and text[-1] in "})" and enclosed(text):
            text = text if text[0] == "(" and re.search("[,;]", text) else text[1:-1]
        if text == before:
            break
    return text


def without_lead(text: str) -> str:
    """`The answer is 9` is `9`; what consists of such words alone stays."""
    found = _LEAD.match(text)
    return text[found.end() :] if found else text


def enclosed(text: str) -> bool:
    """Whether one pair of brackets is around all of it. Half-open intervals close by either kind."""
    return _INSIDE.fullmatch(text) is not None


def depth(text: str) -> int:
    """How deep brackets stand in brackets."""
    deepest = level = 0
    for sign in text:
        level += (sign in "([{") - (sign in ")]}")
        deepest = max(deepest, level)
    return deepest


def split_top(text: str, separators: re.Pattern[str]) -> list[str]:
    """`text` at the separators that stand in no bracket and in no LaTeX environment."""
    cuts = [found.span() for found in separators.finditer(top(text)) if found.end() > found.start()]
    edges = [0, *(edge for cut in cuts for edge in cut), len(text)]
    return [text[begin:end] for begin, end in zip(edges[::2], edges[1::2], strict=True)]


def top(text: str) -> str:
    """With signs that mean nothing for what stands in brackets and environments."""
    return _INSIDE.sub(lambda found: "\0" * len(found[0]), text)


def _unicode(text: str) -> str:
    text = _RAISED.sub(lambda found: "^{" + found[0].translate(_SUPERSCRIPTS) + "}", text)
    text = _LOWERED.sub(lambda found: "_{" + found[0].translate(_SUBSCRIPTS) + "}", text)
    text = _VULGAR.sub(lambda found: " " + unicodedata.normalize("NFKC", found[0]), text)
    text = "".join(_SIGNS.get(sign, sign) for sign in text)
    text = "".join(_SIGNS.get(sign, sign) for sign in unicodedata.normalize("NFKC", text))
    return _ROOT.sub(lambda found: "\\sqrt{" + next(filter(None, found.groups()), "") + "}", text)
