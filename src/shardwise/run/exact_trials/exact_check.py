"""Whether a device keeps what exact runs rely on, tried for the shapes of a run before it starts.

- A product by parts has the same bits whether one rank has all parts or each rank some (``exact_products_check``).
- Attention is deterministic, and has the same bits for each head, whichever other heads are with it
  (``exact_attention_check``).
- Norms, biases and factors of adapters (``exact_products_check``), embedding and loss (``exact_vocabulary_check``) have
  the same bits whichever part of the tokens or of the vocabulary a rank has.
- An activation has the same bits in whatever piece of a tensor an element lies; squares of gradients are summed alike
  wherever they lie.
- All of it has the same bits on one thread and on several.

Each kind of layer is tried once. Numbers are random, and a second or two is all that it takes.

The surroundings that decide on the bits of results: device, libraries, compiler, switches and CUDA's kernels.
"""

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.deterministic
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.communication.agreement import gather_objects
from shardwise.core.errors import ConfigError
from shardwise.kernels.blocks import in_blocks
from shardwise.kernels.compiled import compiler_version
from shardwise.kernels.elementwise import swiglu
from shardwise.kernels.products import is_intel, processor_says
from shardwise.models.config import ModelConfig
from shardwise.models.language_model import LanguageModel
from shardwise.run.exact_trials.exact_attention_check import try_attention
from shardwise.run.exact_trials.exact_products_check import try_linear_layers, try_rows
from shardwise.run.exact_trials.exact_trials import (
    MOST_ELEMENTS,
    Trials,
    compare,
    how_split,
    on_one_thread,
    on_several_threads,
    powers_of_two,
)
from shardwise.run.exact_trials.exact_vocabulary_check import try_embeddings, try_loss
from shardwise.training.optimizer.exact_norm import sums_of_squares


