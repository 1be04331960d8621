"""Which widths and numbers of draft steps get backends of their own as a device's memory runs out.
That they verify and draft right is seen on real servers (tests/e2e/test_overlap.py); here the
device is made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.draft_parallel import DraftParallelLayout
from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend
from sglang.srt.runtime_context import get_context, get_schedule

from sglang_hvd.allocation import VerifyWidths
from sglang_hvd.plugin.device import context_room, graph_sizes
from sglang_hvd.plugin.device import memory as device_memory
from sglang_hvd.plugin.device.graph_sizes import sizes_of_width, thinned
from sglang_hvd.plugin.device.memory import DeviceMemory
from sglang_hvd.plugin.device.rank_group import RankGroup
from sglang_hvd.plugin.engine.states.draft_states import DraftStates
from sglang_hvd.plugin.engine.states.width_states import WidthStates
from sglang_hvd.plugin.hooks.server_args import count_logits_rows

WIDTHS = (2, 4, 8, 16, 32)


@pytest.fixture(autouse=True)
def _nothing_to_collect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "gc", SimpleNamespace(collect=lambda: 0))  # half a second


@pytest.fixture(autouse=True)
def _no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own settings of slots are not given here."""
    monkeypatch.setattr(context_room, "num_slots_after_context", lambda: 64)


@pytest.fixture(autouse=True)
def _no_prefills() -> Iterator[None]:
    """SGLang's settings as they are resolved, which those that were given need not be."""
    with get_context().override_server_args(chunked_prefill_size=-1, max_prefill_tokens=0):
        yield


class Device:
    """A worker whose target takes some memory for every attention backend that it makes, more for
    wider ones. Prefills and sampling take nothing that counts."""

    device, gpu_id, speculative_num_steps = "cuda", 0, 3

    def __init__(self, free_gb: float, per_node_gb: float, each_gb: float = 0) -> None:
        self.free_gb, self.per_node_gb, self.width = free_gb, per_node_gb, 0
        self.each_gb = each_gb
        self.captures: Callable[[], object] = list
        self.captured: list[object] = []
        self.model_runner = SimpleNamespace(
            attn_backend="first",
            max_running_requests=1,
            token_to_kv_pool=SimpleNamespace(post_capture_active=False),
            model_config=SimpleNamespace(vocab_size=1, context_len=1024),
            decode_cuda_graph_runner=None,
            eager_runner="eager",
            decode_graph_gather_requirements=lambda: (False, False),
            _get_attention_backend=self._make_backend,
        )
        self.target_worker = self
        self._draft_worker = SimpleNamespace(
            draft_extend_attn_backend=None,
            cuda_graph_runner_for_draft_extend=None,
        )

    def _make_backend(self) -> str:
        self.captured.append(self.captures())
        self.free_gb -= self.each_gb + self.per_node_gb * self.width
        return f"with {self.free_gb} GB left"

    @contextmanager
    def _override_worker_state(self, num_steps: int, width: int) -> Iterator[None]:
        self.width = width
        yield


def memory_of(worker: Any, *, max_nodes: int, kept_gb: float = 0.0) -> DeviceMemory:
    return DeviceMemory(
        worker.target_worker.model_runner,
        device=worker.device,
        gpu_id=worker.gpu_id,
        max_nodes=max_nodes,
        ranks=RankGroup(),
        kept_gb=kept_gb,
    )


def states_of(
    monkeypatch: pytest.MonkeyPatch,
    device: Device,
    *,
    are_asked_for: bool,
    values: tuple[int, ...] = WIDTHS,
) -> WidthStates:
    def free_gb(*args: Any, **kwargs: Any) -> float:
        return device.free_gb

    monkeypatch.setattr(device_memory, "get_available_gpu_memory", free_gb)
    worker: Any = device
    memory = memory_of(worker, max_nodes=1)
    asked_for = frozenset(set(values) - {32}) if are_asked_for else frozenset[int]()
    widths = VerifyWidths(values, 32, asked_for)
    return WidthStates(worker, widths, memory, has_draft_extend=False)


