"""DeepSpeed ZeRO-3's rules on module calls written by hand."""

from planner.validate.dry_zero3 import Call, Gathers

RULES = {
    "stage3_prefetch_bucket_size": 10, "stage3_param_persistence_threshold": 1, "stage3_max_live_parameters": 10**9,
    "stage3_max_reuse_distance": 0,
}  # fmt: skip


def step(sizes):
    """Modules one after the other: forward, then backward in reverse order."""
    calls = []
    for back, order in ((False, list(enumerate(sizes))), (True, list(enumerate(sizes))[::-1])):
        calls += [Call(i, fetch, back, ((i, n),)) for i, n in order for fetch in (True, False)]
    return calls


def gathered(sizes, **rules):
    return Gathers(step(sizes), RULES | {f"stage3_{k}": v for k, v in rules.items()}).run()


def test_without_prefetch_all_but_the_last_are_gathered_twice():
    """The last module's backward follows its forward, where nothing is between."""
    assert gathered([100] * 5, prefetch_bucket_size=0, max_reuse_distance=1).elements == 2 * 500 - 100


def test_nothing_is_kept_without_reuse_or_prefetch():
    got = gathered([100] * 5, prefetch_bucket_size=0)
    assert (got.elements, got.most) == (1000, [100])


def test_a_reuse_distance_keeps_what_comes_again_soon():
    """Module i is used again after (4 - i) modules forward and as many backward."""
    for distance, kept in ((1, 1), (200, 1), (201, 2), (400, 2), (401, 3), (10**6, 5)):
        assert gathered([100] * 5, prefetch_bucket_size=0, max_reuse_distance=distance).elements == 1000 - 100 * kept


def test_prefetch_keeps_what_it_finds_alive():
    """At the turn it scans over the last modules, which then stay for their backward."""
    assert gathered([100] * 5, prefetch_bucket_size=200).elements < 1000 - 100


def test_no_more_is_prefetched_than_may_live():
    assert gathered([100] * 20, prefetch_bucket_size=1000, max_live_parameters=300).most[0] <= 400
    assert gathered([100] * 20, prefetch_bucket_size=1000).most[0] > 900


def test_vectors_are_not_gathered():
    assert gathered([1] * 5).elements == 0


def test_most_alive_is_told_by_moment():
    calls = step([100, 200, 300])
    got = Gathers(calls, RULES | {"stage3_prefetch_bucket_size": 0}, starts=(0, 4)).run()
    assert got.most == [200, 300]
