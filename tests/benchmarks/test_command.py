"""What the benchmarks' command lines have in common."""

import pytest

from benchmarks.command import run
from sglang_hvd.demo.server import ServerFailed


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
        (ServerFailed("it ended"), 2, "error: it ended\n"),
        (ValueError("no such file"), 2, "error: no such file\n"),
        (OSError("cannot write"), 2, "error: cannot write\n"),
    ],
)
def test_errors_of_a_benchmark_are_one_line_or_nothing(
    error: BaseException, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        raise error

    with pytest.raises(SystemExit) as ended:
        run(main)
    assert (ended.value.code, capsys.readouterr().err) == (code, told)


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1)])
def test_a_benchmark_ends_with_the_code_that_it_returns(returned: int | None, code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        run(lambda: returned)
    assert ended.value.code == code
