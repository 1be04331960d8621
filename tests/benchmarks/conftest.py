"""Made-up recordings, as the commands on recordings are tested with."""

from tests.replay.conftest import made_up_traces, number_tokenizer, write_traces

__all__ = ["made_up_traces", "number_tokenizer", "write_traces"]
