"""The paper's configuration equals appendices A and B, table by table."""

import argparse
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_hvd.cli import main
from sglang_hvd.config import PAPER_SETTINGS, PAPER_THRESHOLD, HvdConfig, load_config
from sglang_hvd.demo.models import demo_models
from sglang_hvd.demo.modes import PAPER_MODES, server_flags
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import FEATURE_NAMES, AcceptancePredictor, TokenClasses
from sglang_hvd.payoff.features import PAPER_FEATURES
from sglang_hvd.payoff.predictor import PAPER_PREDICTORS, predictor_file
from sglang_hvd.payoff.tracker import DraftFeatures
from sglang_hvd.plugin.startup.flags import (
    add_hvd_flags,
    config_file_and_overrides,
    keep_hvd_flags,
)
from sglang_hvd.replay.core.replayed import replay, training_rows
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.traces.trace import Trace
from tests.suffix_cache.oracle.cache import OracleCache

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = ("paper-qwen3-8b", "paper-qwen3-4b", "paper-llama-3.1-8b")

# Table 5: target model checkpoint and EAGLE3 checkpoint.
TABLE_5 = {
    "paper-qwen3-8b": ("Qwen/Qwen3-8B", "Tengyunw/qwen3_8b_eagle3"),
    "paper-qwen3-4b": ("Qwen/Qwen3-4B", "AngelSlim/Qwen3-4B_eagle3"),
    "paper-llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B-Instruct",
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    ),
}
# Table 6, generation.
BATCH_SIZE, MAX_NEW_TOKENS, MAX_SEQUENCE_LENGTH, TEMPERATURE = 1, 8192, 16384, 0.0
DATA_TYPE = "float16"
# Table 7, drafting.
EAGLE3 = {"total draft tokens": 32, "tree depth": 8, "top-k": 4}
SUFFIX_CACHE = {
    "max_depth": 64,
    "max_draft_tokens": 64,
    "max_spec_factor": 1.0,
    "max_spec_offset": 0.0,
    "min_token_prob": 0.1,
}
# Table 9, predictor features: the groups, and our names of what each describes.
TABLE_9 = {
    "cache match": ("score", "match_len", "draft_len"),
    "decode state": ("log_prompt_len", "log_generated_len", "relative_position"),
    "recent history": ("recent_cache_rate", "recent_mean_accepted", "recent_last_accepted"),
    "draft structure": ("whitespace", "punctuation", "line_break", "bracket", "delimiter"),
}
# Table 10, training.
HIDDEN_LAYERS, HIDDEN_SIZE, LEARNING_RATE, TRAIN_BATCH_SIZE, EPOCHS, SEED = (
    *(2, 256, 0.001),
    *(65536, 20, 42),
)
# Section 3.4 and appendix B, "Runtime Use": at least 6.
THRESHOLD = 6

of_files = pytest.mark.parametrize("name", NAMES)


def config_of(name: str) -> HvdConfig:
    return load_config(CONFIGS / f"{name}.yaml", {}, {})


@of_files
def test_the_launch_command_is_that_of_tables_5_to_7(name: str) -> None:
    comments = [line.lstrip("# ") for line in (CONFIGS / f"{name}.yaml").read_text().splitlines()]
    text = " ".join(comments).replace("\\ ", "")
    command = text.partition("sglang.launch_server ")[2]
    flags = dict(re.findall(r"--([a-z0-9-]+) (\S+)", command.partition("Requests")[0]))
    assert (flags["model-path"], flags["speculative-draft-model-path"]) == TABLE_5[name]
    assert flags["dtype"] == DATA_TYPE
    assert int(flags["context-length"]) == MAX_SEQUENCE_LENGTH
    assert int(flags["max-running-requests"]) == BATCH_SIZE
    tree = ("num-draft-tokens", "num-steps", "eagle-topk")
    assert [int(flags[f"speculative-{part}"]) for part in tree] == [*EAGLE3.values()]
    assert flags["hvd-config"] == f"configs/{name}.yaml"
    assert f"temperature {TEMPERATURE:.0f} and max_new_tokens {MAX_NEW_TOKENS}" in text


