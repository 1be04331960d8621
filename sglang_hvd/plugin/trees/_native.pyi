import torch

def merge(
    token_ids: torch.Tensor,
    parents: torch.Tensor,
    num_used: torch.Tensor,
    is_model_node: torch.Tensor,
    rows: torch.Tensor | None,
    tree_tokens: torch.Tensor,
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    topk: int,
    ranks: torch.Tensor | None,
    num_kept: torch.Tensor,
) -> None: ...
def lay_out(
    parents: torch.Tensor,
    num_used: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    mask: torch.Tensor,
    is_full_mask: bool,
) -> None: ...
