"""Reading catalog files safely: size, encoding, YAML without aliases, CSV with a checked header. One-line errors."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planner.errors import CatalogError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

MAX_FILE_BYTES = 4 * 2**20
_MAYBE_ALIAS = re.compile(r"(?:^|[\s\[{,])[&*][A-Za-z0-9_]", re.M)


@dataclass(frozen=True)
class CatalogFile:
    """One file of a catalog folder; `label` is how errors name it."""

    path: Traversable
    label: str

    def fail(self, where: str, problem: str) -> CatalogError:
        """The error for this file, ready to raise: 'prices/aws.csv, line 3, tier: ...'."""
        place = ", ".join(p for p in (self.label, where) if p)
        return CatalogError(place, problem, "hardware_catalog/SCHEMA.md describes every file and field.")

    def text(self) -> str:
        """The whole file as UTF-8 text; CatalogError when it is missing, too large or binary."""
        try:
            if not self.path.is_file():
                raise self.fail("", "not a regular file")
            with self.path.open("rb") as stream:
                data = stream.read(MAX_FILE_BYTES + 1)
            if len(data) > MAX_FILE_BYTES:
                raise self.fail("", f"larger than {MAX_FILE_BYTES // 2**20} MiB, this is no catalog file")
            text = data.decode("utf-8-sig")
        except OSError as error:
            raise self.fail("", f"cannot be read ({error.strerror or error})") from None
        except UnicodeDecodeError:
            raise self.fail("", "not UTF-8 text") from None
        if "\0" in text:
            raise self.fail("", "binary data, not text")
        return text


def read_mapping(file: CatalogFile) -> dict[str, dict[str, Any]]:
    """A YAML file {name: {field: value}}; aliases, tags, repeated keys and any other shape are refused."""
    import yaml

    text = file.text()
    try:
        if _MAYBE_ALIAS.search(text) and any(
            isinstance(t, yaml.AnchorToken | yaml.AliasToken) for t in yaml.scan(text)
        ):
            raise file.fail("", "YAML anchors and aliases are not allowed")
        data = yaml.load(text, _loader())  # noqa: S506 (a safe loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise file.fail(
            f"line {mark.line + 1}" if mark else "", f"not valid YAML ({getattr(error, 'problem', None) or error})"
        ) from None
    except (RecursionError, ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:  # odd tags
        raise file.fail("", f"not usable YAML ({type(error).__name__}: {str(error)[:80]})") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise file.fail("", f"must be a mapping of names, not a {type(data).__name__}")
    for name, fields in data.items():
        if not isinstance(name, str) or not name:
            raise file.fail(f"key {name!r}", "names must be text")
        if not isinstance(fields, dict):
            raise file.fail(name, f"must be a mapping of fields, not {fields!r:.60}")
    return data


def _loader() -> Any:
    """PyYAML's safe loader (in C where built) that also refuses a key given twice."""
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class UniqueKeys(base):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if key.value in seen and isinstance(key.value, str):
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value!r:.60} is given twice", key.start_mark
                    )
                seen.add(key.value if isinstance(key.value, str) else id(key))
            return super().construct_mapping(node, deep)

    return UniqueKeys


def read_rows(
    file: CatalogFile, required: Sequence[str], optional: Sequence[str]
) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of a CSV file as (line number, {column: text}); '#' starts a comment line, the header names the columns."""
    lines = [
        (n, line) for n, line in enumerate(file.text().splitlines(), 1) if line.strip() and not line.startswith("#")
    ]
    if not lines:
        return
    numbers = [n for n, _ in lines]
    reader = csv.reader((line for _, line in lines), strict=True)
    try:
        header = [h.strip() for h in next(reader)]
        _check_header(file, numbers[0], header, required, optional)
        for row in reader:
            number = numbers[reader.line_num - 1]
            if len(row) != len(header):
                raise file.fail(f"line {number}", f"has {len(row)} fields, the header has {len(header)}")
            yield number, dict(zip(header, map(str.strip, row), strict=True))
    except csv.Error as error:
        raise file.fail(f"line {numbers[reader.line_num - 1]}", f"not valid CSV ({error})") from None


def _check_header(
    file: CatalogFile, line: int, header: list[str], required: Sequence[str], optional: Sequence[str]
) -> None:
    known = (*required, *optional)
    for column in header:
        if column not in known:
            raise file.fail(f"line {line}", f"unknown column {column!r:.60} (known: {', '.join(known)})")
    for column in required:
        if column not in header:
            raise file.fail(f"line {line}", f"column {column!r} is missing")
    if len(set(header)) != len(header):
        raise file.fail(f"line {line}", "a column is named twice")
