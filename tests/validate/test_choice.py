"""Choice quality: regret and rank correlation on small groups whose answer is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.validate.choice import choice_scores, ranks, regrets, spearman
from planner.validate.prediction import Prediction


def rows(metric, values, **same):
    base = {"metric": metric, "model": "m", "gpu": "g", "n_gpus": "8", "source": "paper table 3 L12", **same}
    return [{**base, "tp": str(2**i), "value": str(v)} for i, v in enumerate(values)]


def guesses(*values):
    return [Prediction(v, None, None) for v in values]


def test_times_are_better_low_and_rates_high():
    (low,) = choice_scores("serving", rows("tpot_ms", [10, 12, 20]), guesses(11, 10, 30))
    assert (low.groups, low.rows) == (1, 3)
    assert low.median_regret == pytest.approx(0.2)
    assert low.best_picked == 0.0
    assert low.random_regret == pytest.approx((0 + 0.2 + 1.0) / 3)
    assert low.rank_correlation == pytest.approx(0.5)
    (high,) = choice_scores("serving", rows("output_tok_s_total", [100, 80]), guesses(5, 9))
    assert high.median_regret == pytest.approx(0.25)


def test_rows_of_other_loads_models_or_sources_are_no_alternatives():
    near = rows("tpot_ms", [10, 12])
    for change in ({"isl": "128"}, {"model": "n"}, {"source": "another paper L1"}, {"n_gpus": "4"}):
        assert choice_scores("serving", [near[0], {**near[1], **change}], guesses(1, 2)) == []
    assert choice_scores("serving", [near[0], {**near[1], "source": "paper table 3 L99"}], guesses(1, 2)) != []


def test_repeats_of_one_setting_are_one_alternative():
    repeated = [*rows("tpot_ms", [10]), *rows("tpot_ms", [30])]
    assert choice_scores("serving", repeated, guesses(1, 2)) == []


def test_rows_without_a_prediction_take_no_part():
    assert (
        choice_scores(
            "serving", rows("tpot_ms", [10, 12]), [Prediction(1.0, None, None), Prediction(None, None, None, "why")]
        )
        == []
    )


values = st.lists(st.floats(0.1, 100), min_size=2, max_size=8)


@given(values, st.booleans())
def test_a_perfect_prediction_has_no_regret_and_full_rank(truth, high):
    regret, chance = regrets(truth, truth, high)
    assert regret == pytest.approx(0.0)
    assert chance >= 0
    if len(set(truth)) > 1:
        assert spearman(truth, truth) == pytest.approx(1.0)
        assert spearman(truth, [-v for v in truth]) == pytest.approx(-1.0)


@given(values)
def test_ranks_sum_as_without_ties(found):
    assert sum(ranks(found)) == pytest.approx(len(found) * (len(found) + 1) / 2)
