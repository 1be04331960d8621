"""Real servers on the CPU host: EAGLE3 against plain decoding, with random weights."""

import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sglang_hvd.demo.server import CPU_FLAGS, SglangServer, demo_environment
from tests.e2e.forked_server import Nursery

pytestmark = pytest.mark.e2e

VOCAB = 24  # small, so that a random drafter is right now and then
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS = 64, 4, 2, 16, 128, 4
NUM_SAMPLES = 600
FALSE_ALARM = 1e-6  # of the distribution test, were the server's random numbers new each time


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory, nursery: Nursery
) -> Iterator[dict[str, SglangServer]]:
    """A plain and an EAGLE3 server (tree: topk 4, 16 nodes) of the same model."""
    folder = tmp_path_factory.mktemp("models")
    target, draft = write_models(folder)
    flags = ["--model-path", str(target), *CPU_FLAGS, "--skip-tokenizer-init"]
    flags += ["--log-level", "warning", "--random-seed", "0"]
    eagle = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft)]
    eagle += ["--speculative-num-steps", "3", "--speculative-eagle-topk", "4"]
    eagle += ["--speculative-num-draft-tokens", "16"]
    environment = demo_environment() | {"SGLANG_PLUGINS": "sgl_kernel_cpu"}

    def server(name: str, *more: str) -> SglangServer:
        log_file = folder / f"{name}.log"
        return SglangServer(
            [*flags, *more],
            log_file=log_file,
            environment=environment,
            timeout_s=300,
            grace_s=0,
            launch=nursery.launch,
        )

    with server("plain") as plain, server("eagle", *eagle) as eagle_server:
        yield {"plain": plain, "eagle": eagle_server}


