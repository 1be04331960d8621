import torch
from torch import nn

from sglang_hvd.demo.training.gradients import set_gradients, workers


def test_gradients_of_parallel_losses_add_up() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    inputs = [torch.randn(4, 8) for _ in range(3)]

    def losses() -> list[torch.Tensor]:
        return [model(x).square().sum() for x in inputs]

    (0.5 * torch.stack(losses()).sum()).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    with workers() as pool:
        parts = [lambda x=x: model(x).square().sum() for x in inputs]
        set_gradients(pool, model, parts, scale=0.5)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_the_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    with workers():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