def test_the_narrowest_come_first_and_leave_room_for_prefills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 2, 4 and 8 take .25, .5 and 1 GB; 16 would take 2, and 1.75 are left besides the spare one.
    device = Device(free_gb=4.5, per_node_gb=0.125)
    states = states_of(monkeypatch, device, are_asked_for=False)
    assert states.widths == (2, 4, 8, 32)
    assert states.memory_gb == {2: 0.25, 4: 0.5, 8: 1.0}
    device = Device(free_gb=4.8125, per_node_gb=0.125)
    assert states_of(monkeypatch, device, are_asked_for=False).widths == WIDTHS
    device = Device(free_gb=4.8125, per_node_gb=0.125)
    with get_schedule().override(chunked_prefill_size=4096):
        assert states_of(monkeypatch, device, are_asked_for=False).widths == (2, 4, 8, 32)
    device.model_runner.model_config.vocab_size = 2**30  # 4 GB for an array of logits
    assert states_of(monkeypatch, device, are_asked_for=False).widths == (32,)


def test_a_width_of_one_does_not_tell_what_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    # As graphs of few requests do: nearly the same, whatever the width.
    device = Device(free_gb=3.0, per_node_gb=0, each_gb=0.42)
    states = states_of(monkeypatch, device, are_asked_for=False, values=(1, 16, 32))
    assert states.widths == (1, 16, 32)
    device = Device(free_gb=1.9, per_node_gb=0, each_gb=0.42)
    states = states_of(monkeypatch, device, are_asked_for=False, values=(1, 16, 32))
    assert states.widths == (1, 32)


@pytest.mark.parametrize(
    ("chunk", "vocab_size", "kept_gb", "spare_gb"),
    [
        (8192, 1, 0, 3.4),
        (8192, 1, 0.5, 3.9),  # in addition to what runs of plain steps keep
        (8192, 2**28, 0, 4.0),  # three arrays of a gigabyte, and no prefill meanwhile
        (-1, 1, 0, 2.2),  # prefills are not cut, and have 4096 tokens at most
        (None, 1, 0, 2.2),
    ],
)
def test_room_is_left_for_prefills_or_for_sampling(
    monkeypatch: pytest.MonkeyPatch,
    chunk: int | None,
    vocab_size: int,
    kept_gb: float,
    spare_gb: float,
) -> None:
    device: Any = Device(free_gb=spare_gb, per_node_gb=0)
    device.model_runner.model_config.vocab_size = vocab_size
    monkeypatch.setattr(
        device_memory, "get_available_gpu_memory", lambda *args, **kwargs: device.free_gb
    )
    with get_schedule().override(chunked_prefill_size=chunk, max_prefill_tokens=4096):
        memory = memory_of(device, max_nodes=1, kept_gb=kept_gb)
    assert memory.has_room(0, name="nothing")
    assert not memory.has_room(0.01, name="something")


def test_without_memory_for_another_width_the_base_serves_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = states_of(monkeypatch, Device(1.4, 0.125), are_asked_for=False)
    assert states.widths == (32,)
    assert states.memory_gb == {}
    states.use(32)


class TargetGraphs:
    """Of one width."""

    def __init__(self, target: Any = None, **settings: Any) -> None:
        pass


