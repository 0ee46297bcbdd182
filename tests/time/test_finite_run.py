"""Runs of a set number of requests against the discrete-event simulation, with an engine of a straight line."""

import numpy as np
import pytest

from planner.errors import PlannerError
from planner.validate.finite_run import Arrivals, finite_run
from tests.time.simulate import simulate

COUNT, PROMPT, OUTPUT, BUDGET = 300, 512, 129, 4096


def decode(sequences):
    return 5e-3 + 2e-5 * np.asarray(sequences, dtype=float)


def extra(sequences, chunk, step):
    return 1e-3 + 1e-5 * np.asarray(chunk, dtype=float)


def step_s(sequences, tokens):
    found = decode(max(sequences, 1))
    return float(found + (extra(sequences, tokens, found) if tokens else 0.0))


def followed(rate, equal, slots=1e9):
    one = np.ones(1)
    return finite_run(
        decode,
        extra,
        Arrivals(one * rate, float(COUNT), float(PROMPT), float(OUTPUT), one * slots, one * BUDGET, np.array([equal])),
    )


def outputs(equal):
    drawn = 1 + np.random.default_rng(2).geometric(1 / (OUTPUT - 1), COUNT)
    return [OUTPUT] * COUNT if equal else [int(v) for v in drawn]


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("rate", [np.inf, 400.0, 200.0])
def test_against_the_simulation(rate, equal):
    arrivals = [0.0] * COUNT if np.isinf(rate) else np.arange(COUNT) / rate
    lengths = outputs(equal)
    seen, found = simulate(step_s, arrivals, [PROMPT] * COUNT, lengths, BUDGET), followed(rate, equal)
    per_token = np.average(seen.tpot_s, weights=np.array(lengths) - 1.0)  # a short answer counts as little as it is
    assert found.ttft_s[0] == pytest.approx(seen.ttft_s.mean(), rel=0.15)
    assert found.tpot_s[0] == pytest.approx(per_token, rel=0.12)
    assert found.tokens_per_s[0] == pytest.approx(sum(lengths) / seen.span_s, rel=0.2)


def test_places_make_requests_wait():
    free, few = followed(np.inf, True), followed(np.inf, True, slots=50.0)
    assert few.ttft_s[0] > 2 * free.ttft_s[0]
    assert few.tpot_s[0] < free.tpot_s[0]


def test_one_token_answers_end():
    one = np.ones(1)
    found = finite_run(
        decode, extra, Arrivals(one * np.inf, 100.0, float(PROMPT), 1.0, one * 1e9, one * BUDGET, np.array([True]))
    )
    assert np.isfinite(found.tokens_per_s[0])


def test_a_run_that_is_cut_short_is_refused(monkeypatch):
    monkeypatch.setattr("planner.validate.finite_run.MOST", 3)
    with pytest.raises(PlannerError, match="did not end within 3 parts"):
        followed(np.inf, True)