def test_greedy_output_and_logprobs_are_those_of_plain_decoding(
    servers: dict[str, SglangServer],
) -> None:
    rng = random.Random(0)
    prompts = [rng.choices(range(VOCAB), k=n) for n in (1, 2, 9, 33, 64, 120, 350, 510)]
    sampling = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}

    def answer(server: str, prompt: list[int]) -> tuple[list[int], list[float]]:
        out = generate(servers[server], prompt, sampling, return_logprob=True)
        logprobs = [logprob for logprob, *_ in out["meta_info"]["output_token_logprobs"]]
        return out["output_ids"], logprobs

    expected = [answer("plain", prompt) for prompt in prompts]
    alone = [answer("eagle", prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: answer("eagle", prompt), prompts))
    for answers in (alone, together):
        assert [ids for ids, _ in answers] == [ids for ids, _ in expected]
        np.testing.assert_allclose(
            [logprobs for _, logprobs in answers], [logprobs for _, logprobs in expected], atol=1e-5
        )


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.5, "top_k": 3},
        {"temperature": 2.0, "top_k": 5, "top_p": 0.6},
        {"temperature": 2.0, "top_p": 0.7, "min_p": 0.2},
    ],
    ids=lambda sampling: " ".join(sampling),
)
def test_sampled_tokens_follow_the_plain_distribution(
    servers: dict[str, SglangServer], sampling: dict[str, float]
) -> None:
    """The first token comes from prefill, the next two from verify steps."""
    prompt = [3, 1, 4, 1, 5]

    @cache
    def next_token(tokens: tuple[int, ...]) -> dict[int, float]:
        greedy = {"max_new_tokens": 1, "temperature": 0}
        out = generate(
            servers["plain"],
            [*prompt, *tokens],
            greedy,
            return_logprob=True,
            top_logprobs_num=VOCAB,
        )
        (top,) = out["meta_info"]["output_top_logprobs"]
        return filtered({token: logprob for logprob, token, _ in top}, **sampling)

    expected = {}
    for first, p in next_token(()).items():
        for second, q in next_token((first,)).items():
            for third, r in next_token((first, second)).items():
                expected[first, second, third] = p * q * r

    asked = sampling | {"max_new_tokens": 3, "ignore_eos": True, "n": NUM_SAMPLES // 4}
    with ThreadPoolExecutor(4) as pool:
        batches = list(pool.map(lambda _: generate(servers["eagle"], prompt, asked), range(4)))
    drawn = Counter(tuple(out["output_ids"]) for batch in batches for out in batch)

    assert set(drawn) <= set(expected), "a token that the filters exclude was drawn"
    # Bretagnolle-Huber-Carol: P(2 TV >= e) <= 2^k exp(-n e^2 / 2) for k outcomes. The outcomes are
    # merged into 16 of about equal probability, so that k is small.
    bins = merged(expected, 16)
    distance = sum(
        abs(sum(drawn[e] for e in group) / NUM_SAMPLES - sum(expected[e] for e in group))
        for group in bins
    )
    log_terms = len(bins) * math.log(2) - math.log(FALSE_ALARM)
    assert distance < math.sqrt(2 * log_terms / NUM_SAMPLES)


def filtered(
    logprobs: dict[int, float],
    *,
    temperature: float,
    top_k: int = VOCAB,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> dict[int, float]:
    """Next-token probabilities as documented: top-k, top-p and min-p of the tempered softmax."""
    tempered = {token: math.exp(lp / temperature) for token, lp in logprobs.items()}
    mass = sum(tempered.values())
    ranked = sorted(((p / mass, token) for token, p in tempered.items()), reverse=True)
    kept, before = {}, 0.0
    for rank, (p, token) in enumerate(ranked):
        if rank < top_k and before <= top_p and p >= min_p * ranked[0][0]:
            kept[token] = p
        before += p
    return {token: p / sum(kept.values()) for token, p in kept.items()}


def merged(probs: dict[tuple[int, ...], float], num_bins: int) -> list[list[tuple[int, ...]]]:
    bins: list[list[tuple[int, ...]]] = [[]]
    mass = 0.0
    for outcome, p in sorted(probs.items()):
        if mass >= len(bins) / num_bins:
            bins.append([])
        bins[-1].append(outcome)
        mass += p
    return bins


def generate(server: SglangServer, input_ids: list[int], sampling: dict, **options: object) -> Any:
    body = {"input_ids": input_ids, "sampling_params": sampling, **options}
    return server.post("/generate", body)


def write_models(folder: Path) -> tuple[Path, Path]:
    """A Llama and an EAGLE3 drafter for it, random weights, in SGLang's checkpoint layout."""
    torch.manual_seed(0)
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": VOCAB - 1,
    }
    embedding, lm_head = torch.randn(VOCAB, HIDDEN), 0.3 * torch.randn(VOCAB, HIDDEN)
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": lm_head,
    }
    for i in range(LAYERS):
        weights |= decoder_layer(f"model.layers.{i}", input_size=HIDDEN)
    target = folder / "target"
    write_checkpoint(
        target,
        weights,
        config | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS},
    )

    draft_vocab = torch.arange(0, VOCAB, 2)  # a reduced draft vocabulary: every other token
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    draft = folder / "draft"
    write_checkpoint(
        draft,
        decoder_layer("midlayer", input_size=2 * HIDDEN)
        | {
            "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
            "embed_tokens.weight": embedding.clone(),
            "fc.weight": 0.1 * torch.randn(HIDDEN, 3 * HIDDEN),
            "norm.weight": torch.ones(HIDDEN),
            "lm_head.weight": lm_head[draft_vocab],
            "d2t": draft_vocab - torch.arange(len(draft_vocab)),
            "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, draft_vocab, True),
        },
        config
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": len(draft_vocab),
            "eagle_config": layers,
        },
    )
    return target, draft


def decoder_layer(name: str, *, input_size: int) -> dict[str, torch.Tensor]:
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, input_size),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, input_size),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, input_size),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    weights = {f"{name}.{part}.weight": 0.3 * torch.randn(shape) for part, shape in shapes.items()}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{name}.{norm}.weight"] = torch.ones(HIDDEN)
    return weights


def write_checkpoint(folder: Path, weights: dict[str, torch.Tensor], config: dict) -> None:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
