"""A validated plan shows its validation."""

from dataclasses import replace

from planner.report.console import show_plan
from planner.report.validated import validation_lines
from tests.validate.engine_helpers import serving_plan

ENGINE = {
    "level": "engine", "measured": {"ttft_ms": 100.0}, "error_percent": {"ttft_ms": 20.0}, "hardware": "as planned",
    "limits": {"TTFT, 95th percentile": {"allowed": "500 ms", "measured": "100 ms", "verdict": "held"}},
}  # fmt: skip


def test_lines():
    assert validation_lines(ENGINE) == [
        "measured (level engine); predicted over measured: ttft_ms +20.0%",
        "TTFT, 95th percentile: held (allowed 500 ms, measured 100 ms)",
    ]
    assert validation_lines(ENGINE | {"hardware": "not the planned one", "limits": {}}) == [
        "measured (level engine), but not on the planned hardware"
    ]
    assert validation_lines({"level": "dry", "error_percent": {}}) == [
        "counted on fake tensors; predicted over counted: not compared"
    ]


def test_the_report_shows_it(capsys):
    made = serving_plan()
    predicted = {
        **made.predicted,
        "e2e_ms": made.predicted["ttft_ms"],
        "throughput_tokens_per_s": made.predicted["ttft_ms"],
    }
    show_plan(replace(made, predicted=predicted, validation=ENGINE), json=False, written=[])
    assert "Validated:\n  - measured (level engine)" in capsys.readouterr().out
