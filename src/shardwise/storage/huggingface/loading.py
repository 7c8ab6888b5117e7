"""From a Hugging Face folder to a model: each rank reads the rows and columns that it holds, and nothing else."""

from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.core.communication.agreement import agree
from shardwise.core.communication.context import default_device
from shardwise.core.errors import CheckpointError
from shardwise.core.initialization import draw_seed, part_seeded
from shardwise.core.sharding import ParamShard
from shardwise.core.topology import Groups, gather_from_stages, model_groups
from shardwise.models.classification import Classification
from shardwise.models.description import Model, ModelChunks, build_model, chunks_of, model_config
from shardwise.nn import ReplicatedLinear
from shardwise.nn.quantization import QuantizedTensor
from shardwise.storage.huggingface.filling import check_copies, check_shapes, fill_shard_
from shardwise.storage.huggingface.mapping import Composition, compose
from shardwise.storage.huggingface.pretrained_folder import PretrainedFolder
from shardwise.storage.huggingface.quantizing import BaseQuantization, fill_quantized_, make_room_


def load_pretrained(
    folder: str | Path,
    *,
    groups: Groups,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    max_sequence_length: int | None = None,
    vocab_size: int | None = None,
    classification: Classification | None = None,
    quantization: BaseQuantization | None = None,
    **settings: Any,
) -> Model | ModelChunks:
    """The model in a Hugging Face folder, split over the ranks.

    Collective over the tensor- and pipeline-parallel groups. Each rank allocates its own part and reads it slice by
    slice, so that no rank needs memory for more than that and the largest of its tensors once more.

    Args:
        folder: a folder with ``config.json`` and safetensors files.
        groups: the model's process groups.
        dtype: dtype of the parameters; if None that of ``config.json``, or else that of the first tensor.
        device: device of the parameters; PyTorch's default device if None, or this rank's GPU for groups of GPUs.
        max_sequence_length: longest sequence, for models without learned positions; that of ``config.json`` if None.
        vocab_size: number of ids that the model is to have; that of ``config.json`` if None. Rows of ids that the
            folder does not have are 0; those of ids that the model does not have are not read.
        classification: the head that the model is to have. If the folder's is not of that task and size, it is a new
            one, whose initial values depend on the state of PyTorch's default generator, the same at every layout; what
            the folder has of other heads is not read.
        quantization: which weights are quantised, once they are read, and stay frozen; none if None.
        **settings: fields of ``ModelConfig`` that the folder does not decide, or that replace what it says
            (``hidden_dropout``).

    Returns:
        A ``GPT`` or ``Bert`` in training mode; ``ModelChunks`` of them if ``settings`` has
        ``virtual_pipeline_model_parallel_size``.

    Raises:
        ConfigError: an unknown architecture or value, heads or layers that cannot be split over the ranks, a
            quantisation that this machine cannot do.
        CheckpointError: a file or tensor that is missing, one too many, or of another shape than the config says;
            all errors alike on every rank, naming the field or tensor.
    """
    source = agree(lambda: _opened(folder, classification, vocab_size), group=model_groups(groups))
    settings = {
        "params_dtype": dtype or source.dtype,
        "pipeline_model_parallel_size": groups.num_stages,
        **settings,
    }
    config = agree(
        # Every value is read from the files, so none is initialised.
        lambda: model_config(source.description, perform_initialization=False, **settings),
        group=model_groups(groups),
    )
    where = torch.device(device) if device is not None else default_device(groups.tp)

    def built(on: torch.device) -> list[Model]:
        return [
            build_model(
                source.description,
                config,
                groups=groups,
                device=on,
                max_sequence_length=max_sequence_length,
                vp_stage=chunk,
            )
            for chunk in chunks_of(config)
        ]

    # A size that contradicts the tensors is reported before memory is allocated for it.
    agree(lambda: _check_sizes(source), group=model_groups(groups))
    outlines = built(torch.device("meta"))
    outline_parts, _ = _plan(outlines, source, groups)
    if quantization is None:
        models = built(where)
    else:
        agree(quantization.check, group=model_groups(groups))
        for model in outlines:
            make_room_(model, outline_parts, quantization, where)
        models = outlines
    for model in models:
        # Modules that are added to the model later are initialised as in any other model.
        model.config.perform_initialization = True
    parts, names = _plan(models, source, groups)

    def fill() -> None:
        for shard, composition in parts.values():
            if isinstance(shard.data, QuantizedTensor):
                continue
            fill_shard_(shard, composition, source.tensors, names)
            check_copies(shard, composition, source, names)

    agree(fill, group=model_groups(groups))
    for shard, composition in parts.values():
        if isinstance(shard.data, QuantizedTensor):
            fill_quantized_(shard, composition, source, names, groups)
    if source.changes_head:
        seed = draw_seed()
        for model in models:
            _start_head_(model, parts, seed)
    return models[0] if config.virtual_pipeline_model_parallel_size is None else ModelChunks(models)


def _opened(folder: str | Path, classification: Classification | None, vocab_size: int | None) -> PretrainedFolder:
    source = PretrainedFolder(folder)
    if vocab_size is not None:
        source.change_vocabulary_(vocab_size)
    if classification is not None:
        source.change_head_(classification)
    return source


def _start_head_(model: Model, filled: Container[str], seed: int) -> None:
    """Give initial values to what of a classification head was not read."""
    for part in ("classifier", "pooler"):
        module = getattr(model, part, None)
        if module is None or any(f"{part}.{name}" in filled for name, _ in module.named_parameters()):
            continue
        with part_seeded(seed, part):
            for each in module.modules():
                if isinstance(each, ReplicatedLinear):
                    each.reset_parameters()


def _check_sizes(source: PretrainedFolder) -> None:
    """Check the sizes that decide on the number of tensors, and of what is made beside them."""
    description, stored = source.description, source.tensors.tensors.values()
    if description.num_layers > len(stored):
        raise CheckpointError(
            f"{source.path} has {len(stored)} tensors, and its config.json asks for {description.num_layers} layers"
        )
    longest = max((size for tensor in stored for size in tensor.shape), default=0)
    if description.kv_channels > longest:
        raise CheckpointError(
            f"{source.path} has no tensor as wide as the heads that its config.json asks for, {description.kv_channels}"
        )


def _plan(
    models: Sequence[Model], source: PretrainedFolder, groups: Groups
) -> tuple[dict[str, tuple[ParamShard, Composition]], dict[str, str]]:
    """This stage's parameters and what each is made of, and the stored names; collective, errors alike everywhere."""

    def compositions() -> dict[str, tuple[ParamShard, Composition]]:
        heads = source.description.heads
        table = source.architecture.table_of(source.description.classification)
        return {
            key: (shard, compose(table, key, source.stored_shape(key, shard.layout.global_shape), heads))
            for model in models
            for key, shard in model.sharded_state_dict().items()
            if not (source.changes_head and key.startswith("classifier."))
        }

    parts = agree(compositions, group=model_groups(groups))
    own = sorted({name for _, composition in parts.values() for name in composition.stored_shapes})
    expected = {name for names in gather_from_stages(own, "the names of tensors", groups) for name in names}

    def check() -> dict[str, str]:
        names = source.stored_names(expected)
        for key, (_, composition) in list(parts.items()):
            if composition.stored_shapes.keys() <= names.keys():
                check_shapes(source.tensors, composition, names)
            else:
                # Of a new head.
                del parts[key]
        return names

    return parts, agree(check, group=model_groups(groups))
