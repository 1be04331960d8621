"""What of SGLang's requests is recorded."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.schedule_batch import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_TOKEN,
    Req,
)
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from sglang_hvd.config import HvdConfig
from sglang_hvd.plugin.requests.recording import RequestRecorder
from sglang_hvd.traces.reader import read_traces
from sglang_hvd.traces.recording_folder import recordings
from sglang_hvd.traces.tokenizer_json import tokenizer_fingerprint
from sglang_hvd.traces.trace import Trace


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def finished(
    prompt: list[int],
    output: list[int],
    *,
    rid: str = "1",
    length: int | None = None,
    aborted: bool = False,
    **params: Any,
) -> Req:
    """length: of the output up to its stop."""
    sampling = SamplingParams(**{"temperature": 0, **params})
    sampling.normalize(None)
    req = Req(rid, "", array("q", prompt), sampling)
    req.output_ids = array("q", output)
    req.finished_len = length
    req.finished_reason = FINISH_ABORT() if aborted else FINISH_LENGTH(len(output))
    return req


def recorded(model: Path, folder: Path, *reqs: Req, namespaces: Sequence[str] = ()) -> list[Trace]:
    with get_context().override_server_args(served_model_name="a model", tokenizer_path=str(model)):
        recorder = RequestRecorder(HvdConfig(record=folder))
    for req, namespace in zip(reqs, namespaces or [""] * len(reqs), strict=True):
        prompt_ids = np.array(req.origin_input_ids, np.int32)
        recorder.record(req, prompt_ids, namespace=namespace)
    recorder._recorder.close()
    assert recorder.stats().num_dropped == 0
    return [trace for path in recordings(folder) for trace in read_traces(path)]


def test_a_request_is_recorded_up_to_its_stop(model: Path, tmp_path: Path) -> None:
    reqs = [finished([0, 1], [2, 2, 1], length=2), finished([0, 1, 2, 2, 0], [1])]
    first, second = recorded(model, tmp_path / "recorded", *reqs)
    assert (first.prompt_ids.tolist(), first.output_ids.tolist()) == ([0, 1], [2, 2])
    assert (second.session, second.turn) == (first.session, 1)
    assert (first.family, first.model) == ("recorded", "a model")
    assert first.tokenizer_fingerprint == tokenizer_fingerprint(model / "tokenizer.json")


def test_an_output_that_was_long_enough_is_recorded_as_cut(model: Path, tmp_path: Path) -> None:
    cut, whole = finished([0], [1]), finished([2], [1])
    whole.finished_reason = FINISH_MATCHED_TOKEN(matched=1)
    traces = recorded(model, tmp_path / "recorded", cut, whole)
    assert [trace.is_cut for trace in traces] == [True, False]


def test_namespaces_are_recorded_by_fingerprint(model: Path, tmp_path: Path) -> None:
    reqs = [finished([n], [1]) for n in range(4)]
    one_tenant, another = (hashlib.sha256(name).hexdigest() for name in (b"one", b"another"))
    namespaces = ["", one_tenant, another, one_tenant]
    traces = recorded(model, tmp_path / "recorded", *reqs, namespaces=namespaces)
    common, one, other, again = (trace.namespace for trace in traces)
    assert common == ""
    assert one == again != other
    assert all(re.fullmatch("[0-9a-f]{16}", namespace) for namespace in (one, other))


@pytest.mark.parametrize(
    ("params", "sampling"),
    [
        ({}, {"temperature": 0.0}),
        ({"temperature": 0.5}, {"temperature": 0.5, "top_p": 1.0}),
        (
            {"temperature": 1.0, "top_p": 0.5, "top_k": 20},
            {"temperature": 1.0, "top_p": 0.5, "top_k": 20},
        ),
        (
            {"frequency_penalty": 0.5, "repetition_penalty": 1.25, "min_p": 0.25},
            {
                "temperature": 0.0,
                "frequency_penalty": 0.5,
                "repetition_penalty": 1.25,
                "min_p": 0.25,
            },
        ),
    ],
)
def test_sampling_is_recorded_as_it_was_asked_for(
    model: Path, tmp_path: Path, params: dict[str, float], sampling: dict[str, float]
) -> None:
    [trace] = recorded(model, tmp_path / "recorded", finished([0], [1], **params))
    assert trace.sampling == sampling


def test_what_no_client_asked_for_or_got_is_left_out(model: Path, tmp_path: Path) -> None:
    reqs = [
        finished([0], [1], aborted=True),
        finished([0], [1], max_new_tokens=0),
        finished([0], [1], rid=f"{HEALTH_CHECK_RID_PREFIX}_1"),
        finished([0], []),
    ]
    assert recorded(model, tmp_path / "recorded", *reqs) == []


def test_true_is_recorded_as_the_number_that_sglang_takes_it_for(
    model: Path, tmp_path: Path
) -> None:
    req = finished([1, 2], [2, 1], temperature=True, top_p=True, top_k=True + 1)
    [trace] = recorded(model, tmp_path / "recorded", req)
    assert trace.sampling == {"temperature": 1.0, "top_p": 1.0, "top_k": 2}
    assert not any(isinstance(value, bool) for value in trace.sampling.values())
