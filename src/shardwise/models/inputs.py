"""What a model is given, checked before anything is computed, so that every rank says the same."""

from typing import Any

from torch import Tensor

from shardwise.core.errors import ShardingError


def check_inputs(input_ids: Any, labels: Any = None, *, labels_are_of_tokens: bool = True, **others: Any) -> None:
    """Refuse what is no tensor, or has no tokens.

    Args:
        input_ids: ``[b, s]``, or None on a stage that needs none.
        labels: of tokens ``[b, s]``, or of what ``labels_are_of_tokens`` says no.
        labels_are_of_tokens: each token has one.
        others: further inputs by name; each a tensor or None.

    Raises:
        ShardingError: the message names the input, what it is, and what it must be.
    """
    for name, value in {"input_ids": input_ids, "labels": labels, **others}.items():
        if value is not None and not isinstance(value, Tensor):
            raise ShardingError(
                f"{name} is of type {type(value).__name__}; pass a torch.Tensor, such as torch.tensor({name})"
            )
    if input_ids is None:
        return
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ShardingError(
            f"input_ids has shape {list(input_ids.shape)}; it must be [b, s], with at least one sequence of at "
            "least one token"
        )
    if labels is not None and labels_are_of_tokens and labels.shape != input_ids.shape:
        raise ShardingError(
            f"labels has shape {list(labels.shape)}, and input_ids {list(input_ids.shape)}; each token has one label"
        )