def check_device(
    model: nn.Module, config: ModelConfig, *, micro_batch_size: int, sequence_length: int, is_packed: bool = False
) -> None:
    """Try what an exact run relies on, with the shapes of the model; the default generator is left as it was.

    Args:
        model: this rank's.
        config: the model's, with ``exact_parts``.
        micro_batch_size: samples of a forward.
        sequence_length: tokens of a sample.
        is_packed: rows hold several samples, kept apart by a mask.

    Raises:
        ConfigError: the device does not keep it; the message names all that differs, at which shapes, and the largest
            number of parts that works.
    """
    device, rows = next(model.parameters()).device, micro_batch_size * sequence_length
    assert config.exact_parts is not None
    assert config.ffn_hidden_size is not None
    trials = Trials(device, config.params_dtype, config.exact_parts)
    sizes = {"batch": micro_batch_size, "length": sequence_length}
    with torch.no_grad():
        try_linear_layers(trials, model, rows)
        try_attention(trials, model, config, **sizes, is_packed=is_packed)
        try_rows(trials, model, **sizes)
        try_embeddings(trials, model, **sizes)
        for vocab_size in _vocabularies(model):
            try_loss(trials, config, vocab_size, **sizes)
        width = config.ffn_hidden_size * (1 + config.gated_linear_unit)
        inner = trials.numbers(max(1, min(rows, MOST_ELEMENTS // width)), width)
        trials.run(partial(_try_activation, config, inner))
        trials.run(partial(_try_squares, trials))
    trials.finish()


def _vocabularies(model: nn.Module) -> set[int]:
    """Of the losses over ids that are computed on this rank."""
    ends = (each for each in model.modules() if isinstance(each, LanguageModel) and each.post_process)
    return {each.vocab_size for each in ends if each.vocab_size is not None and each.classification is None}


def _try_activation(config: ModelConfig, inner: Tensor, parts: int) -> None:
    gated = config.gated_linear_unit and config.activation_func is F.silu

    def activated(part: Tensor) -> tuple[Tensor, Tensor]:
        leaf = part.detach().contiguous().requires_grad_()
        with torch.enable_grad():
            output = swiglu(leaf, at_any_size=True) if gated else in_blocks(config.activation_func, leaf)
            (gradient,) = torch.autograd.grad(output, leaf, torch.ones_like(output))
        return output.detach(), gradient

    def pieces(tensor: Tensor, sections: int, ranks: int) -> Iterator[Tensor]:
        """What each rank has, its share of every section side by side."""
        each = [section.tensor_split(ranks, dim=1) for section in tensor.chunk(sections, dim=1)]
        return (torch.cat(of_rank, 1) for of_rank in zip(*each, strict=True))

    sections, size = 2 if gated else 1, list(inner.shape)
    output, gradient = on_several_threads(partial(activated, inner))
    for ranks in powers_of_two(parts):
        each = (pieces(inner, sections, ranks), pieces(output, 1, ranks), pieces(gradient, sections, ranks))
        for part, wanted, wanted_gradient in zip(*each, strict=True):
            found, found_gradient = on_one_thread(partial(activated, part))
            compare(found, wanted, f"the activation of a piece of {size}, {how_split(ranks)},")
            compare(
                found_gradient, wanted_gradient, f"the activation's gradient of a piece of {size}, {how_split(ranks)},"
            )


def _try_squares(trials: Trials, _: int) -> None:
    """Of the gradient of some columns of a weight, and the same elements by themselves."""
    part = trials.numbers(257, 1024)[:, 301:702]
    found, expected = (
        torch.tensor(sums, dtype=torch.float64)
        for sums in (
            on_one_thread(partial(sums_of_squares, part.contiguous())),
            on_several_threads(partial(sums_of_squares, part)),
        )
    )
    compare(found, expected, f"the sum of squares of a gradient {list(part.shape)}, on one thread,")


_SWITCHES = (
    "SHARDWISE_ONEDNN",
    "SHARDWISE_TRITON",
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
)
"""Variables by which libraries, and this one, choose among kernels whose results differ by rounding."""


def arithmetic(device: torch.device) -> dict[str, str | None]:
    """What ranks must have in common to compute the same bits, by what people call it.

    Args:
        device: that this rank computes on.
    """
    found = {
        "PyTorch": torch.__version__,
        "the processor": processor_says("model name"),
        "its instructions": torch.backends.cpu.get_cpu_capability(),
        "the C compiler": compiler_version(),
    }
    if device.type == "cuda":
        found |= {"the GPU": torch.cuda.get_device_name(device), "the CUDA version": torch.version.cuda}
    return found | {name: os.environ.get(name) for name in _SWITCHES}


def check_arithmetic(device: torch.device, *, group: ProcessGroup) -> None:
    """Refuse ranks that would compute the same thing with other bits. Collective.

    Args:
        device: that this rank computes on.
        group: all ranks.

    Raises:
        ConfigError: two ranks differ; the message says in what. On every rank.
    """
    first, *others = gather_objects(arithmetic(device), "what ranks compute with", group=group)
    for rank, other in enumerate(others, 1):
        for name in first | other:
            if first.get(name) != other.get(name):
                raise ConfigError(
                    f"parallel.exact needs ranks that compute alike: {name} is {first.get(name)} on rank 0 and "
                    f"{other.get(name)} on rank {rank}; make them the same, or leave --exact out"
                )


# Its attributes are set by a function, which type checkers do not see.
_SETTINGS: Any = torch.utils.deterministic
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
# Those with which cuBLAS is deterministic, by its documentation; the first is the larger.
_DETERMINISTIC = (":4096:8", ":16:8")
_MKL_ORDER = "MKL_CBWR"


def fix_order_of_mkl() -> None:
    """Let MKL's products have the same bits on any number of threads; before the first product of this process.

    MKL reads the variable then. On processors of other vendors it was seen to need nothing. A value that is set stays.

    Source: Intel's guide to MKL, "Obtaining numerically reproducible results".
    """
    if is_intel():
        os.environ.setdefault(_MKL_ORDER, "AUTO,STRICT")


def use_deterministic_algorithms(device: torch.device) -> None:
    """From now on let PyTorch take deterministic kernels only, or raise an error that names the operation.

    On a CPU that is ``fix_order_of_mkl``.

    Args:
        device: of the run; before anything is multiplied on it.
    """
    if device.type != "cuda":
        fix_order_of_mkl()
        return
    if os.environ.get(_WORKSPACE) not in _DETERMINISTIC:
        os.environ[_WORKSPACE] = _DETERMINISTIC[0]
    # Not needed: nothing here reads memory that was not written.
    _SETTINGS.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)


@contextlib.contextmanager
def deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """``use_deterministic_algorithms`` for the length of a block."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = _SETTINGS.fill_uninitialized_memory
    use_deterministic_algorithms(device)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        _SETTINGS.fill_uninitialized_memory = filled
