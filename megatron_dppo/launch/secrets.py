"""Keeping what is secret out of everything a run writes."""

from __future__ import annotations

import json
import os
import re
import urllib.parse
from collections.abc import Iterable, Mapping

from megatron_dppo.errors import UserError

HIDDEN = "***"
_NAMES = re.compile(
    r"TOKEN(?!S|IZ)|SECRET|PASSW(OR)?D|PASSPHRASE|API_?KEY|CREDENTIAL|CONNECTION_STRING|COOKIE|"
    r"(^|_)(KEY(_ID)?|AUTH|PWD|DSN|SAS)$",
    re.IGNORECASE,
)
"""Variables that are named so hold secrets."""
_SHAPES = re.compile(
    r"""
    -----BEGIN\ [A-Z\ ]*PRIVATE\ KEY-----(?:[\s\S]*?-----END\ [A-Z\ ]*PRIVATE\ KEY-----|[\s\S]*)
    | (?<![A-Za-z0-9_])(?:
        hf_[A-Za-z0-9]{20,} | github_pat_[A-Za-z0-9_]{20,} | gh[opusr]_[A-Za-z0-9]{30,}
      | gl(?:pat|dt|rt|cbt|ptt|ft|soat)-[A-Za-z0-9_.-]{15,} | sk-[A-Za-z0-9_-]{20,}
      | [rs]k_(?:live|test)_[A-Za-z0-9]{16,}
      | (?:AKIA|ASIA|AROA|AIDA)[0-9A-Z]{16} | AIza[0-9A-Za-z_-]{35} | ya29\.[0-9A-Za-z_-]{20,}
      | xox[a-z]-[A-Za-z0-9-]{10,} | wandb_v\d+_[A-Za-z0-9_-]{20,} | npm_[A-Za-z0-9]{30,} | pypi-[A-Za-z0-9_-]{40,}
      | eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*
      )
    | (?<![A-Za-z0-9+/])[A-Za-z0-9+/]{86}==
    | (?<![A-Za-z0-9+/])(?=[a-z0-9+/]{0,39}[A-Z])(?=[A-Z0-9+/]{0,39}[a-z])
      (?=[A-Za-z+/]{0,39}[0-9])(?=[A-Za-z0-9]{0,39}[+/])
      [A-Za-z0-9+/]{40}(?![A-Za-z0-9+/=])
    | (?<=://)(?:[^\s/:@]*:[^\s/]+|[^\s/:@]{16,})(?=@)
    | (?<=[?&])(?:sig|signature|token|access_token|api_?key|key|X-Amz-(?:Signature|Credential|Security-Token))=[^\s&"']+
    | (?i:\bBearer\ +|\bAuthorization:\ *Basic\ +)(?=\S*[A-Z0-9]|\S{20})[A-Za-z0-9._~+/=-]{8,}
    """,
    re.VERBOSE,
)
"""Private keys; tokens that begin like those of Hugging Face, GitHub, GitLab, OpenAI, Stripe, AWS, Google, Slack,
W&B, npm or PyPI do; JSON Web Tokens; keys of Azure's and AWS's forms (86 base64 digits and `==`; 40 of mixed kinds with
a `/` or `+`); user and password of an address; signed addresses; what follows Bearer or Basic."""
_NAMED = re.compile(
    r"""(?ix) ( (?:secret|passw(?:or)?d|passphrase|(?:api|access|account|storage|secret|private)_?key
          |(?:access|api|auth|bot|hf|id|refresh|session)_token) (?:_id)? ["']?\s* (?:=|:(?=[^\n,;&]*\d)) \s*["']? )
        [^\s"',;&*]{8,}"""
)
"""What follows `api_key=`, `"password": ` and the like."""
_SHORTEST = 6
"""Shorter values (`true`, `0`) would hide ordinary words."""
_PART = 24
"""That much of the beginning of a longer secret is secret."""

_confided: set[str] = set()


def confide(names: Iterable[str]) -> None:
    """From now on, in this process, the values of these environment variables are secrets, whatever their names."""
    _confided.update(names)


def secret_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that are named like secrets or were confided, and hold no path, number or short word."""
    environment = os.environ if environment is None else environment
    return {
        name: value
        for name, value in environment.items()
        if (_NAMES.search(name) or name in _confided) and len(value) >= _SHORTEST and not _harmless(value)
    }


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """`text` with every secret of the environment, as it is or as it is quoted in Python, JSON, addresses and errors,
    or cut off behind `_PART` characters (by Python itself: "invalid literal for int()"), and everything that looks like
    a secret replaced by `***`."""
    forms: set[str] = set()
    for value in secret_variables(environment).values():
        forms |= {value, repr(value)[1:-1], json.dumps(value)[1:-1], urllib.parse.quote(value, safe="")}
        forms.add(str(UserError(value)))
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    for head in {form[:_PART] for form in forms if len(form) > _PART}:
        while (at := text.find(head)) >= 0:
            there = (os.path.commonprefix([form, text[at : at + len(form)]]) for form in forms)  # noqa: RUF071
            text = text[:at] + HIDDEN + text[at + max(map(len, there)) :]
    return _NAMED.sub(rf"\1{HIDDEN}", _SHAPES.sub(HIDDEN, text))


def _harmless(value: str) -> bool:
    """A number, or a path: the files that hold secrets are named so too. A key may begin with a slash as well."""
    if value.startswith("/"):
        return os.path.exists(value) or (value.count("/") > 1 and not _SHAPES.fullmatch(value))
    return value.replace(".", "", 1).isdecimal() and len(value) < 12
