"""Verdicts are honest about how many requests there were; statistics hold on known samples."""

from dataclasses import replace

import pytest

from planner.plan import Range
from planner.validate.engine_load import ENOUGH_REQUESTS, Load, Sample
from planner.validate.engine_stats import measured_of, throughput_tokens_per_s
from planner.validate.engine_training import steps_of, training_verdicts
from planner.validate.engine_verdict import (
    Row,
    at_least,
    at_most,
    mean_verdict,
    percentile_verdict,
    serving_rows,
    serving_verdicts,
)
from tests.train_emit.plans import tiny
from tests.validate.engine_helpers import serving_plan


def test_the_binomial_sums():
    assert at_most(0.05, 10, 0) == pytest.approx(0.95**10)
    assert at_most(0.5, 4, 1) == pytest.approx(5 / 16)
    assert at_least(0.5, 4, 3) == pytest.approx(5 / 16)
    assert at_most(0.05, 100_000, 100_000) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("over", "requests", "failed", "word"),
    [
        (0, ENOUGH_REQUESTS, 0, "held"), (0, ENOUGH_REQUESTS - 1, 0, "cannot say"), (50, 1000, 0, "cannot say"), (30, 1000, 0, "held"),
        (70, 1000, 0, "did not hold"), (0, 1000, 70, "did not hold"), (3, 10, 0, "did not hold"), (0, 0, 0, "cannot say"),
    ],
)  # fmt: skip
def test_a_percentile(over, requests, failed, word):
    values = [2.0] * over + [0.5] * (requests - over)
    assert percentile_verdict(values, failed, 1.0, 95)[0] == word


def test_a_mean():
    values = [90.0, 110.0] * 50
    assert mean_verdict(values, 0, 102.0)[0] == "held"
    assert mean_verdict(values, 0, 98.0)[0] == "did not hold"
    assert mean_verdict(values, 0, 100.5)[0] == "cannot say"
    assert mean_verdict(values, 5, 200.0) == ("cannot say", "5 of 105 requests failed")
    assert mean_verdict([1.0], 0, 2.0)[0] == "cannot say"


def samples(n, gap_s=0.1, e2e_s=1.0, tokens=10):
    return [Sample(i * gap_s, i * gap_s + e2e_s, 8, tokens, 0.2, (e2e_s - 0.2) / (tokens - 1)) for i in range(n)]


def test_throughput_is_that_of_the_whole_load():
    assert throughput_tokens_per_s(samples(200)) == pytest.approx(100.0, rel=0.01)
    assert throughput_tokens_per_s(samples(1)) == pytest.approx(10.0)
    assert throughput_tokens_per_s([]) == 0.0


def test_failed_requests_are_counted_and_left_out():
    found = measured_of(
        [*samples(3), replace(samples(1)[0], error="HTTP 500: x"), replace(samples(1)[0], error="HTTP 500: x")]
    )
    assert (found.answered, found.failed, found.failures) == (3, 2, {"HTTP 500: x": 2})
    assert found.table()["ttft_ms_p95"] == pytest.approx(200)


def test_rows_and_verdicts_of_a_plan():
    limits = {"ttft_s": 0.5, "e2e_s": 0.9, "min_throughput_tokens_per_s": 10_000.0, "max_accuracy_loss_percent": 1.0}
    made = serving_plan(limits, rate_per_s=10.0)
    found = measured_of(samples(100))
    measured = found.table() | {"ttft_ms": 200.0, "e2e_ms": 1000.0, "kv_cache_tokens": 380_000.0}
    rows = {r.name: r for r in serving_rows(made, measured)}
    assert rows["ttft_ms"].error_percent == pytest.approx(-40.0)
    assert rows["ttft_ms"].inside is False
    assert rows["kv_cache_tokens"].inside is None
    verdicts = {v.limit: (v.verdict, v.why) for v in serving_verdicts(made, found, measured)}
    assert verdicts["TTFT, 95th percentile"][0] == "held"
    assert verdicts["E2E, mean"][0] == "did not hold"
    assert verdicts["throughput"] == ("cannot say", "only 80 tokens/s were asked for")
    assert verdicts["accuracy loss"][0] == "cannot say"


def test_when_a_load_ends():
    assert not Load(((1, 1),)).over(ENOUGH_REQUESTS - 1, 100)
    assert Load(((1, 1),)).over(ENOUGH_REQUESTS, 60)
    assert Load(((1, 1),)).over(3, 600)
    assert Load(((1, 1),), requests=5).over(5, 0)
    assert not Load(((1, 1),), duration_s=9).over(500, 8)


def test_training_limits_carry_the_measured_step_on():
    made = replace(tiny(), request={"limits": {"step_s": 2.0, "deadline_s": 15.0, "budget_usd": 1.0}})
    made = replace(made, cost=replace(made.cost, usd_per_hour=3600.0), predicted={"step_time_s": Range(2, 1, 3)})
    words = {v.limit: (v.measured, v.verdict) for v in training_verdicts(made, {"step_time_s": 1.5}, 8)}
    assert words == {
        "step time": ("1.50 s", "held"),
        "deadline": ("12.00 s", "held"),
        "budget": ("12.00 USD", "did not hold"),
    }


def test_steps_of_torchtitan_and_of_half_a_line():
    titan = replace(tiny(), deployment=replace(tiny().deployment, engine="torchtitan"))
    (step,) = steps_of(titan, "", "step:  1  loss:  7.1  grad_norm:  1.0  memory:  1.50GiB(2.00%)  tps: 256  tflops: 1")
    train = titan.deployment.train
    assert step.seconds == pytest.approx(train.global_batch_size * train.seq_len / (256 * 2))
    assert step.peaks == {"peak_memory_gib": 1.5}
    line = '{"event": "step", "step": 1, "step_time_s": 0.5, "tokens_per_s": 100, "peak_reserved_gib": 3.0}'
    assert len(steps_of(tiny(), f'{{"event": "start"}}\n{line}\n{line[:40]}', "")) == 1


def test_a_range_without_width_holds_what_equals_it_in_the_digits_shown():
    assert Row("throughput_tokens_per_s", "tokens/s", 64.0, 64.0003, 64.0, 64.0).inside
    assert Row("throughput_tokens_per_s", "tokens/s", 64.0, 63.9996, 64.0, 64.0).inside
    assert Row("throughput_tokens_per_s", "tokens/s", 64.0, 64.2, 64.0, 64.0).inside is False
    assert Row("throughput_tokens_per_s", "tokens/s", 12345.2, 12345.4, 12345.2, 12345.2).inside
    assert Row("ttft_ms", "ms", 120.0, 99.9, 100.0, 150.0).inside is False
