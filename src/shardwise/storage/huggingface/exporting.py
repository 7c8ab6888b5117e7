"""Save a model as a Hugging Face folder, completely or not at all, without the whole model in any rank's memory."""

import glob
import itertools
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.core.communication.agreement import agree, gather_objects
from shardwise.core.errors import ConfigError
from shardwise.core.folder_lock import FolderLock, lock_of_target
from shardwise.core.sharded_state import gather_parameter
from shardwise.core.sharding import ParamShard
from shardwise.core.sharding.balanced import is_sharded
from shardwise.core.tensor_files import TensorFile, check_finite, write_errors
from shardwise.core.topology import Groups, gather_from_stages, model_groups
from shardwise.data.tokenizer.chat_template import TEMPLATE_NAME
from shardwise.models.description import Model, ModelChunks, describe_model
from shardwise.nn.quantization import QuantizedTensor
from shardwise.storage.checkpoint.folder import fsync
from shardwise.storage.huggingface.architectures import ARCHITECTURES
from shardwise.storage.huggingface.architectures.architecture import ExpertNames
from shardwise.storage.huggingface.mapping import Composition, Shape, compose
from shardwise.storage.huggingface.pretrained import CONFIG_NAME, architecture_of, config_to_json, own_config
from shardwise.storage.huggingface.tensor_folder import (
    INDEX_NAME,
    README_NAME,
    WEIGHTS_NAME,
    companion_files,
    write_chat_template,
)

DEFAULT_MAX_FILE_SIZE = 5_000_000_000


def save_pretrained(
    model: Model | ModelChunks | Sequence[Model],
    folder: str | Path,
    *,
    source: str | Path | None = None,
    architecture: str | None = None,
    dtype: torch.dtype | None = None,
    expert_names: ExpertNames | None = None,
    max_file_size: int = DEFAULT_MAX_FILE_SIZE,
    fields: Mapping[str, Any] | None = None,
    card: str | None = None,
    adapters: str | Path | None = None,
) -> None:
    """Save a model as a Hugging Face folder, which transformers can load.

    Collective over the model's tensor-, pipeline- and data-parallel ranks, which must share a file system. Parameters
    are gathered and written one at a time: in addition to its part of the model, a rank needs memory for less than
    three of the largest parameters. The folder gets its name when every byte is on the disk.

    Args:
        model: a ``GPT`` or ``Bert``, or this stage's chunks; not modified.
        folder: destination; must not exist, or must be empty.
        source: folder with companion files to copy (tokenizer, processors, generation, licence, readme). If
            its ``config.json`` has the same architecture, its fields are kept unless they contradict this model.
        architecture: the ``model_type`` to write; None for that of ``source``, or else the first that fits.
        dtype: dtype of the stored parameters; None for their own. Buffers keep theirs.
        expert_names: "separate" for a tensor for each expert, or "fused" for one for all experts of a layer, as
            transformers 5 has in memory; None for the form that transformers writes.
        max_file_size: maximum bytes of weights in a file, unless one parameter has more. Each stage writes its own
            files.
        fields: further fields of ``config.json``, such as the ids of special tokens.
        card: text of ``README.md``; the readme of ``source`` is then copied to ``BASE_README.md``.
        adapters: folder of the merged adapters; its tokenizer, chat template and generation settings replace those of
            ``source``.

    Raises:
        ConfigError: the architecture cannot express the model or has no choice of names, or ``folder`` exists.
        CheckpointError: the folder cannot be written (no permission, disk full), or a weight is not finite in the dtype
            that is written. Every rank raises the same error, and all new files are removed.
    """
    models = cast("list[Model]", list(model) if isinstance(model, ModelChunks | Sequence) else [model])
    groups = models[0].groups
    replicas: ProcessGroup | None = getattr(groups, "dp_cp", None) or getattr(groups, "dp", None)
    # The unfinished folder is named after the target; a path such as "." has a name only when it is absolute.
    target = Path(os.path.abspath(folder))

    is_first = replicas is None or replicas.rank() == 0

    def prepare() -> _Export:
        own = None if source is None else Path(source)
        if own is not None and not own.is_dir():
            raise ConfigError(f"there is no folder {own} to copy the tokenizer from")
        if adapters is not None and (own is None or not Path(adapters).is_dir()):
            why = "source, the folder of their model, is None" if own is None else f"there is no folder {adapters}"
            raise ConfigError(f"the files of adapters replace those of their model, but {why}")
        for each in itertools.chain(*(model.parameters() for model in models)):
            if isinstance(each, QuantizedTensor):
                raise ConfigError(f"the model's weights are in {each.kind}, which is not written; save its adapters")
        description = describe_model(models[0])
        base = None if own is None else own_config(own)
        is_known = description.transformers_config is not None or (base or {}).get("model_type") in ARCHITECTURES
        base = base if is_known else None
        stored_dtype = dtype or models[0].config.params_dtype
        config = config_to_json(description, architecture=architecture, dtype=stored_dtype, base=base)
        table = architecture_of(description, config["model_type"]).table_with(expert_names)
        parts = {
            key: _StoredParameter(
                shard,
                compose(table, key, shard.layout.global_shape, description),
                # A buffer keeps its dtype: the bias of the choice of experts is in fp32, in transformers too.
                dtype if dtype is not None and isinstance(shard.data, nn.Parameter) else shard.dtype,
            )
            for model in models
            for key, shard in model.sharded_state_dict().items()
        }
        return _Export(config | dict(fields or {}), own, None if adapters is None else Path(adapters), parts, card)

    def export(ranks: Sequence[ProcessGroup]) -> None:
        content = agree(prepare, group=ranks)
        _write_folder(target, content, groups, ranks, max_file_size, writes=is_first)

    if replicas is None or replicas.size() == 1:
        export(model_groups(groups))
    elif is_sharded(next(models[0].parameters())) or models[0].config.experts is not None:
        # Each replica holds a part of every parameter, or of the experts.
        export([*model_groups(groups), replicas])
    else:
        # The other replicas wait here, and get the error if the export fails.
        agree(lambda: export(model_groups(groups)) if is_first else None, group=replicas)