@of_files
def test_the_suffix_cache_is_that_of_table_7(name: str) -> None:
    config = config_of(name)
    assert {key: getattr(config, key) for key in SUFFIX_CACHE} == SUFFIX_CACHE
    assert config.cache_mode == "paper"
    # No draft is cut: the root and 64 tokens fit. The model drafter's tree has a width of its own.
    assert config.verify_width == 1 + SUFFIX_CACHE["max_draft_tokens"]
    assert config.narrow_widths == (EAGLE3["total draft tokens"],)


@of_files
def test_the_rule_is_that_of_the_runtime(name: str) -> None:
    config = config_of(name)
    assert (config.policy, config.threshold) == ("payoff", THRESHOLD)
    assert PAPER_THRESHOLD == THRESHOLD
    assert not config.calibrate
    assert predictor_file(config) == PAPER_PREDICTORS["paper"]
    predictor = AcceptancePredictor.of_config(config)
    assert (predictor.kind, len(predictor.weights) - 1) == ("mlp", HIDDEN_LAYERS)


def test_the_files_differ_in_nothing_and_are_what_modes_serve() -> None:
    configs = [config_of(name) for name in NAMES]
    assert configs == configs[:1] * 3
    assert {key: getattr(configs[0], key) for key in PAPER_SETTINGS} == {
        **PAPER_SETTINGS,
        "predictor": Path(str(PAPER_SETTINGS["predictor"])),
    }
    stated = configs[0].model_fields_set - PAPER_SETTINGS.keys()
    assert stated == {"narrow_widths", "history_window", "shared_cache_tokens"}


@pytest.mark.parametrize("mode", PAPER_MODES)
def test_a_mode_of_the_paper_is_its_settings_under_a_policy(mode: str) -> None:
    parser = argparse.ArgumentParser()
    add_hvd_flags(None, parser)
    flags, _ = parser.parse_known_args(server_flags(mode, demo_models()))  # type: ignore[arg-type]
    record: Any = keep_hvd_flags(lambda *_: SimpleNamespace(), SimpleNamespace, flags)  # type: ignore[arg-type,return-value,type-var]
    config = load_config(*config_file_and_overrides(record), {})
    assert config.policy == PAPER_MODES[mode]  # type: ignore[index]
    own = PAPER_SETTINGS.keys() - {"policy", "threshold", "predictor"}
    assert {key: getattr(config, key) for key in own} == {key: PAPER_SETTINGS[key] for key in own}
    assert config.threshold == (THRESHOLD if mode == "hvd-paper" else None)


def test_the_features_are_those_of_table_9() -> None:
    assert sum(TABLE_9.values(), ()) == PAPER_FEATURES == FEATURE_NAMES[: len(PAPER_FEATURES)]


