"""What the documents name is there: files, headings, settings, and in docs/architecture.md classes and functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from megatron_dppo.config.schema import Config
from tools.actor_step.cases import CASES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_dppo"
DOCUMENTS = sorted(path for pattern in ("*.md", "docs/*.md", "examples/**/*.md") for path in ROOT.glob(pattern))
PATH = re.compile(r"([\w./-]+/[\w./-]+\.(?:py|sh|yaml|md))(?:: (\w[\w.]*))?")


def spans(document: Path) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`\n]+)`", document.read_text())


def find(path: str) -> Path | None:
    """A file of the package, or of the repository."""
    return next((file for file in (PACKAGE / path, ROOT / path) if file.is_file()), None)


def definitions(file: Path) -> set[str]:
    """Names at the top of a module, and `Class.name` of what its classes have."""
    found: set[str] = set()

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    walk(ast.parse(file.read_text()).body, "")
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files(document: Path) -> None:
    for span in spans(document):
        if (match := PATH.fullmatch(span)) is None or match[1].startswith(("runs/", "/")):
            continue
        file = find(match[1]) or find(str(document.parent.relative_to(ROOT) / match[1]))
        assert file is not None, f"there is no {match[1]}"
        if match[2] is not None:
            assert match[2] in definitions(file), f"{match[1]} does not define {match[2]}"


def headings(document: Path) -> set[str]:
    """The anchors that GitHub gives them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set()
    for title in re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE):
        name = re.sub(r"[^\w -]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).strip().lower()).replace(" ", "-")
        found.add(next(one for one in (name, *(f"{name}-{i}" for i in range(1, 99))) if one not in found))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(document: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", document.read_text()):
        target = document.parent / link if link else document
        assert target.exists(), f"there is no {link}"
        assert not anchor or anchor in headings(target), f"{target.name} has no heading #{anchor}"


def sections(kind: object) -> Iterator[type[BaseModel]]:
    """The classes that an annotation names."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for one in get_args(kind):
        yield from sections(one)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_settings(document: Path) -> None:
    """`section.key` and `section.part.key`, as such or with a value."""
    names = "|".join(Config.model_fields)
    for path in re.findall(rf"(?<![\w/.-])(?:{names})(?:\.\w+)+(?![\w/])", document.read_text()):
        if path.rpartition(".")[2] in ("md", "npz", "png", "py", "yaml", "visual"):  # files, and a module of Qwen3.5
            continue
        kinds: list[type[BaseModel]] = [Config]
        for name in path.split("."):
            having = [kind for kind in kinds if name in kind.model_fields]
            assert having or not kinds, f"there is no setting {path}"
            kinds = [inner for kind in having for inner in sections(kind.model_fields[name].annotation)]


def test_cases() -> None:
    """Commands name cases that the benchmark of a step has."""
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    commands = re.findall(r"bench_actor_step\.py[^\n`#]*--only((?: [\w.-]+)+)", text)
    assert len(commands) > 5
    assert {name for command in commands for name in command.split()} <= {case.name for case in CASES}


def test_architecture() -> None:
    """It names many functions with their files; classes that stand alone and folders are there too."""
    document = ROOT / "docs/architecture.md"
    named = spans(document)
    assert sum(1 for span in named if (match := PATH.fullmatch(span)) and match[2]) > 60
    known: set[str] = set().union(*(definitions(file) for file in PACKAGE.rglob("*.py")))
    for span in named:
        if re.fullmatch(r"_?[A-Z]\w*[a-z]\w*(\.\w+)*", span):
            assert span in known, f"nothing defines {span}"
        elif re.fullmatch(r"[\w/]+/", span):
            assert (PACKAGE / span).is_dir() or (ROOT / span).is_dir(), f"there is no folder {span}"