@dataclass(frozen=True)
class _StoredParameter:
    shard: ParamShard
    composition: Composition
    dtype: torch.dtype

    @property
    def tensors(self) -> dict[str, tuple[torch.dtype, Shape]]:
        return {name: (self.dtype, shape) for name, shape in self.composition.stored_shapes.items()}

    @property
    def size(self) -> int:
        return math.prod(self.composition.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Export:
    config: Mapping[str, Any]
    source: Path | None
    adapters: Path | None
    parts: Mapping[str, _StoredParameter]
    card: str | None


def _write_folder(
    target: Path, content: _Export, groups: Groups, ranks: Sequence[ProcessGroup], max_file_size: int, *, writes: bool
) -> None:
    is_first = all(group.rank() == 0 for group in ranks)
    keys = gather_from_stages(list(content.parts), "the names of parameters", groups)
    # Do not write the last stage's copy of a tied weight.
    before = {key for earlier in keys[: groups.stage] for key in earlier}
    own_files = _dealt_out([part for key, part in content.parts.items() if key not in before], max_file_size)
    own_contents = [
        ([name for part in parts for name in part.tensors], sum(part.size for part in parts)) for parts in own_files
    ]
    contents = gather_from_stages(own_contents, "the files to be written", groups)
    first, files = sum(map(len, contents[: groups.stage])), list(itertools.chain(*contents))
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    weight_map = {tensor: name for name, (tensors, _) in zip(names, files, strict=True) for tensor in tensors}
    total = sum(size for _, size in files)
    index: dict[str, Any] | None = {"metadata": {"total_size": total}, "weight_map": weight_map}
    if len(files) == 1:
        names, index = [WEIGHTS_NAME], None
    token = secrets.token_hex(4)
    for group in ranks:
        token = gather_objects(token, "a name for the unfinished folder", group=group)[0]
    partial = target.with_name(f".{target.name}.{token}.partial")
    with ExitStack() as stack:
        agree(lambda: stack.enter_context(begun_folder(target, partial)) if is_first else None, group=ranks)
        own = dict(zip(names[first:], own_files, strict=False))
        agree(lambda: _write_files(partial, own, groups, writes=writes), group=ranks)
        agree(lambda: _finish(target, partial, content, index) if is_first else None, group=ranks)


def _dealt_out(parts: Sequence[_StoredParameter], max_file_size: int) -> list[list[_StoredParameter]]:
    files: list[list[_StoredParameter]] = []
    room = 0
    for part in parts:
        if not files or part.size > room:
            files.append([])
            room = max_file_size
        files[-1].append(part)
        room -= part.size
    return files


def _write_files(
    partial: Path, files: Mapping[str, Sequence[_StoredParameter]], groups: Groups, *, writes: bool
) -> None:
    """Gather this stage's parameters, and write the files in turn on its ranks."""
    # A rank that fails still takes part in the gathers, because the others need it, and raises its error at the end.
    failure: Exception | None = None
    for number, (name, parts) in enumerate(files.items()):
        file: TensorFile | None = None
        is_mine = writes and groups.tp.rank() == number % groups.tp.size()
        tensors = {key: tensor for part in parts for key, tensor in part.tensors.items()}
        for part in parts:
            group = groups.experts if part.shard.replicas.is_of_expert else None
            whole = gather_parameter(part.shard.data, part.shard.layout, group=group or groups.tp)
            if is_mine and failure is None:
                try:
                    file = file or TensorFile(partial / name, tensors)
                    for key, tensor in part.composition.to_stored(whole).items():
                        check_finite(tensor, f"tensor {key!r}", dtype=part.dtype)
                        file.write(key, tensor.to(part.dtype))
                except Exception as error:
                    failure = error
                    if file is not None:
                        file.close()
            # Free the whole parameter before the next one is gathered.
            del whole
    if failure is not None:
        raise failure


def check_target(target: Path) -> None:
    """Raise ConfigError unless ``target`` does not exist or is an empty folder."""
    with write_errors(target):
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise ConfigError(f"{target} exists; choose another folder, or remove it first")


@contextmanager
def begun_folder(target: Path, partial: Path) -> Iterator[None]:
    """Make and lock the unfinished folder, which is removed in the end; first remove those of killed exports."""
    check_target(target)
    with FolderLock(**lock_of_target(target)), ExitStack() as stack:
        with write_errors(target):
            for left in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir()
        stack.callback(shutil.rmtree, partial, ignore_errors=True)
        yield


def _finish(target: Path, partial: Path, content: _Export, index: Mapping[str, Any] | None) -> None:
    texts = {CONFIG_NAME: content.config} | ({} if index is None else {INDEX_NAME: index})
    for name, value in texts.items():
        with write_errors(target / name):
            (partial / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    if content.source is not None:
        with write_errors(target):
            beside_card = content.card is not None
            copies = list(companion_files(content.source, beside_card=beside_card, adapters=content.adapters))
        for path, name in copies:
            with write_errors(target / name):
                (partial / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, partial / name)
        if content.adapters is not None:
            with write_errors(target / TEMPLATE_NAME):
                write_chat_template(partial, content.source, content.adapters)
    if content.card is not None:
        with write_errors(target / README_NAME):
            (partial / README_NAME).write_text(content.card, encoding="utf-8")
    with write_errors(target):
        for path in partial.rglob("*"):
            fsync(path)
        fsync(partial)
        # The rename replaces an empty folder, and fails if the folder was filled in the meantime.
        partial.rename(target)
        fsync(target.parent)
