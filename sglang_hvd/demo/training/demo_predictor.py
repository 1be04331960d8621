"""Trains the payoff predictor of the demo target on replayed replies."""

from collections.abc import Sequence
from itertools import product

from tokenizers import Tokenizer

from sglang_hvd.config import DEFAULT_VERIFY_WIDTH, HvdConfig, Policy
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import AcceptancePredictor, TokenClasses
from sglang_hvd.payoff.predictor import feature_settings
from sglang_hvd.replay.core.replayed import replay, training_rows
from sglang_hvd.replay.core.training_rows import Lessons
from sglang_hvd.replay.training.fit import TrainingSettings, train
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.traces.tokenizer_json import token_strings
from sglang_hvd.traces.trace import Trace

# Steps of the model drafter in the demo, and assumed accepted tokens in each of its cycles.
_NUM_MODEL_STEPS = 3
_NUM_MODEL_ACCEPTED = 2


def train_predictor(
    replies: Sequence[Trace],
    references: Sequence[Trace],
    tokenizer: Tokenizer,
    settings: TrainingSettings,
) -> AcceptancePredictor:
    """Learns from the cycles of decoding with the model drafter alone and with the cache alone.

    Both policies serve each session twice: with the outputs of earlier sessions in the cache, and
    alone, like a server that has just started. Without the second pass the predictor overrates
    drafts from prompts: if the cache holds many outputs, a draft comes from the prompt only if the
    prompt matches better than all of them.

    replies: traces of the target.
    references: traces of the replies that the target was trained to give.
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
        for trace in (*replies, *references):
            cycles += replay(
                trace,
                drafter,
                num_model_accepted=_NUM_MODEL_ACCEPTED,
                namespace="" if shares_cache else trace.session,
            )
    return train(
        Lessons.of(training_rows(cycles)),
        kind="survival",
        feature_settings=feature_settings(HvdConfig()),
        provenance={
            "source": "greedy replies of the demo target, and reference replies",
            "num_replies": len(replies),
            "num_references": len(references),
        },
        settings=settings,
    )
