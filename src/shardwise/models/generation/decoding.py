"""Decode one token on CUDA with the same kernels at the same addresses for every token.

The token's id, its position and the length of the cache are in buffers on the GPU, and the host reads none of them. So
the pass can be recorded once as a CUDA graph and launched as a unit. Without the graph, launching the operations for a
single sequence takes longer than executing them.
"""

import torch
from torch import Tensor

from shardwise.kernels import dispatch
from shardwise.models.generation.cache import PreallocatedCache
from shardwise.models.gpt import GPT
from shardwise.models.transformer.attention import SelfAttention


class CacheAtPosition:
    """A cache that writes keys and values at a position on the device and returns the whole buffer.

    A ``models.transformer.core_attention.KeyValueCache`` for ``kernels.decode_attention``.

    Attributes:
        query_position: int64 ``[1]``.
    """

    def __init__(self, cache: PreallocatedCache, query_position: Tensor) -> None:
        self._cache = cache
        self.query_position = query_position

    def append(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write ``[b, groups/t, 1, d]`` each; return the buffers ``[b, groups/t, capacity, d]``."""
        keys, values = self._cache.whole_layer(layer_number)
        keys.index_copy_(2, self.query_position, key)
        values.index_copy_(2, self.query_position, value)
        return keys, values


class DecodeStep:
    """Forward pass for one token after those in a cache.

    Args:
        model: the model, in evaluation mode at each call; ``why_not`` returns None for it.
        cache: cache of the model, with room for the token.
    """

    def __init__(self, model: GPT, cache: PreallocatedCache) -> None:
        device = model.embedding.word_embeddings.weight.device
        self._model, self._cache = model, cache
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._at_position = CacheAtPosition(cache, self._position)
        # A fused exchange needs the host at each step, so a CUDA graph cannot record it.
        fused = getattr(model.decoder, "fused", False)
        self._is_recorded = not fused and dispatch.CUDA_GRAPHS.why_not(_call(self._token)) is None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None

    @staticmethod
    def why_not(model: GPT) -> str | None:
        """Return the reason why ``DecodeStep`` does not support a model; None if it does."""
        weight = model.embedding.word_embeddings.weight
        if (why_not := dispatch.DECODE_TRITON.why_not(_call(weight))) is not None:
            return why_not
        if max(heads.width for heads in model.config.kinds_of_heads) > dispatch.WIDEST_HEAD:
            return f"there is no kernel for heads wider than {dispatch.WIDEST_HEAD}"
        if model.depends_on_length:
            return "the rotary frequencies depend on the number of tokens"
        if model.config.experts is not None:
            return "experts read numbers of tokens on the host"
        attentions = [module for module in model.modules() if isinstance(module, SelfAttention)]
        if len(attentions) != model.config.num_layers or not all(each.attends_at_position for each in attentions):
            return "its layers attend otherwise than by a softmax over even groups of queries"
        return None

    def __call__(self, token: Tensor) -> Tensor:
        """Run the model on a token, ``[1]`` int64.

        Returns:
            The logits of the next token, ``[1, v/t]``, or ``[1, v]`` for a model without ``parallel_output``. The next
            call may overwrite them.
        """
        self._token.copy_(token.view(1, 1))
        self._position.fill_(self._cache.length)
        logits = self._replay() if self._is_recorded else self._run()
        self._cache.extend(1)
        return logits

    def _run(self) -> Tensor:
        return self._model.next_logits(self._token, self._position, cache=self._at_position)

    def _replay(self) -> Tensor:
        if self._graph is None:
            # Warm up on a separate stream before the recording, as PyTorch requires. Each run writes the same keys to
            # the same position.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._run()
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._logits = self._run()
        self._graph.replay()
        assert self._logits is not None
        return self._logits


def _call(tensor: Tensor) -> dispatch.Call:
    return dispatch.Call(tensor.device.type, tensor.dtype, tensor.numel(), tensor.device.index or 0)
