"""What the pages say exists, links lead somewhere, generated pages are current."""

import inspect
import pkgutil
import re
from dataclasses import fields, is_dataclass

import pytest

import planner.estimator
import planner.plan
from planner.cli.options import GOAL, HARDWARE, LIMITS, LOAD, MODEL, PINS
from planner.cli.train import TRAIN
from planner.estimator.time.surfaces import read_data
from planner.solver.problem import ALL_LIMITS
from planner.solver.search import OBJECTIVES
from tests.docs.pages import DOCS, DOTTED, LINK, PAGES, anchors, fences, resolve, script, table_rows, text

PAGE_NAMES = [p.name for p in PAGES]
MADE = {"commands.md": "commands-page", "engines.md": "engines-page"}


@pytest.mark.parametrize("name", PAGE_NAMES)
def test_every_dotted_name_exists(name):
    for dotted in set(DOTTED.findall(text(name))):
        assert resolve(dotted) is not None, dotted


@pytest.mark.parametrize("name", PAGE_NAMES)
def test_links_lead_somewhere(name):
    for target in LINK.findall(text(name)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = DOCS / path if path else DOCS / name
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text("utf-8")), target


@pytest.mark.parametrize("name", PAGE_NAMES)
def test_paths_are_inside_the_project(name):
    page = text(name)
    assert not re.search(r"(?<![\w.])/(work|tmp|home|root|mnt|usr|opt|etc|var|data)/", page)
    assert not re.search(r"\bshared/|\.\./", page)
    for path in re.findall(r"`?((?:planner|tests|scripts|hardware_catalog)/[\w./*-]+\w)`?", page):
        if "*" in path or path in ("planner/COMMAND",):
            continue
        assert (DOCS.parent / path).exists(), path


@pytest.mark.parametrize(("page", "maker"), MADE.items())
def test_made_pages_are_current(page, maker):
    assert script(maker)["page"]() == text(page), f"run scripts/{maker}"


def test_every_public_formula_is_in_the_table():
    listed = set(DOTTED.findall(text("formulas.md")))
    plumbing = re.compile(r"(take|concatenate|empty_rows|read_\w+|axes|table_of|constants|devices|fabric|\w+_row|engine_timing|version_key"
                          r"|memory_rules|stage_layers\w*|stages_kv|stage_costs|memory_table|shard_runtime_bytes|plain_bytes|activation_cost|rank_stages|stages_of"
                          r"|grid_at_least|keeps_limits|total_load|load_per_replica|hopeless|operating_rows|rows_\w+|kernels_per_layer|ranges|state_bytes|surface_of|hours_for)$")  # fmt: skip
    missing = []
    for info in pkgutil.walk_packages(planner.estimator.__path__, "planner.estimator."):
        module = resolve(info.name)
        for name, thing in vars(module).items():
            plain = inspect.unwrap(thing) if callable(thing) else thing
            own = inspect.isfunction(plain) and plain.__module__ == info.name and not name.startswith("_")
            if own and f"{info.name}.{name}" not in listed and not plumbing.match(name):
                missing.append(f"{info.name}.{name}")
    assert not missing


def test_formula_rows_have_five_cells():
    for row in table_rows(text("formulas.md")):
        assert len(row) == 5, row


def test_quoted_errors_are_those_of_the_accuracy_page():
    quoted = script("accuracy-report")["QUOTED"]
    scores, metric = {}, ""
    for line in text("accuracy.md").splitlines():
        if line.startswith("### "):
            metric = line[4:]
        elif line.startswith("| ") and len(cells := table_rows(line)[0]) == 8:
            scores[metric, cells[0]] = cells[3]
    found = [(m[1], m[2], m[0].rsplit(" ", 1)[1]) for m in quoted.finditer(text("formulas.md"))]
    assert len(found) > 20
    for metric, group, figure in found:
        assert scores[metric, group] == figure, (metric, group)


def test_accuracy_page_says_its_command_first():
    first = text("accuracy.md").splitlines()[0]
    assert re.match(r"Made by `scripts/accuracy-report( --\w+ [\w.-]+)+`", first)


