"""Shardwise: Megatron-style tensor parallelism for PyTorch, small and exact, on any device.

Nothing heavy is imported here, so that ``import shardwise`` and ``shardwise --help`` are quick; import what you use::

    from shardwise import parallel_state, tensor_parallel
    from shardwise.config import TransformerConfig
    from shardwise.models.gpt import GPTModel
"""

__version__ = "0.1.0"
