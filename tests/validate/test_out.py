"""`validate --out`: a place that cannot be written is said before any work."""

import pytest

from planner.cli.main import run
from tests.validate.engine_helpers import saved, serving_plan


@pytest.mark.parametrize(
    ("level", "work"),
    [
        ("dry", "planner.validate.dry.dry_run"),
        ("device", "planner.validate.device.device_run"),
        ("engine", "planner.validate.engine.engine_run"),
    ],
)
@pytest.mark.parametrize("out", ["no/such/plan.yaml", "plan.yaml/x", "."])
def test_a_place_that_cannot_be_written_is_said_first(level, work, out, tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    path = saved(serving_plan(), tmp_path)
    monkeypatch.setattr(work, lambda *_: pytest.fail("it began to work"))
    assert run(["validate", str(path), "--level", level, "--out", str(tmp_path / out)]) == 2
    err = capsys.readouterr().err
    assert "cannot write" in err
    assert len(err.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["plan.yaml"]