def test_plan_page_has_every_field_and_no_other():
    page = text("plan.md")
    records = {n: t for n, t in vars(planner.plan).items() if is_dataclass(t) and t.__module__ == "planner.plan"}
    assert set(records) <= set(re.findall(r"^## (\w+)$", page, re.M))
    for name, record in records.items():
        section = page.split(f"\n## {name}\n")[1].split("\n## ")[0].split("| key of")[0]
        listed = [row[0].strip("`") for row in table_rows(section)[2:]]
        assert listed == [f.name for f in fields(record)], name


def test_api_page_has_every_field_of_a_request():
    import planner as public

    rows = {
        row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1]))
        for row in table_rows(text("python-api.md"))
        if len(row) == 2
    }
    for name in (
        "ServeRequest",
        "Workload",
        "Limits",
        "HardwareFilter",
        "Pins",
        "TrainRequest",
        "TrainJob",
        "TrainLimits",
        "TrainPins",
    ):
        assert rows[name] == {f.name for f in fields(getattr(public, name))}, name
    for name in public.__all__:
        assert name in text("python-api.md"), name


def test_solver_page_has_every_constraint_and_goal():
    page = text("solver.md")
    for name in (*ALL_LIMITS, *OBJECTIVES):
        assert re.search(rf"\b{name}\b", page), name
    import planner.solver.constraints as c

    families = [
        n for n, f in vars(c).items() if inspect.isfunction(f) and f.__module__ == c.__name__ and n.startswith("limit_")
    ]
    for name in families:
        assert f"`planner.solver.constraints.{name}`" in page


def test_commands_page_names_every_shared_option():
    page = text("commands.md")
    for group in (MODEL, GOAL, LOAD, LIMITS, HARDWARE, PINS, TRAIN):
        for name in group:
            assert f"`--{name.replace('_', '-')}`" in page, name


def test_python_blocks_are_there():
    assert len(fences("python-api.md", "python")) >= 6


def test_serving_page_lists_what_the_data_says():
    from planner.engines.records import engines
    from planner.estimator.time.engine_time import timing_row
    from planner.solver.words import STALE_DAYS

    page = text("serving-model.md")
    measured = page.split("all but ")[1].split(".")[0].replace(" and ", ", ").split(", ")
    assert set(measured) == set(read_data("hardware_catalog.kernels", "borrow.yaml")["measured"])
    guessed = page.split("engines/time.yaml): ")[1].split(".")[0].split(", ")
    assert set(guessed) == {e.name for e in engines().values() if not timing_row(e.name, e.version)["fitted_on"]}
    assert f"above {STALE_DAYS} days" in page
    static = {e.name for e in engines().values() if e.batching == "static"}
    assert all(f"`{name}`" in page.split("run a padded")[0].rsplit(";", 1)[1] for name in static)


def test_solver_page_quotes_the_numbers_of_the_code():
    from planner.estimator.operating_point import MAX_REPLICAS, SEQUENCE_GRID
    from planner.estimator.table import NEAR_MISS
    from planner.solver import train_study
    from planner.solver.problem import TIE_PERCENT
    from planner.space import candidates, layouts

    page = " ".join(text("solver.md").split())
    assert f"`MAX_GPUS_PER_REPLICA` = {layouts.MAX_GPUS_PER_REPLICA} GPUs" in page
    assert f"stages {', '.join(map(str, layouts.PIPELINE_DEGREES))};" in page
    assert f"parallel 1 to {layouts.MAX_TENSOR_PARALLEL} inside" in page
    assert f"`FILL` = {candidates.FILL:.0%}" in page
    assert f"`MAX_UTILISATION` = {train_study.MAX_UTILISATION:.0%}" in page
    assert f"up to {train_study.MAX_GPUS} GPUs" in page
    assert f"bisection up to {MAX_REPLICAS} (" in page
    assert f"({', '.join(map(str, SEQUENCE_GRID[:5]))}, ... {SEQUENCE_GRID[-1]})" in page
    assert f"up to {NEAR_MISS:g} times the memory" in page
    assert f"steps of {TIE_PERCENT:g}% (`TIE_PERCENT`)" in page
