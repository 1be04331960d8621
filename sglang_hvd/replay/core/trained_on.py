"""Tells the user which sessions are not judged because a predictor was trained on them."""

import sys
from collections.abc import Sequence

from sglang_hvd.replay.core.recordings import Recording

NOTHING_LEFT = (
    "no session is left to judge, because the predictors were trained on all of them: give other "
    "--traces"
)
_NOTHING_AFTER_WARM_UP = (
    "no session is left to judge, because the predictors were trained on all sessions after "
    "--warm-up: lower --warm-up or give other --traces"
)
NOTHING_DECODED = (
    "nothing was decoded in the sessions that are judged, because their replies are empty: give "
    "other --traces"
)


def tell_trained_on(
    recordings: Sequence[Recording], trained_on: frozenset[str], *, warm_up: float = 0.0
) -> None:
    """Prints on stderr how many sessions a predictor was trained on, and in which files. Such
    sessions only fill the shared cache.

    trained_on: fingerprints of the sessions that a predictor was trained on.
    warm_up: share of each recording's sessions, from the first on, that are not judged either.

    Raises ValueError, in one line, if no session is left to judge or a file cannot be read.
    """
    sessions = {recording.path: recording.session_fingerprints() for recording in recordings}
    judged = [
        fingerprint
        for of_file in sessions.values()
        for fingerprint in of_file[int(len(of_file) * warm_up) :]
        if fingerprint not in trained_on
    ]
    num_sessions = sum(map(len, sessions.values()))
    if num_sessions and not judged:
        raise ValueError(_NOTHING_AFTER_WARM_UP if warm_up else NOTHING_LEFT)
    num_trained = {
        path.stem: sum(fingerprint in trained_on for fingerprint in of_file)
        for path, of_file in sessions.items()
    }
    names = [name for name, num in num_trained.items() if num]
    if names:
        print(
            f"{sum(num_trained.values())} of {num_sessions} sessions (in {', '.join(names)}) only "
            "fill the cache: a predictor was trained on them",
            file=sys.stderr,
        )
