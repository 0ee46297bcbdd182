"""The pages of docs/ and what stands in them."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
DOTTED = re.compile(r"`(planner(?:\.\w+)+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def text(name: str) -> str:
    """A page."""
    return (DOCS / name).read_text("utf-8")


def script(name: str) -> dict[str, Any]:
    """The names of a script in scripts/, not run as main."""
    return runpy.run_path(str(ROOT / "scripts" / name))


def fences(name: str, language: str) -> list[str]:
    """Code blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text(name), re.M | re.S)


def resolve(dotted: str) -> Any:
    """The object of a dotted name; AttributeError or ModuleNotFoundError when there is none."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(dotted)


def anchors(markdown: str) -> set[str]:
    """Anchors that the headings of a page get."""
    heads = re.findall(r"^#+ (.+)$", markdown, re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


def table_rows(markdown: str) -> list[list[str]]:
    """Cells of every table row."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