class CapturedSizes:
    """Of the batches that graphs are captured of, as SGLang chooses them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sizes: list[int], alignment: int = 1):
        self.decode, self.alignment = SimpleNamespace(bs=sizes), alignment
        self.graph = SimpleNamespace(
            cuda_graph_config=SimpleNamespace(decode=self.decode), disable_cuda_graph_padding=False
        )
        monkeypatch.setattr(graph_sizes, "get_exec", lambda: SimpleNamespace(graph=self.graph))
        monkeypatch.setattr(graph_sizes, "get_batch_sizes_to_capture", self.sizes)

    def sizes(
        self, runner: Any, width: int = 1, *, gathered_buffer_required: bool | None = None
    ) -> tuple[list[int], list[int]]:
        return [n for n in self.decode.bs if n * width % self.alignment == 0], []

    def device(self, free_gb: float, per_node_gb: float) -> Device:
        device = Device(free_gb, per_node_gb)
        device.model_runner.decode_cuda_graph_runner = TargetGraphs()
        device.captures = lambda: (device.width, list(self.decode.bs))
        return device


def test_widths_are_built_by_the_nodes_of_a_full_step(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = CapturedSizes(monkeypatch, [1, 2, 4, 12])
    values = (2, 8, 16, 32, 64)
    # 64 nodes of two requests are more than 8 of twelve, and less than 16.
    device = graphs.device(free_gb=70, per_node_gb=0.25)
    states = states_of(monkeypatch, device, are_asked_for=False, values=values)
    assert device.captured == [
        (2, [1, 2, 4, 12]),
        (8, [1, 2, 4, 12]),
        (64, [1, 2]),
        (16, [1, 2, 4, 12]),
    ]
    assert states.widths == values
    assert graphs.decode.bs == [1, 2, 4, 12]
    device = graphs.device(free_gb=20, per_node_gb=0.25)
    states = states_of(monkeypatch, device, are_asked_for=False, values=values)
    assert states.widths == (2, 8, 32, 64)  # and nothing is left for 16


def test_graphs_of_more_requests_are_expected_to_take_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Two requests are padded to eight: 512 nodes, where 16 of eight are 128.
    graphs = CapturedSizes(monkeypatch, [1, 8])
    for free_gb, widths in ((5.9, (16, 32)), (6.1, (16, 32, 64))):
        device = graphs.device(free_gb, per_node_gb=1 / 16)
        states = states_of(monkeypatch, device, are_asked_for=False, values=(16, 32, 64))
        assert states.widths == widths


def test_without_graphs_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = CapturedSizes(monkeypatch, [])
    device = graphs.device(free_gb=70, per_node_gb=0.25)
    for runner in (None, "eager"):
        device.model_runner.decode_cuda_graph_runner = runner
        states = states_of(monkeypatch, device, are_asked_for=False, values=(16, 32, 64))
        assert states.widths == (16, 32, 64)
        assert device.model_runner.decode_cuda_graph_runner is runner


def test_what_is_asked_for_has_the_memory_first(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = CapturedSizes(monkeypatch, [1]).device(free_gb=5, per_node_gb=0.0625)
    memory = memory_of(device, max_nodes=1)
    monkeypatch.setattr(
        device_memory, "get_available_gpu_memory", lambda *args, **kwargs: device.free_gb
    )
    widths = VerifyWidths((4, 32, 64), 32, frozenset({64}))
    states = WidthStates(device, widths, memory, has_draft_extend=False)
    assert states.widths == (32, 64)
    assert states.memory_gb == {64: 4.0}


@pytest.mark.parametrize(
    ("sizes", "alignment", "of_wide"),
    [
        ([1, 2, 4, 8], 1, [1, 2]),
        ([1, 4, 8], 1, [1, 4]),  # two requests are padded to four
        ([4, 8], 1, [4]),
        ([1], 1, [1]),
        ([1, 2, 4, 8, 16], 8, [8]),  # as draft-extend has to be aligned
    ],
)
def test_graphs_of_a_wide_width_hold_the_requests_that_may_verify_it(
    sizes: list[int], alignment: int, of_wide: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    CapturedSizes(monkeypatch, sizes, alignment)
    widths = VerifyWidths((4, 32, 64), 32)
    runner: Any = SimpleNamespace(
        decode_graph_gather_requirements=lambda: (alignment > 1, False),
        server_args=SimpleNamespace(_hvd_launch=SimpleNamespace(widths=widths)),
    )
    assert sizes_of_width(runner, widths, 64) == of_wide
    assert sizes_of_width(runner, widths, 32) == sizes
    # The array of their logits holds those of either.
    rows = count_logits_rows(lambda runner: 0, runner)
    assert rows == max(32 * sizes[-1], 64 * of_wide[-1])


def test_graphs_of_a_narrow_width_pad_no_batch_by_more_than_a_quarter() -> None:
    sizes = [*range(1, 9), *range(10, 33, 2), *range(40, 49, 4)]  # SGLang's with speculation
    kept = thinned(sizes)
    assert kept == [1, 2, 3, 5, 7, 10, 12, 16, 20, 26, 32, 40, 48]
    for batch_size in range(1, 49):
        assert min(size for size in kept if size >= batch_size) <= 1.25 * batch_size
    assert thinned([4, 48]) == [4, 48]  # what is far apart stays
    assert thinned([1]) == [1]


@pytest.mark.parametrize(
    ("gathers", "is_exact", "kept"),
    [(False, False, [8, 10]), (True, False, [8, 9, 10]), (False, True, [8, 9, 10])],
)
def test_sizes_that_are_aligned_or_never_padded_to_all_stay(
    monkeypatch: pytest.MonkeyPatch, gathers: bool, is_exact: bool, kept: list[int]
) -> None:
    CapturedSizes(monkeypatch, [8, 9, 10], 4).graph.disable_cuda_graph_padding = is_exact
    runner: Any = SimpleNamespace(decode_graph_gather_requirements=lambda: (gathers, False))
    assert sizes_of_width(runner, VerifyWidths((4, 32), 32), 4) == kept


def test_sizes_are_as_before_after_a_width_that_could_not_be_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = CapturedSizes(monkeypatch, [1, 2, 4])
    device = graphs.device(free_gb=9, per_node_gb=0.0625)

    def fail() -> None:
        assert graphs.decode.bs == [1, 2]
        raise RuntimeError("no graph")

    device.captures = fail
    with pytest.raises(RuntimeError, match="no graph"):
        states_of(monkeypatch, device, are_asked_for=True, values=(32, 64))
    assert graphs.decode.bs == [1, 2, 4]


def test_memory_that_the_kv_pool_is_still_to_take_is_not_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(free_gb=70, per_node_gb=0.125)
    device.model_runner.token_to_kv_pool.post_capture_active = True
    assert states_of(monkeypatch, device, are_asked_for=False).widths == (32,)
    assert states_of(monkeypatch, device, are_asked_for=True).widths == WIDTHS


def test_widths_that_were_asked_for_are_all_built(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(free_gb=4.5, per_node_gb=0.125)
    states = states_of(monkeypatch, device, are_asked_for=True)
    assert states.widths == WIDTHS
    states.use(4)
    assert device.model_runner.attn_backend == "with 3.75 GB left"
    states.use(32)
    assert device.model_runner.attn_backend == "first"


def widths_with(
    monkeypatch: pytest.MonkeyPatch, linear: object, *, are_asked_for: bool = False
) -> tuple[int, ...]:
    """Of a target some of whose layers have this backend."""
    device = Device(free_gb=70, per_node_gb=0.125)
    device.model_runner.attn_backend = SimpleNamespace(linear_attn_backend=linear)
    return states_of(monkeypatch, device, are_asked_for=are_asked_for).widths


def test_mamba_2_layers_have_one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = object.__new__(Mamba2AttnBackend)
    assert widths_with(monkeypatch, linear) == (32,)
    with pytest.raises(ValueError, match="Mamba-2 layers: drop it"):
        widths_with(monkeypatch, linear, are_asked_for=True)


def test_verifications_by_flashinfers_gdn_kernel_have_one_width(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dispatcher = SimpleNamespace(verify_kernel_is_flashinfer=False)
    linear = SimpleNamespace(accept_lens_pool=None, kernel_dispatcher=dispatcher)
    assert widths_with(monkeypatch, linear) == WIDTHS
    dispatcher.verify_kernel_is_flashinfer = True
    assert widths_with(monkeypatch, linear) == (32,)
    with pytest.raises(ValueError, match="--linear-attn-verify-backend triton"):
        widths_with(monkeypatch, linear, are_asked_for=True)


def test_a_backend_that_remembers_the_last_verification_has_one_width(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linear = SimpleNamespace(accept_lens_pool=None)
    assert widths_with(monkeypatch, linear) == WIDTHS
    linear.accept_lens_pool = torch.ones(3)
    assert widths_with(monkeypatch, linear) == (32,)
    with pytest.raises(ValueError, match="fused KDA verification"):
        widths_with(monkeypatch, linear, are_asked_for=True)


@pytest.mark.parametrize("where", ["alone", "within SGLang's", "within another"])
def test_a_width_without_memory_ends_the_start_in_one_line(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    device = Device(free_gb=4.5, per_node_gb=0.125)

    def run_out() -> str:
        if where == "alone":
            raise torch.cuda.OutOfMemoryError("no memory")
        try:
            raise KeyError if where == "within another" else torch.cuda.OutOfMemoryError
        except KeyError:
            raise torch.cuda.OutOfMemoryError("no memory")  # noqa: B904
        except torch.cuda.OutOfMemoryError:
            raise Exception("Capture cuda graph failed")  # noqa: B904  as SGLang does

    device.model_runner._get_attention_backend = run_out
    with pytest.raises(RuntimeError, match="no memory is left for verify width 2: lower"):
        states_of(monkeypatch, device, are_asked_for=True)


class DraftWorker:
    """A draft worker with the device's memory, which backends and graphs take by their steps."""

    topk = 4
    parallel_layout = DraftParallelLayout(tp_group=None, attn_tp_size=1)

    def __init__(self, device: Device, *, has_graphs: bool) -> None:
        self.device = device
        self.speculative_num_steps = 8
        self.draft_attn_backend = "backend of 8"
        self.draft_runner = SimpleNamespace(
            draft_attn_backend="backend of 8",
            decode_graph_gather_requirements=lambda: (False, False),
        )
        self.cuda_graph_runner = Graphs(self) if has_graphs else None
        self._topk1_parents_prealloc = self._topk1_score_indices_prealloc = "chain of 8"

    def init_attention_backend(self) -> None:
        self.draft_attn_backend = f"backend of {self.speculative_num_steps}"


