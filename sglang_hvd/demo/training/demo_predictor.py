"""Trains the payoff predictor of the demo target on replayed replies."""

from collections.abc import Mapping, Sequence
from itertools import product

from tokenizers import Tokenizer

from sglang_hvd.config import DEFAULT_VERIFY_WIDTH, HvdConfig, Policy
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import AcceptancePredictor, TokenClasses
from sglang_hvd.payoff.predictor import feature_settings
from sglang_hvd.replay.core.replayed import replay, training_rows
from sglang_hvd.replay.core.training_rows import Lessons, TrainingRows
from sglang_hvd.replay.training.fit import TrainingSettings, train
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.traces.tokenizer_json import token_strings
from sglang_hvd.traces.trace import Trace

# Steps of the model drafter in the demo, and assumed accepted tokens in each of its cycles.
_NUM_MODEL_STEPS = 3
_NUM_MODEL_ACCEPTED = 2


def train_predictor(
    rows: TrainingRows, settings: TrainingSettings, provenance: Mapping[str, object]
) -> AcceptancePredictor:
    return train(
        Lessons.of(rows),
        kind="survival",
        feature_settings=feature_settings(HvdConfig()),
        provenance=provenance,
        settings=settings,
    )


def cycle_rows(replies: Sequence[Trace], tokenizer: Tokenizer) -> TrainingRows:
    """The cycles of decoding with the model drafter alone and with the cache alone.

    Both policies serve each session twice: with the outputs of earlier sessions in the cache, and
    alone, like a server that has just started. Without the second pass the predictor overrates
    drafts from prompts: if the cache holds many outputs, a draft comes from the prompt only if the
    prompt matches better than all of them.
    """
    token_classes = TokenClasses.from_strings(token_strings(tokenizer))
    policies: tuple[Policy, ...] = ("model", "cache")
    cycles = []
    for policy, shares_cache in product(policies, (True, False)):
        config = HvdConfig(policy=policy)
        drafter = HybridDrafter(
            config,
            cache=SuffixCache.of_config(config, background=False),
            predictor=None,
            token_classes=token_classes,
            num_model_steps=_NUM_MODEL_STEPS,
            num_model_nodes=_NUM_MODEL_STEPS,
            verify_width=DEFAULT_VERIFY_WIDTH,
        )
        for trace in replies:
            cycles += replay(
                trace,
                drafter,
                num_model_accepted=_NUM_MODEL_ACCEPTED,
                namespace="" if shares_cache else trace.session,
            )
    return training_rows(cycles)
