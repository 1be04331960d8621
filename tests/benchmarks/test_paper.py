"""The paper's harness on known inputs; tests/e2e/test_paper_run.py has it with real servers."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from benchmarks.command import run
from benchmarks.paper import __main__ as paper
from benchmarks.paper.data_sets import SAMPLES, Drawn, drawn_sets, signs_of
from benchmarks.paper.fleet import reason_of
from benchmarks.paper.join import side_by_side
from benchmarks.paper.kept import Job, KeptResult
from benchmarks.paper.models import LABELS, folder_of, models
from benchmarks.paper.predictor import selection_of
from benchmarks.paper.replies import Asker
from benchmarks.paper.run import Plan, measurement_of
from benchmarks.serving.client import Answer
from benchmarks.workloads.catalogue import workloads
from benchmarks.workloads.paper import PAPER
from benchmarks.workloads.prompts import Prompt
from sglang_hvd.demo.models import demo_models
from sglang_hvd.demo.reply_cycles import ReplyCycles
from sglang_hvd.demo.server import ServerFailed
from sglang_hvd.paper.results import DataSet, Machine, Measurement, Mode, Result
from sglang_hvd.paper.rounds import Measured
from sglang_hvd.paper.speed_tables import machines
from sglang_hvd.paper.table_values import METHODS, RunData
from sglang_hvd.payoff import AcceptancePredictor
from sglang_hvd.payoff.features import FEATURE_NAMES, PAPER_FEATURES, POSITION_FEATURES
from sglang_hvd.replay.core.training_rows import TrainingRows
from sglang_hvd.view.cycles import Cycle
from tests.benchmarks.workloads.samples import SAMPLES as SAMPLES_OF_ROWS
from tests.benchmarks.workloads.samples import data_of, write

JOB = Job("hvd", "mbpp", "official", 1, None, 0)


def cycle(at: int, source: str, accepted: int, cache_right: int | None = None) -> dict[str, Any]:
    return Cycle(
        at=at,
        source=source,  # type: ignore[arg-type]
        origin=None if cache_right is None else "shared",
        match=None if cache_right is None else 3,
        found=0 if cache_right is None else 8,
        cache=0 if cache_right is None else 8,
        model=0,
        steps=0,
        accepted=accepted,
        cache_right=cache_right,
        model_right=None,
        expected=None,
        if_cache=None,
        if_model=None,
        if_both=None,
        width=9,
        requests=1,
        ms=1.0,
    ).report()


def answer(
    number: int,
    token_ids: Sequence[int],
    *,
    num_cycles: int,
    num_accepted: int = 0,
    ttft: float = 0.1,
    gap: float = 0.01,
    cycles: Sequence[dict[str, Any]] = (),
) -> Answer:
    gaps = (gap,) * (len(token_ids) - 1)
    counts = ReplyCycles(num_cycles, num_accepted, 0)
    seconds = ttft + sum(gaps)
    return Answer(
        number, 0, "a", tuple(token_ids), seconds, ttft, gaps, counts, cycles=tuple(cycles)
    )


def test_a_measurement_counts_tokens_cycles_and_accepted_drafts() -> None:
    answers = [
        answer(
            0,
            [1, 2, 3, 4, 5, 6],
            num_cycles=2,
            num_accepted=3,
            cycles=[cycle(1, "cache", 3, 3), cycle(5, "plain", 0)],
        ),
        answer(
            1,
            [7, 8, 9],
            num_cycles=1,
            num_accepted=1,
            ttft=0.3,
            gap=0.03,
            cycles=[cycle(1, "both", 1, 0)],
        ),
    ]
    expected = {("0", 0): (1, 2, 3, 4, 5, 6), ("1", 0): (7, 8, 9)}
    found = measurement_of(JOB, answers, 1.5, expected=expected)
    assert (found.num_requests, found.num_tokens, found.seconds) == (2, 9, 1.5)
    assert (found.num_cycles, found.num_accepted) == (3, 4)
    assert found.cycles == {"cache": 1, "none": 1, "both": 1}
    assert found.accepted == {0: 1, 3: 1}
    assert found.ttft_ms == pytest.approx((200, 280, 298))
    assert found.tpot_ms == pytest.approx((20, 28, 29.8))
    assert found.is_identical
    assert Job.of(found) == JOB


def test_a_reply_that_differs_from_greedys_is_told() -> None:
    answers = [answer(0, [1, 2], num_cycles=1), answer(1, [3], num_cycles=0)]
    same = {("0", 0): (1, 2), ("1", 0): (3,)}
    assert measurement_of(JOB, answers, 1, expected=same).is_identical
    other = {**same, ("1", 0): (4,)}
    assert measurement_of(JOB, answers, 1, expected=other).is_identical is False
    assert measurement_of(JOB, answers, 1, expected=None).is_identical is None


def test_replies_that_greedy_does_not_have_are_not_called_identical() -> None:
    answers = [answer(0, [1, 2], num_cycles=1), answer(1, [3], num_cycles=0)]
    fewer = {("0", 0): (1, 2)}
    assert measurement_of(JOB, answers, 1, expected=fewer).is_identical is None
    assert measurement_of(JOB, answers, 1, expected={("0", 0): (9,)}).is_identical is False


@pytest.mark.parametrize(
    ("mode", "cycles"),
    [
        *(("greedy", {"none": 4}), ("eagle3", {"model": 4}), ("eagle3-adaptive", {"model": 4})),
        ("ngram", {}),  # SGLang does not say
    ],
)
def test_cycles_of_modes_without_hvd_have_one_source(mode: str, cycles: dict[str, int]) -> None:
    job = JOB._replace(mode=mode)
    found = measurement_of(job, [answer(0, [1] * 9, num_cycles=4)], 1, expected=None)
    assert (found.num_cycles, found.cycles, found.accepted) == (4, cycles, {})


def test_a_round_that_gave_no_reply_has_no_figures_but_its_error() -> None:
    found = measurement_of(JOB, [], 0.2, expected={}, error="the server was ended by SIGKILL")
    assert (found.num_requests, found.num_tokens, found.cycles) == (0, 0, {})
    assert (found.ttft_ms, found.tpot_ms, found.is_identical) == (None, None, None)


@pytest.mark.parametrize(("max_sequence", "num"), [(None, 500), (2000, 500), (600, None)])
def test_a_reply_ends_before_the_longest_sequence(
    max_sequence: int | None, num: int | None
) -> None:
    """SGLang refuses requests whose prompt and reply together may be longer."""
    asker = Asker(demo_models().target, 500, max_sequence)
    first = Prompt.of_user("word " * 20, "And then?")
    talk = asker.conversation(first, "official")
    body = talk([])
    assert body is not None
    num_prompt = len(body["input_ids"])
    given = body["sampling_params"]["max_new_tokens"]
    assert given == (num or 600 - 128 - num_prompt)
    told = answer(0, [5] * 3, num_cycles=2)
    again = talk([told])
    assert again is not None
    assert again["input_ids"][:num_prompt] == body["input_ids"]
    traces = asker.traces([talk], [told, replace(told, turn=1, token_ids=(7,) * 500)], "chat")
    assert [len(trace.prompt_ids) for trace in traces] == [num_prompt, len(again["input_ids"])]
    assert [trace.is_cut for trace in traces] == [False, True]
    assert [(trace.session, trace.turn) for trace in traces] == [("0", 0), ("0", 1)]


def test_without_a_template_the_texts_are_sent_as_they_are() -> None:
    asker = Asker(demo_models().target, 8)
    bodies = [asker.conversation(Prompt.of_user("Hello."), t)([]) for t in ("none", "official")]
    texts = [
        asker.tokenizer.loaded.decode(b["input_ids"], skip_special_tokens=False)
        for b in bodies
        if b
    ]
    assert texts[0] == "Hello."
    assert texts[1].startswith("<|im_start|>user\nHello.<|im_end|>")


def plan(**settings: Any) -> Plan:
    given: dict[str, Any] = {
        "concurrency": (1, 4),
        "rates": (),
        "rounds": 2,
        "template": "official",
        "with_table_4": True,
    }
    return Plan(**{**given, **settings})


@pytest.mark.parametrize("all_at_once", [True, False])
def test_modes_take_turns_and_each_measures_every_cell_in_every_round(all_at_once: bool) -> None:
    modes, sets = ["greedy", "eagle3", "hvd"], ["mbpp", "mt-bench"]
    jobs = list(plan(rates=(2.0,)).jobs(modes, sets, all_at_once=all_at_once))
    cells = {job[1:-1] for job in jobs}
    assert len(jobs) == len(set(jobs)) == len(cells) * len(modes) * 2
    assert cells == {
        *((name, "official", number, None) for name in sets for number in (1, 4)),
        *((name, "official", 1, 2.0) for name in sets),
        ("mt-bench", "none", 1, None),  # table 4
    }
    # Its first replies are what those of other modes are compared with.
    for name, template in {(job.data_set, job.template) for job in jobs}:
        first = next(job for job in jobs if (job.data_set, job.template) == (name, template))
        assert (first.mode, first.concurrency, first.rate) == ("greedy", 1, None)
    assert jobs[len(jobs) // 2].mode == "eagle3"  # another mode begins the second round
    changes = sum(one.mode != other.mode for one, other in pairwise(jobs))
    if not all_at_once:  # a server starts once in a round
        assert changes == len(modes) * 2 - 1


def test_table_4_needs_its_data_set_and_both_templates() -> None:
    for found, sets in ((plan(), ["mbpp"]), (plan(with_table_4=False), ["mbpp", "mt-bench"])):
        jobs = found.jobs(["greedy"], sets, all_at_once=True)
        assert {job.template for job in jobs} == {"official"}


def test_signs_are_counted_per_thousand_characters() -> None:
    code = 'def load_rows(path):\n    return read(src/table.py)\n{"name": TEXT}\nload_rows'
    filler = " " * (500 - len(code))
    signs = signs_of([Prompt.of_user(code + filler)])
    assert signs["file paths"] == pytest.approx(2)
    assert signs["code patterns"] == pytest.approx(2 * 4)  # def, load_rows(, return, read(
    assert signs["delimiters"] == pytest.approx(2 * 6)
    assert signs["schema fields"] == pytest.approx(2)
    assert signs["repeated names"] == pytest.approx(2)  # load_rows
    assert signs_of([Prompt.of_user(code + filler)] * 2) == signs


def predictor_of_draft_length() -> AcceptancePredictor:
    """Predicts that half of the draft is accepted."""
    weights = np.zeros((1, len(PAPER_FEATURES)), np.float32)
    weights[0, PAPER_FEATURES.index("draft_len")] = 0.5
    return AcceptancePredictor(
        kind="mlp",
        mean=np.zeros(len(PAPER_FEATURES), np.float32),
        std=np.ones(len(PAPER_FEATURES), np.float32),
        weights=(weights,),
        biases=(np.zeros(1, np.float32),),
        settings={},
        provenance={},
    )


def test_selection_counts_drafts_by_predicted_and_true_length() -> None:
    draft_lens = np.array([4, 20, 20, 12, 11] * 4, np.int32)
    accepted = np.array([4, 20, 5, 6, 11] * 4, np.int32)
    features = np.zeros((20, len(FEATURE_NAMES)), np.float32)
    features[:, FEATURE_NAMES.index("draft_len")] = draft_lens
    rows = TrainingRows(
        features,
        np.zeros((20, 20, len(POSITION_FEATURES)), np.float32),
        draft_lens,
        accepted,
        np.zeros(20, bool),
        np.ones(20, bool),
    )
    found = selection_of("mbpp", rows, predictor_of_draft_length())
    assert (found.num_proposed, found.threshold) == (20, 6)
    # Predicted are 2, 10, 10, 6 and 5.5.
    assert (found.num_high, found.num_selected, found.num_both) == (12, 12, 8)
    assert len(found.calibration) == 10
    assert sum(of_bin.num_drafts for of_bin in found.calibration) == 20
    assert found.calibration[0].predicted == pytest.approx(2)
    assert found.calibration[0].accepted == pytest.approx(4)
    predicted = [of_bin.predicted for of_bin in found.calibration]
    assert predicted == sorted(predicted)
    none = selection_of("mbpp", None, predictor_of_draft_length())
    assert (none.num_proposed, none.num_both, none.calibration) == (0, 0, ())


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("the target needs 80 GB", "the target needs 80 GB"),
        (
            "the server ended with code 1:\n"
            '  File "/x/runner.py", line 9, in capture\n'
            '  File "/x/base_backend.py", line 258, in init_state\n'
            "    raise NotImplementedError()\nNotImplementedError\n\n[2026-01-01] Received sigquit",
            "NotImplementedError in init_state (base_backend.py)",
        ),
        (
            "the server ended with code 1:\ntorch.OutOfMemoryError: CUDA out of memory.\nkilled",
            "torch.OutOfMemoryError: CUDA out of memory.",
        ),
        ("no answer after 180 s:\nloading", "no answer after 180 s"),
    ],
)
def test_why_a_server_does_not_start_is_one_line(log: str, told: str) -> None:
    assert reason_of(ServerFailed(log)) == told


def result(**fields: Any) -> Result:
    given: dict[str, Any] = {
        "model": "demo",
        "target": "target",
        "drafter": "drafter",
        "machine": Machine(gpu=None, num_gpus=0, cpu="made up", num_cores=2, memory_gb=8),
        "versions": {"sglang": "1"},
        "command": "python -m benchmarks.paper",
        "started": datetime(2026, 1, 1, tzinfo=UTC),
        "seed": 42,
        "max_new_tokens": 64,
        "shared_flags": ("--dtype", "float32"),
        "modes": (
            Mode(name="greedy", label="Greedy", flags=()),
            Mode(name="eagle3", label="EAGLE3", flags=("--speculative-algorithm", "EAGLE3")),
        ),
        "data_sets": (),
        "training": None,
        "measurements": (),
        "selections": (),
        "is_complete": False,
    }
    return Result(**{**given, **fields})


def measurement(mode: str, *, seconds: float, num_cycles: int = 10, **fields: Any) -> Measurement:
    job = {**JOB._asdict(), "mode": mode, **fields}
    return Measurement(
        **{
            "num_requests": 1,
            "num_tokens": 100,
            "seconds": seconds,
            "num_cycles": num_cycles,
            "num_accepted": 50,
            "cycles": {},
            **job,
        }
    )


def test_a_run_goes_on_with_what_its_folder_has(tmp_path: Path) -> None:
    kept = KeptResult(tmp_path, result())
    kept.add(measurement("greedy", seconds=2))
    kept.add(measurement("eagle3", seconds=1, error="the server was ended by SIGKILL"))
    kept.change(is_complete=True)
    kept.close()
    again = KeptResult(tmp_path, result(started=datetime(2026, 2, 2, tzinfo=UTC)))
    assert again.result.started == datetime(2026, 1, 1, tzinfo=UTC)
    assert not again.result.is_complete
    # What an error ended is measured again, in its place.
    assert again.done() == {JOB._replace(mode="greedy")}
    again.add(measurement("eagle3", seconds=3))
    assert [m.seconds for m in again.result.measurements] == [2, 3]
    assert again.done() == {JOB._replace(mode="greedy"), JOB._replace(mode="eagle3")}
    again.close()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"seed": 7}, "seed"),
        ({"shared_flags": ()}, "shared_flags"),
        ({"versions": {"sglang": "2"}}, "versions"),
        ({"modes": (Mode(name="greedy", label="Greedy", flags=()),)}, "modes"),
    ],
)
def test_a_folder_with_other_settings_is_refused(
    fields: dict[str, Any], told: str, tmp_path: Path
) -> None:
    KeptResult(tmp_path, result()).close()
    before = (tmp_path / "result.json").read_bytes()
    with pytest.raises(ValueError, match=rf"other settings \({told} differ\)"):
        KeptResult(tmp_path, result(**fields))
    assert (tmp_path / "result.json").read_bytes() == before
    KeptResult(tmp_path, result()).close()  # nothing holds the folder


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    kept = KeptResult(tmp_path, result())
    with pytest.raises(ValueError, match=r"^another run writes into"):
        KeptResult(tmp_path, result())
    kept.close()
    KeptResult(tmp_path, result()).close()


def test_a_result_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a result of benchmarks\.paper: model"):
        KeptResult(tmp_path, result())


Draw = Callable[..., list[Drawn]]


@pytest.fixture
def draw_samples(tmp_path: Path) -> Draw:
    def draw(*names: str, **settings: Any) -> list[Drawn]:
        given: dict[str, Any] = {
            "are_samples": True,
            "copies": None,
            "num_measured": 3,
            "num_at_once": 4,
            "num_warm_up": 5,
            "seed": 42,
        }
        return drawn_sets(names, tmp_path, **{**given, **settings})

    return draw


def test_prompts_are_drawn_once_and_samples_are_marked(draw_samples: Draw) -> None:
    first = draw_samples("mt-bench", "delegate-52")
    assert [drawn.about.name for drawn in first] == ["delegate-52", "mt-bench"]
    assert draw_samples("delegate-52", "mt-bench") == first
    for drawn in first:
        assert drawn.about.is_sample
        assert drawn.about.revision is None
        assert (drawn.about.num_measured, drawn.about.num_warm_up) == (3, 5)
        assert [len(drawn.prompts_for(number)) for number in (1, 4)] == [3, 4]
        assert not {p.key for p in drawn.measured} & {p.key for p in drawn.warm_up}
        assert all(prompt.follow_ups for prompt in drawn.measured)


def test_an_open_loop_never_waits_for_a_place_in_the_server(draw_samples: Draw) -> None:
    drawn = draw_samples("mt-bench", "mbpp", num_measured=5)
    assert paper.max_running([1, 2], [], drawn) == 2
    assert paper.max_running([1, 2], [0.5], drawn) == 5
    assert paper.max_running([1, 32], [0.5], drawn) == 32


def test_prompts_of_other_settings_are_refused(draw_samples: Draw) -> None:
    draw_samples("mbpp")
    with pytest.raises(ValueError, match=r"mbpp.json was drawn with other settings \(seed differ"):
        draw_samples("mbpp", seed=7)


def test_samples_of_one_family_have_prompts_of_their_own(draw_samples: Draw) -> None:
    names = [name for name, family in SAMPLES.items() if family == "qa"]
    assert len(names) == 2
    one, other = draw_samples(*names)
    assert not {prompt.key for prompt in one.measured} & {prompt.key for prompt in other.measured}


def test_every_data_set_of_the_paper_has_a_revision() -> None:
    assert all(workload.revision for workload in PAPER)


def test_a_data_set_is_drawn_with_the_source_and_the_revision_of_its_loader(
    draw_samples: Draw, tmp_path: Path
) -> None:
    write(data_of(workloads()["mbpp"]), SAMPLES_OF_ROWS["mbpp"], tmp_path / "copies")
    [drawn] = draw_samples("mbpp", are_samples=False, copies=tmp_path / "copies")
    assert drawn.about.source.startswith("hub:google-research-datasets/mbpp@")
    assert drawn.about.revision == "4bb6404fdc6cacfda99d4ac4205087b89d32030c"
    assert not drawn.about.is_sample
    assert len(drawn.measured) == 4
    assert SAMPLES_OF_ROWS["mbpp"].said in str(drawn.measured[0].request(None))


def test_a_checkpoint_that_is_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="connect to the network") as error:
        folder_of("Qwen/Qwen3-8B", "tokenizer*")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-4b", "llama3.1-8b"])
def test_the_papers_models_are_served_as_the_paper_says(name: str) -> None:
    """Tables 5 to 7."""
    model = models()[name]
    flags = {mode.name: mode.flags for mode in model.modes(list(LABELS), Path("/x/p.safetensors"))}
    assert (model.target, model.drafter) == {
        "qwen3-8b": ("Qwen/Qwen3-8B", "Tengyunw/qwen3_8b_eagle3"),
        "qwen3-4b": ("Qwen/Qwen3-4B", "AngelSlim/Qwen3-4B_eagle3"),
        "llama3.1-8b": (
            "meta-llama/Llama-3.1-8B-Instruct",
            "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        ),
    }[name]
    assert model.max_new_tokens == 8192
    assert " ".join(model.shared).startswith("--dtype float16 --context-length 16384")
    assert flags["greedy"] == ()
    tree = "--speculative-num-steps 8 --speculative-eagle-topk 4 --speculative-num-draft-tokens 32"
    drafting = f"--speculative-draft-model-path {model.drafter} {tree}"
    assert " ".join(flags["eagle3"]) == f"--speculative-algorithm EAGLE3 {drafting}"
    for mode in ("suffix", "frequency", "hvd-paper"):
        assert drafting in " ".join(flags[mode])
        assert str(model.paper_config) in flags[mode]
    assert model.paper_config.is_file()
    assert Path(model.config[1]).is_file()
    assert flags["hvd-paper"][-2:] == ("--hvd-predictor", "/x/p.safetensors")
    # Its chains are SGLang's own choice.
    assert "--speculative-adaptive" in flags["eagle3-adaptive"]
    assert "--speculative-eagle-topk" not in flags["eagle3-adaptive"]


def data_set(name: str, **fields: Any) -> DataSet:
    given: dict[str, Any] = {
        "name": name,
        "family": "code / repository",
        "source": "hub:made/up@12345678 test",
        "licence": "MIT",
        "revision": "1" * 40,
        "is_sample": False,
        "num_measured": 4,
        "num_warm_up": 8,
        "signs": {},
    }
    return DataSet(**{**given, **fields})


def test_runs_of_two_machines_are_put_side_by_side() -> None:
    def of_machine(gpu: str, greedy: float, eagle3: float) -> Result:
        machine = Machine(gpu=gpu, num_gpus=1, cpu="made up", num_cores=2, memory_gb=8)
        return result(
            machine=machine,
            data_sets=(data_set("mbpp"), data_set("H100"), data_set("B200")),
            measurements=(
                measurement("greedy", seconds=greedy, num_cycles=99),
                measurement("greedy", seconds=greedy, num_cycles=99, round=1),
                measurement("eagle3", seconds=eagle3, num_cycles=30),
                measurement("eagle3", seconds=9, num_cycles=30, template="none"),
                measurement("eagle3", seconds=9, num_cycles=30, rate=2.0),
                measurement("eagle3", seconds=9, num_cycles=30, data_set=gpu),
                measurement("eagle3", seconds=9, num_cycles=30, round=1, error="gone"),
            ),
        )

    rows = side_by_side([of_machine("H100", 2, 1), of_machine("B200", 1, 0.8)])
    assert [(row["machine"], row["mode"]) for row in rows] == [
        ("H100", "Greedy"),
        ("B200", "Greedy"),
        ("H100", "EAGLE3"),
        ("B200", "EAGLE3"),
    ]
    assert [row["tokens_per_s"] for row in rows] == pytest.approx([50, 100, 100, 125])
    assert [row["speedup"] for row in rows] == pytest.approx([0.5, 0.8, 1, 1])
    assert [row["cycles_per_1k"] for row in rows] == pytest.approx([990, 990, 300, 300])
    with pytest.raises(ValueError, match="runs of different model cannot be compared: demo, qwen"):
        side_by_side([result(), result(model="qwen3-8b")])
    with pytest.raises(ValueError, match="no measurement in common"):
        side_by_side([of_machine("H100", 2, 1), result()])
    other = of_machine("B200", 1, 0.8).model_copy(
        update={"data_sets": tuple(data_set(n, num_measured=5) for n in ("mbpp", "H100", "B200"))}
    )
    with pytest.raises(ValueError, match="no measurement in common"):
        side_by_side([of_machine("H100", 2, 1), other])
    same = side_by_side([of_machine("H100", 2, 1)] * 2)
    assert {row["machine"] for row in same} == {"H100 (run 1)", "H100 (run 2)"}


def two_sets(gpu: str, *, without: Sequence[tuple[str, str, int]] = ()) -> Result:
    """Two rounds of two data sets, in which EAGLE3 is twice as fast as greedy decoding.

    without: the modes, data sets and rounds that an error ended.
    """
    return result(
        machine=Machine(gpu=gpu, num_gpus=1, cpu="made up", num_cores=2, memory_gb=8),
        data_sets=(data_set("fast"), data_set("slow")),
        measurements=tuple(
            measurement(
                mode,
                seconds=seconds * slower,
                data_set=name,
                round=number,
                error="gone" if (mode, name, number) in without else None,
            )
            for mode, seconds in (("greedy", 2), ("eagle3", 1))
            for name, slower in (("fast", 1), ("slow", 10))
            for number in range(2)
        ),
    )


@pytest.mark.parametrize("mode", ["greedy", "eagle3"])
def test_a_broken_round_of_a_data_set_does_not_change_a_comparison(mode: str) -> None:
    """A side that lacks a round of one data set would else have another mix of data sets."""
    broken = two_sets("H100", without=[(mode, "slow", 1)])
    rows = side_by_side([broken, two_sets("B200")])
    assert [row["speedup"] for row in rows] == pytest.approx([0.5, 0.5, 1, 1])
    # 200 tokens in 22 and in 11 seconds.
    assert [row["tokens_per_s"] for row in rows] == pytest.approx([200 / 22] * 2 + [200 / 11] * 2)


def test_a_side_without_a_whole_round_has_no_figure_and_the_others_keep_theirs() -> None:
    broken = [("greedy", "slow", 0), ("eagle3", "fast", 1)]
    rows = side_by_side([two_sets("H100", without=broken), two_sets("B200")])
    assert [row["speedup"] for row in rows] == [None, 0.5, 1, 1]
    never = two_sets("H100", without=[("eagle3", "slow", 0), ("eagle3", "fast", 1)])
    rows = side_by_side([never, two_sets("B200")])
    assert [row["tokens_per_s"] for row in rows][2:] == [None, pytest.approx(200 / 11)]


def test_join_has_the_figures_of_the_report_page() -> None:
    random, modes = Random(4), ("eagle3", *METHODS)

    def of_machine(gpu: str) -> Result:
        return result(
            machine=Machine(gpu=gpu, num_gpus=1, cpu="made up", num_cores=2, memory_gb=8),
            modes=tuple(Mode(name=name, label=LABELS[name], flags=()) for name in modes),
            data_sets=(data_set("mbpp"), data_set("human-eval")),
            measurements=tuple(
                measurement(
                    mode,
                    seconds=random.uniform(1, 9),
                    num_cycles=random.randint(9, 90),
                    data_set=name,
                    round=number,
                )
                for mode in modes
                for name in ("mbpp", "human-eval")
                for number in range(3)
            ),
        )

    runs = [of_machine("H100"), of_machine("B200")]
    rows = side_by_side(runs)
    page = machines(RunData.all_of(runs)).rows
    found = [[row for row in rows if row["machine"] == gpu] for gpu in ("H100", "B200")]
    for row, of_page in zip(found, page, strict=False):
        cells = [cell.value for cell in of_page.cells if isinstance(cell, Measured)]
        assert cells == [
            *(one[name] for one in row for name in ("tokens_per_s", "cycles_per_1k")),
            *(one["speedup"] for one in row[1:]),
        ]


def test_runs_with_and_without_a_template_are_not_compared() -> None:
    runs = [
        result(
            data_sets=(data_set("mbpp"),),
            measurements=(measurement("eagle3", seconds=2, template=template),),
        )
        for template in ("official", "none")
    ]
    with pytest.raises(ValueError, match="runs of different template cannot be compared: none, of"):
        side_by_side(runs)


def test_join_reads_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"{number}.json" for number in range(2)]
    made = result(
        data_sets=(data_set("mbpp"),), measurements=(measurement("eagle3", seconds=2),)
    ).model_dump_json()
    for path in paths:
        path.write_text(made)
    assert paper.main(["join", *map(str, paths)]) == 0
    assert capsys.readouterr().out.count("EAGLE3") >= 2


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--model", "qwen3-80b"], "invalid choice: 'qwen3-80b'"),
        (["--model", "demo", "--modes", "eagle3,fast"], "fast: unknown, choose from greedy"),
        (["--model", "demo", "--data-sets", "alpaca"], "alpaca: the demo has samples of"),
        (["--model", "demo", "--data-sets", "mbpp,mbpp"], "mbpp, mbpp: give each data set once"),
        (["--model", "demo", "--template", "mine"], "invalid choice: 'mine'"),
        (["--model", "qwen3-8b"], "--model qwen3-8b: torch finds no GPU: give --model demo"),
        (["--model", "demo", "--out", "/proc/self/new"], "--out: cannot write into"),
    ],
)
def test_mistakes_are_one_line(
    flags: list[str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paper, "ServerForker", lambda environment: pytest.fail("a server starts"))
    given = [*(["--out", str(tmp_path)] if "--out" not in flags else []), *flags]
    with pytest.raises(SystemExit) as ended:
        run(lambda: paper.main(given))
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert told in line
    assert not any(tmp_path.iterdir()), "a mistake leaves no file"


def test_a_complete_file_has_the_schema_of_the_report(tmp_path: Path) -> None:
    kept = KeptResult(tmp_path, result())
    kept.add(measurement("greedy", seconds=2))
    kept.close()
    assert json.loads((tmp_path / "result.json").read_text())["format_version"] == 1


def test_make_paper_small_measures_samples_of_every_family() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text().replace("\\\n", " ")
    [flags] = re.findall(r"-m benchmarks\.paper (.*) \$\(ARGS\)", makefile)
    options = paper._options(shlex.split(flags))
    assert (options.model, options.modes, options.rounds) == ("demo", list(LABELS), 2)
    families = {workload.name: workload.family for workload in PAPER}
    assert {families[name] for name in options.data_sets} == set(families.values())
    # Tables 3 and 4 and figure 5 are about these.
    assert {"mt-bench", "cnn-dailymail", "infinitebench"} <= set(options.data_sets)
