"""What the latest cycles say."""

from sglang_hvd.payoff import RequestHistory


def history(window: int, *cycles: int | None) -> RequestHistory:
    made = RequestHistory(window)
    for cycle in cycles:
        made.record(cycle)
    return made


def figures(made: RequestHistory) -> tuple[float, float, int]:
    return made.cache_rate, made.mean_accepted, made.last_accepted


def test_before_the_first_cycle_everything_is_zero() -> None:
    assert figures(history(4)) == (0, 0, 0)


def test_cycles_without_a_cache_draft_lower_only_the_rate() -> None:
    assert figures(history(4, 8, None, 4, None)) == (0.5, 6, 4)


def test_a_cache_draft_of_which_nothing_was_accepted_counts() -> None:
    assert figures(history(4, 8, 0)) == (1, 4, 0)


def test_only_the_latest_cycles_count() -> None:
    assert figures(history(3, 9, None, 2, None)) == (1 / 3, 2, 2)
    assert figures(history(2, 9, None, None)) == (0, 0, 0)


def test_the_rate_is_over_the_cycles_so_far_until_the_window_is_full() -> None:
    assert history(8, 5).cache_rate == 1