def test_training_is_that_of_table_10(
    made_up_traces: Path,
    number_tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "trained.safetensors"
    config = CONFIGS / "paper-qwen3-8b.yaml"
    command = [
        *("train", "--kind", "mlp", "--batch-size", "65536", "--epochs", "20", "--seed", "42"),
        *("--config", config, "--traces", made_up_traces, "--tokenizer", number_tokenizer),
        *("--processes", 1, "--output", output),
    ]
    assert main([*map(str, command)]) == 0
    # The data are too small for such batches, and the command says so.
    told = capsys.readouterr().err
    assert re.search(r"rows gave 20 updates with a batch size of 65536, and Adam needs 1000", told)
    served = config_of("paper-qwen3-8b").model_copy(update={"predictor": output})
    predictor = AcceptancePredictor.of_config(served)
    settings = predictor.provenance["training"]
    assert isinstance(settings, dict)
    table_10 = {
        "hidden_sizes": [HIDDEN_SIZE] * HIDDEN_LAYERS,
        "learning_rate": LEARNING_RATE,
        "batch_size": TRAIN_BATCH_SIZE,
        "min_epochs": EPOCHS,
        "max_epochs": EPOCHS,
        "seed": SEED,
    }
    assert {key: settings[key] for key in table_10} == table_10
    # What the table does not have is off.
    assert settings["weight_decay"] == settings["input_dropout"] == settings["worth_weight"] == 0
    # Appendix B: every token position is a state, and drafts are whole.
    assert predictor.provenance["token_stride"] == 1
    assert predictor.provenance["draft_limits"] == [SUFFIX_CACHE["max_draft_tokens"]]


def test_the_network_has_two_hidden_layers_with_relu() -> None:
    predictor = AcceptancePredictor.load(PAPER_PREDICTORS["paper"])
    widths = (len(PAPER_FEATURES), *[HIDDEN_SIZE] * HIDDEN_LAYERS, 1)
    assert [weight.shape for weight in predictor.weights] == [
        (num_out, num_in) for num_in, num_out in pairwise(widths)
    ]
    drafts = DraftFeatures.of_size(50)
    drafts.features[:] = np.random.default_rng(1).normal(size=drafts.features.shape)
    drafts.draft_lens[:] = 5
    values = (drafts.features[:, : len(PAPER_FEATURES)] - predictor.mean) / predictor.std
    *hidden, (weight, bias) = zip(predictor.weights, predictor.biases, strict=True)
    for of_layer, added in hidden:
        values = np.maximum(values @ of_layer.T + added, 0)
    expected = (values @ weight.T + bias)[:, 0]
    assert predictor.predict(drafts).accepted_lens == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_labels_are_the_tokens_that_match_the_recorded_continuation() -> None:
    """At each token position the cache is queried with the prefix (here an oracle of
    SuffixDecoding). The label counts the draft's tokens up to the first that the trace lacks."""
    rng = np.random.default_rng(SEED)
    config = config_of("paper-qwen3-8b").for_policy("model", calibrate=False)
    drafter = HybridDrafter(
        config,
        cache=SuffixCache.of_config(config, background=False),
        predictor=None,
        token_classes=TokenClasses.from_strings([" ", "a", ",", "\n", "(", ";"]),
        num_model_steps=EAGLE3["tree depth"],
        num_model_nodes=EAGLE3["total draft tokens"] - 1,
        verify_width=config.verify_width or 0,
    )
    oracle = OracleCache(**SUFFIX_CACHE)
    num_labels = []
    for number in range(4):
        passage = rng.integers(0, 6, 150)
        trace = Trace(
            prompt_ids=passage.astype(np.int32),
            # A copy of the prompt, in which a token is changed now and then.
            output_ids=np.where(rng.random(150) < 0.03, 5, passage).astype(np.int32),
            session=f"s{number}",
            turn=0,
            family="f",
        )
        expected = []
        oracle.start(trace.session, trace.prompt_ids)
        for position in range(1, len(trace.output_ids)):
            oracle.commit([trace.session], [trace.output_ids[position - 1 : position]])
            [draft] = oracle.propose([trace.session], SUFFIX_CACHE["max_draft_tokens"])
            if draft is not None:
                rest = trace.output_ids[position:]
                agrees = [a == b for a, b in zip(draft.token_ids, rest, strict=False)]
                label = (*agrees, False).index(False)
                expected.append((label, len(draft.token_ids), draft.match_len, draft.score))
        oracle.commit([trace.session], [trace.output_ids[-1:]])
        oracle.finish(trace.session, keep=True)
        rows = training_rows(replay(trace, drafter, num_model_accepted=0))
        of = [FEATURE_NAMES.index(name) for name in ("draft_len", "match_len", "score")]
        found = np.column_stack([rows.accepted_lens, rows.features[:, of]])
        assert found == pytest.approx(np.array(expected), rel=1e-4)
        num_labels.append(len(expected))
        assert max(label for label, *_ in expected) > THRESHOLD
    assert min(num_labels) > 100
