"""Which part of a response is its final answer.

In this order: nothing, where the response is still thinking; what the last `\\boxed{...}` after the thinking holds;
what the last `<answer>` holds (see `_searched`); what follows the last "answer:", "answer is" or "####"; a response of
one line and hardly a word; the last formula; the last number. A response that began another box and did not close or
fill it took the earlier ones back: it has no answer. Every step is linear in the length of the response.
"""

from __future__ import annotations

import re

import regex

_THINKING = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>|\[(/?)THINK\]", re.IGNORECASE)
_BOX = regex.compile(
    r"(?<!\\)\\+(?:boxed|fbox)(?![a-zA-Z])\s*+(?:(?P<closed>\{(?:[^{}\\]++|\\.|(?&closed))*+\})|(?P<open>\{)|(?P<bare>[^\s$]*))",
    regex.DOTALL,
)
"""`\\boxed 7` takes what follows."""
_COMMAND = re.compile(r"(?<!\\)\\+(?:boxed|fbox)(?=\s*\{)")
_BETWEEN_PARTS = re.compile(
    r"(?:[\s$]|\\[()\[\]]|\\text)*+(?:\{[{\s]*+)?(?:[,;&]|\band\b|\bor\b)++(?:[\s$,}]|\\[()\[\]]|\band\b|\bor\b)*"
)
"""Between two boxes that make up one answer: `\\boxed{1}$ and $\\boxed{2}`."""
_MARK = re.compile(
    r"(?:####|(?<!<)(?<!</)\banswers?\b[^.:=\n]{0,60}?(?::|=|\bis\b|\bare\b)[*_\s]*:?)[*_\s]*", re.IGNORECASE
)
_TAG = re.compile("<answer>", re.IGNORECASE)
_END_TAG = re.compile("</answer>", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!]\**\s+(?=[A-Z])|(?:,|(?<![\s,])(?=\s))\s+\(?(?:because|since)\s")
_PROSE_AFTER_FORMULA = re.compile(r"\$[^$]+\$([,.;] [a-z]+ [a-z][^$]*)$")
_FORMULA = re.compile(
    r"\$\$(?P<a>[^$]+)\$\$|(?<!\\)\$(?P<b>[^$\n]+)(?<!\\)\$(?!\d)|\\\((?P<c>(?:(?!\\\().)+?)\\\)|"
    r"\\\[(?P<d>(?:(?!\\\[).)+?)\\\]",
    re.DOTALL,
)
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?[$€£]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:[.,]\d+)?(?:\s*/\s*\d+(?!\w|\.\d))?(?:\s*(?:%|percent\b))?|"
    r"(?<![\w.])[-+]?\.\d+"
)
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")


def is_thinking_tag(text: str) -> bool:
    """Whether `text` is a tag that begins or ends thinking."""
    return _THINKING.fullmatch(text) is not None


def is_thinking(response: str) -> bool:
    """Whether the response ends inside its thinking: no answer can have been given."""
    marks = list(_THINKING.finditer(response))
    return bool(marks) and not (marks[-1][1] or marks[-1][2])


def end_of_thinking(response: str) -> int:
    """Where the last thinking ends; 0 where there is none."""
    return max((mark.end() for mark in _THINKING.finditer(response) if mark[1] or mark[2]), default=0)


def behind_thinking(response: str) -> str:
    """What `response` says behind its thinking, without white space before it; nothing where it ends inside of it."""
    if is_thinking(response):
        return ""
    end = end_of_thinking(response)
    return response[end:].lstrip() if end else response


def final_answer(response: str, *, boxed_only: bool = False) -> str | None:
    """The final answer of `response`, None where it has none. See the head of this file for the rules."""
    text = behind_thinking(response).strip()
    if _BOX.search(text):
        return boxed_answer(text)
    text = _searched(text)
    if boxed_only or not text:
        return None
    marks, marked = _marked(text)
    if marks:
        return marked
    if "\n" not in text and len(_WORD.findall(text)) <= 2:
        return text
    formulas = _FORMULA.findall(text)
    if formulas:
        return next(filter(None, formulas[-1]), "").strip() or None
    if "\\" in text and "\n" not in text:
        return text
    numbers = _NUMBER.findall(text)
    return numbers[-1].strip() if numbers else None


def boxed_answer(text: str) -> str | None:
    """What the last box of `text` holds, or the last boxes where several make up one answer, inner boxes opened; None
    where there is none or it is not closed."""
    boxes = []
    for box in _BOX.finditer(text):
        boxes.append((box.start(), box.end(), box["bare"] or (box["closed"] or "")[1:-1]))
        if box["open"]:  # what follows stands in it
            break
    parts: list[str] = []
    begin = len(text)
    for start, end, content in reversed(boxes):
        if not content.strip() or (parts and not _BETWEEN_PARTS.fullmatch(text, end, begin)):
            break
        parts.insert(0, content)
        begin = start
    return _COMMAND.sub("", ", ".join(parts)).strip() if parts else None


def _searched(text: str) -> str:
    """Where in `text` the answer is: in the last `<answer>...</answer>` that holds something, or behind it where that
    marks an answer (so that prose about the tags is none). A tag that is empty or not closed counts where nothing else
    is marked."""
    before, *tagged = _TAG.split(text)
    if not tagged:
        return text
    pairs = [[part.strip() for part in _END_TAG.split(one, maxsplit=1)] for one in tagged]
    for at in reversed(range(len(pairs))):
        if len(pairs[at]) == 2 and pairs[at][0]:
            behind = "\n".join([pairs[at][1], *(part for pair in pairs[at + 1 :] for part in pair)])
            return behind if _marked(behind)[1] else pairs[at][0]
    inside, *rest = pairs[-1]
    outside = "\n".join([before, *(part for pair in pairs[:-1] for part in pair), *rest])
    return outside if _marked(outside)[1] else inside


def _marked(text: str) -> tuple[bool, str | None]:
    """Whether `text` marks an answer, and what the last mark stands before."""
    marks = list(_MARK.finditer(text))
    return bool(marks), _sentence(text[marks[-1].end() :]) if marks else None


def _sentence(text: str) -> str | None:
    """The first sentence of the first line."""
    line = text.split("\n", 1)[0]
    end = _SENTENCE_END.search(line) or _PROSE_AFTER_FORMULA.match(line)
    sentence = (line if end is None else line[: end.start(end.lastindex or 0)]).strip(" *\t").rstrip(" *.\t")
    return (sentence if re.match(r"\.\d", sentence) else sentence.lstrip(" *.\t")) or None