class Graphs:
    def __init__(self, draft_worker: DraftWorker) -> None:
        self.num_steps = draft_worker.speculative_num_steps
        self.sizes = list(graph_sizes.get_exec().graph.cuda_graph_config.decode.bs)
        draft_worker.device.free_gb -= 0.5 * (self.num_steps - 1)


def draft_states_of(
    monkeypatch: pytest.MonkeyPatch, free_gb: float, *, has_graphs: bool
) -> tuple[DraftStates, DraftWorker]:
    CapturedSizes(monkeypatch, [8, 9, 10])
    device = Device(free_gb + 3.5, 0)
    draft_worker = DraftWorker(device, has_graphs=has_graphs)

    @contextmanager
    def override(num_steps: int, width: int) -> Iterator[None]:
        before = vars(draft_worker).copy()
        draft_worker.speculative_num_steps = num_steps
        draft_worker._topk1_parents_prealloc = f"chain of {num_steps}"
        draft_worker._topk1_score_indices_prealloc = f"chain of {num_steps}"
        yield
        vars(draft_worker).update(before)

    worker: Any = device
    worker._draft_worker, worker._override_worker_state = draft_worker, override
    worker.speculative_num_draft_tokens = 32
    monkeypatch.setattr(
        device_memory, "get_available_gpu_memory", lambda *args, **kwargs: device.free_gb
    )
    memory = memory_of(worker, max_nodes=32)
    return DraftStates(worker, (1, 2, 4, 8), memory), draft_worker


