"""The models that the paper serves, the demo's, and the modes in which each is served."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import snapshot_download

from sglang_hvd.demo.models import demo_models
from sglang_hvd.demo.modes import MODEL_TREE_FLAGS
from sglang_hvd.demo.server import CPU_FLAGS
from sglang_hvd.paper.results import Mode

_CONFIGS = Path(__file__).parents[2] / "configs"

# Table 7.
_PAPER_TREE = (
    *("--speculative-num-steps", "8", "--speculative-eagle-topk", "4"),
    *("--speculative-num-draft-tokens", "32"),
)
# Table 6. FlashInfer verifies trees.
_PAPER_SHARED = (
    *("--dtype", "float16", "--context-length", "16384"),
    *("--attention-backend", "flashinfer"),
)
# So many of NGRAM's draft tokens may come from the outputs that warm it.
_NGRAM_WARM_TOKENS = 8

LABELS: Mapping[str, str] = {
    "greedy": "Greedy",
    "eagle3": "EAGLE3",
    "suffix": "SuffixDecoding",
    "frequency": "Frequency hybrid",
    "hvd-paper": "HVD (paper)",
    "hvd": "HVD (allocate)",
    "eagle3-adaptive": "EAGLE3, adaptive (SGLang)",
    "ngram": "NGRAM (SGLang)",
}
# The modes with HVD's suffix cache.
CACHE_MODES = ("suffix", "frequency", "hvd-paper", "hvd")


@dataclass(frozen=True, slots=True)
class Model:
    """A target model with its EAGLE3 drafter.

    target, drafter: names on the hub, or folders.
    tree: flags of the model drafter's tree.
    shared: flags of every server.
    paper_config, config: settings of the paper's modes, and flags of mode `hvd`.
    environment: of every server, in addition to this process's.
    max_new_tokens: of a reply, unless the command line says otherwise.
    max_sequence: tokens of a prompt and its reply together; None: what the target can.
    """

    target: str
    drafter: str
    tree: tuple[str, ...]
    shared: tuple[str, ...]
    paper_config: Path
    config: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    max_new_tokens: int = 8192
    max_sequence: int | None = 16384

    def modes(self, names: Sequence[str], predictor: Path) -> tuple[Mode, ...]:
        """The modes of these names. predictor: the paper's, trained on this target's outputs."""
        drafter = ("--speculative-draft-model-path", self.drafter)
        hvd = (
            *("--speculative-algorithm", "HVD", *drafter, *self.tree),
            *("--hvd-report-cycles", "true"),
        )
        paper = (*hvd, "--hvd-config", str(self.paper_config))
        num_nodes = self.tree[self.tree.index("--speculative-num-draft-tokens") + 1]
        flags = {
            "greedy": (),
            "eagle3": ("--speculative-algorithm", "EAGLE3", *drafter, *self.tree),
            "suffix": (*paper, "--hvd-policy", "cache"),
            "frequency": (*paper, "--hvd-policy", "frequency"),
            "hvd-paper": (*paper, "--hvd-predictor", str(predictor)),
            "hvd": (*hvd, *self.config),
            # It drafts chains only, and chooses their length.
            "eagle3-adaptive": (
                *("--speculative-algorithm", "EAGLE3", *drafter),
                "--speculative-adaptive",
            ),
            "ngram": (
                *("--speculative-algorithm", "NGRAM"),
                *("--speculative-num-draft-tokens", num_nodes),
                *("--speculative-ngram-external-sam-budget", str(_NGRAM_WARM_TOKENS)),
            ),
        }
        return tuple(Mode(name=name, label=LABELS[name], flags=flags[name]) for name in names)


def _of_paper(target: str, drafter: str, config: str, **environment: str) -> Model:
    return Model(
        target,
        drafter,
        _PAPER_TREE,
        _PAPER_SHARED,
        paper_config=_CONFIGS / f"paper-{config}.yaml",
        config=("--hvd-config", str(_CONFIGS / f"{config}.yaml")),
        environment=environment,
    )


def models() -> Mapping[str, Model]:
    """The models by name: those of table 5, and the demo's."""
    demo = demo_models()
    return {
        "qwen3-8b": _of_paper("Qwen/Qwen3-8B", "Tengyunw/qwen3_8b_eagle3", "qwen3-8b"),
        "qwen3-4b": _of_paper("Qwen/Qwen3-4B", "AngelSlim/Qwen3-4B_eagle3", "qwen3-4b"),
        "llama3.1-8b": _of_paper(
            "meta-llama/Llama-3.1-8B-Instruct",
            "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
            "llama-3.1-8b",
            # The drafter's own context is shorter.
            SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN="1",
        ),
        "demo": Model(
            str(demo.target),
            str(demo.drafter),
            MODEL_TREE_FLAGS,
            CPU_FLAGS,
            paper_config=_CONFIGS / "paper-qwen3-8b.yaml",
            config=("--hvd-policy", "allocate", "--hvd-predictor", str(demo.predictor)),
            max_new_tokens=64,
            max_sequence=None,
        ),
    }


def folder_of(checkpoint: str, *patterns: str) -> Path:
    """A checkpoint's folder on this machine, with the files of these patterns.

    The name of a folder of the hub's cache is the checkpoint's revision.

    Raises ValueError, in one line, if the hub cannot be reached or refuses.
    """
    if Path(checkpoint).is_dir():
        return Path(checkpoint)
    try:
        return Path(snapshot_download(checkpoint, allow_patterns=list(patterns)))
    except Exception as error:
        # Without a network, or without permission, the library raises errors of a dozen classes
        # (of huggingface_hub, httpx and requests). All go on.
        told = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ValueError(
            f"{checkpoint} cannot be read from the hub ({told}): connect to the network, or log in "
            "with `hf auth login` if the checkpoint is gated"
        ) from error
