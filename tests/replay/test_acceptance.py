"""What a recording accepts of drafts."""

import numpy as np

from sglang_hvd.replay.acceptance import right_branch


def test_a_tree_goes_as_far_as_one_of_its_branches() -> None:
    # 5 and, behind it, 6 or 7; behind 7 another 6.
    token_ids, parents = np.array([5, 6, 7, 6], np.int32), np.array([-1, 0, 0, 2], np.int32)
    for text, branch in (
        ([5, 7, 6, 6], [0, 2, 3]),
        ([5, 6, 7], [0, 1]),
        ([6, 5], []),
        ([5], [0]),
        ([], []),
    ):
        assert right_branch(token_ids, parents, np.array(text, np.int32)) == branch