def test_drafts_of_few_steps_come_first_and_have_what_is_of_their_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states, draft_worker = draft_states_of(monkeypatch, 3.25, has_graphs=True)
    assert states.num_steps == (1, 2, 4, 8)
    assert states.memory_gb == {1: 0.0, 2: 0.5, 4: 1.5}
    for num_steps in (8, 4, 2):
        with states.active(num_steps) as graphs:
            assert graphs.num_steps == draft_worker.speculative_num_steps == num_steps
            # Nine requests are padded to ten, but not where SGLang captures for itself.
            assert graphs.sizes == ([8, 9, 10] if num_steps == 8 else [8, 10])
            assert draft_worker.draft_attn_backend == f"backend of {num_steps}"
            assert draft_worker.draft_runner.draft_attn_backend == f"backend of {num_steps}"
            assert draft_worker._topk1_parents_prealloc == f"chain of {num_steps}"
            assert draft_worker._topk1_score_indices_prealloc == f"chain of {num_steps}"
    with states.active(1) as graphs:  # no forward, so there is nothing to capture
        assert graphs is None
        assert draft_worker.speculative_num_steps == 1
    assert draft_worker.speculative_num_steps == 8
    assert draft_worker.draft_runner.draft_attn_backend == "backend of 8"
    assert draft_worker._topk1_parents_prealloc == "chain of 8"


def test_without_memory_for_more_graphs_there_are_fewer_steps_to_choose_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert draft_states_of(monkeypatch, 2.9, has_graphs=True)[0].num_steps == (1, 2, 8)
    # One step has no graph.
    assert draft_states_of(monkeypatch, 1.25, has_graphs=True)[0].num_steps == (1, 8)
    # Backends without graphs take next to nothing.
    assert draft_states_of(monkeypatch, 0.5, has_graphs=False)[0].num_steps == (1, 2, 4, 8)
