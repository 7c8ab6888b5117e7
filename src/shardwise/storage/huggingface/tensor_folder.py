"""Files of a Hugging Face folder: one safetensors file, or several with an index, and companion files."""

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from shardwise.core import json_text
from shardwise.core.atomic_files import can_be_a_name
from shardwise.core.errors import CheckpointError, DataError
from shardwise.core.json_text import MAX_CONFIG_BYTES, MAX_TABLE_BYTES
from shardwise.core.tensor_files import DTYPES, StoredTensor, read_box, read_header, some_tensors
from shardwise.data.tokenizer.chat_template import TEMPLATE_NAME, TOOLS_TEMPLATE_NAME, ChatTemplate

_LOGGER = logging.getLogger("shardwise")

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")


def is_weight_dtype(stored: StoredTensor) -> bool:
    """True if the stored tensor has a dtype of weights."""
    return stored.dtype in _WEIGHT_DTYPES


def weight_dtype(stored: StoredTensor) -> torch.dtype:
    """Return the dtype of a stored weight; raise CheckpointError if it is not a dtype of weights."""
    if not is_weight_dtype(stored):
        raise CheckpointError(
            f"tensor {stored.name!r} of {stored.file} is of dtype {stored.dtype}; weights must be of one of "
            f"{', '.join(_WEIGHT_DTYPES)} (quantized checkpoints are not supported)"
        )
    return DTYPES[stored.dtype]


# Number of bytes of each of two tensors that are in memory while they are compared.
_COMPARED_BYTES = 16 << 20


def same_values(one: StoredTensor, other: StoredTensor, dtype: torch.dtype | None = None) -> bool:
    """Compare all values of two stored tensors, a few rows at a time.

    Weights are compared in ``dtype``, or in their own; then a weight that is the other one rounded is the same.
    """
    if one.shape != other.shape:
        return False
    rows, rest = (one.shape or (1,))[0], one.shape[1:]
    step = max(1, rows * _COMPARED_BYTES // max(1, one.num_bytes))
    for start in range(0, rows, step):
        offsets, sizes = ((start, *(0 for _ in rest)), (min(step, rows - start), *rest)) if one.shape else ((), ())
        a, b = (read_box(each, offsets, sizes).reshape(-1) for each in (one, other))
        if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            continue
        if not (is_weight_dtype(one) and is_weight_dtype(other)):
            return False
        common = {a.dtype, b.dtype} if dtype is None else {dtype}
        if not any(torch.equal(a.to(each), b.to(each)) for each in common):
            return False
    return True


class TensorFolder:
    """Tensors of a folder with one ``model.safetensors``, or several files and their index; only headers are read.

    Attributes:
        copies: tensors of the same names in other files, which are not read.
        indexed: names of tensors for which the folder names the file to read.

    Raises:
        CheckpointError: a file is missing, truncated, or of another format; or the only weights are a pickle.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes_read = 0
        self.tensors: dict[str, StoredTensor] = {}
        self.copies: list[StoredTensor] = []
        # If the path exists and is not a regular file, reading it reports so.
        index = {} if (folder / WEIGHTS_NAME).exists() else _read_index(folder)
        names = sorted(set(index.values())) or [WEIGHTS_NAME]
        for file in names:
            for name, tensor in read_header(folder / file).items():
                if index.get(name, file) == file and name not in self.tensors:
                    self.tensors[name] = tensor
                else:
                    self.copies.append(tensor)
        missing = sorted(index.keys() - self.tensors.keys())
        if missing:
            raise CheckpointError(
                f"tensor {missing[0]!r} is not in {folder / index[missing[0]]}, where {INDEX_NAME} says it is"
            )
        # Like transformers, an index next to model.safetensors is not read.
        self.indexed = index.keys() or (self.tensors.keys() if (folder / INDEX_NAME).exists() else set())
        for path in sorted(folder.glob("*.safetensors")):
            if path.name not in names and not path.name.startswith("adapter_"):
                # The model does not need this file, so it may be damaged.
                with suppress(CheckpointError):
                    self.copies += read_header(path).values()
        self.copies = [tensor for tensor in self.copies if tensor.name in self.tensors]

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Read a box of a weight to the CPU, given by name, first index and number of indices in each dimension."""
        box = read_box(self.tensors[name], offsets, sizes)
        self.bytes_read += box.nbytes
        return box

    def differing_copies(self, first: int = 0, step: int = 1) -> list[int]:
        """Compare every ``step``-th of ``copies``, from ``first`` on, and return the indices of those that differ."""
        every = range(first, len(self.copies), step)
        return [at for at in every if not same_values(self.tensors[self.copies[at].name], self.copies[at])]

    def judge_copies(self, differing: Sequence[int]) -> list[str]:
        """Return a line for each two files with different copies; CheckpointError if no index says which is used."""
        names: dict[tuple[Path, Path], list[str]] = {}
        for copy in (self.copies[at] for at in differing):
            used = self.tensors[copy.name].file
            if copy.name not in self.indexed:
                raise CheckpointError(
                    f"{used} and {copy.file} have different values of tensor {copy.name!r}, and no {INDEX_NAME} says "
                    "which are the model's; remove the other file"
                )
            names.setdefault((used, copy.file), []).append(copy.name)
        return [
            f"{other} has other values of {some_tensors(each)} than {used}, which is read"
            for (used, other), each in names.items()
        ]


def read_json(path: Path, *, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read a JSON file as ``core.json_text.read_json`` does; any error is a CheckpointError that names the file."""
    try:
        # Limits of the time steps of Mamba 2 are infinite in ``config.json``.
        return json_text.read_json(path, limit=limit, names_infinity=path.name == "config.json")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX_NAME
    if not path.exists():
        for each in (path, folder / WEIGHTS_NAME):
            if each.is_symlink():
                raise CheckpointError(f"{each} is a link that leads nowhere; put the file there")
        raise CheckpointError(_what_is_missing(folder))
    files = read_json(path, limit=MAX_TABLE_BYTES).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{path} has no weight_map that names a file for each tensor")
    for name, file in files.items():
        # A name with folders could point anywhere on the disk.
        if not isinstance(file, str) or PurePosixPath(file).name != file or not can_be_a_name(file):
            raise CheckpointError(f"{path}: tensor {name!r} cannot be in a file called {file!r}")
        if not os.path.lexists(folder / file):
            raise CheckpointError(f"{folder / file} is missing, which holds tensor {name!r} by {INDEX_NAME}")
    return files


def _what_is_missing(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}"
    pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if shards:
        return f"{folder} has {shards[0]}, but no {INDEX_NAME} that says which tensor is where, and no {WEIGHTS_NAME}"
    if pickles:
        return (
            f"{folder} has weights only in {pickles[0]}, a pickle, which can run code when it is read; convert it to "
            "safetensors (transformers: from_pretrained, then save_pretrained)"
        )
    return f"{folder} has neither {WEIGHTS_NAME} nor {INDEX_NAME}"


_TOKENIZER, _TEMPLATE, _GENERATION, _PROCESSORS = (
    tuple(names.split())
    for names in (
        "tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json added_tokens.json vocab.json "
        "vocab.txt merges.txt",
        "chat_template.json chat_template.jinja additional_chat_templates/tool_use.jinja",
        "generation_config.json",
        "preprocessor_config.json processor_config.json image_processor_config.json video_preprocessor_config.json",
    )
)

README_NAME = "README.md"
BASE_README_NAME = "BASE_README.md"
"""Name of a base model's readme in the folder of a model that was trained from it."""

_LICENCES = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY")
_TEXTS = ("", ".md", ".txt", ".rst", ".html", ".pdf")
# A larger file with such a name is not a licence or readme.
_LARGEST_TEXT = 16 << 20


def own_file(folder: Path, name: str) -> Path | None:
    """Return the path without links of a model's file whose content may be written to a result; None if there is none.

    A downloaded folder may have a link to any file of the user. So a link counts as the model's file only
    if it ends in the folder or, in a snapshot of the hub's cache, in ``blobs`` of the same model. Otherwise one line of
    the log names it.
    """
    path = folder / name
    if not path.is_file():
        return None
    target, root = path.resolve(), folder.resolve()
    # In the hub's cache, models--NAME/snapshots/REVISION/FILE is a link to models--NAME/blobs/HASH.
    cached = (each.parent for each in root.parents if each.name == "snapshots" and each.parent.name[:8] == "models--")
    if target.is_relative_to(root) or any(target.parent == model / "blobs" for model in cached):
        return target
    log_once(
        f"{path} is a link to {target}, outside of the model's folder, and is left out; if it is the model's, replace "
        "the link by a copy"
    )
    return None


@cache
def log_once(line: str) -> None:
    """Log a line that the user should see, once in this process."""
    _LOGGER.warning("%s", line)


def companion_files(
    folder: Path, *, beside_card: bool = False, adapters: Path | None = None
) -> Iterator[tuple[Path, str]]:
    """Yield the files to copy from a model's folder (see ``own_file``), and the name of each copy.

    The readme becomes ``BASE_README.md`` ``beside_card``; files of ``adapters`` replace tokenizer, chat template and
    generation settings.
    """
    for names, replaced in _replaced_by(adapters).items():
        source = adapters if adapters is not None and replaced else folder
        for name in names:
            if (path := own_file(source, name)) is not None:
                yield path, name
    for name in sorted(os.listdir(folder)):
        stem, suffix = os.path.splitext(name)
        is_licence = stem.upper().startswith(_LICENCES) and suffix.lower() in _TEXTS
        if not is_licence and name not in (README_NAME, BASE_README_NAME):
            continue
        if (path := own_file(folder, name)) is not None and path.stat().st_size <= _LARGEST_TEXT:
            if name == README_NAME and beside_card:
                yield path, BASE_README_NAME
            elif name != BASE_README_NAME or not (beside_card and own_file(folder, README_NAME) is not None):
                yield path, name


def _replaced_by(adapters: Path | None) -> dict[tuple[str, ...], bool]:
    """Return the kinds of files, and whether those of adapters replace the model's."""
    kinds = dict.fromkeys((_TOKENIZER, _TEMPLATE, _GENERATION, _PROCESSORS), False)
    if adapters is not None:
        kinds[_TOKENIZER] = (adapters / _TOKENIZER[0]).is_file()
        kinds[_TEMPLATE] = any((adapters / name).is_file() for name in _TEMPLATE)
        kinds[_GENERATION] = (adapters / _GENERATION[0]).is_file()
    return kinds


def write_chat_template(target: Path, folder: Path, adapters: Path) -> None:
    """Write the chat template that ``adapters`` of the model in ``folder`` are used with, if the copied files lack it.

    One folder may have its template in a separate file, and the other in the settings of its tokenizer.
    """
    # A template that does not work is copied unchanged.
    with suppress(DataError):
        template = _own_template(adapters) or _own_template(folder)
        copied = ChatTemplate.load(target)
        if template is None or (copied is not None and copied.sha256 == template.sha256):
            return
        (target / TEMPLATE_NAME).write_text(template.source, encoding="utf-8")
        of_tools = target / TOOLS_TEMPLATE_NAME
        of_tools.unlink(missing_ok=True)
        if template.source_for(True) != template.source:
            of_tools.parent.mkdir(exist_ok=True)
            of_tools.write_text(template.source_for(True), encoding="utf-8")


def _own_template(folder: Path) -> ChatTemplate | None:
    """Load a folder's chat template; None if one of its files is not the folder's own."""
    stored = [name for name in (*_TEMPLATE, _TOKENIZER[1]) if (folder / name).is_file()]
    return ChatTemplate.load(folder) if all(own_file(folder, name) for name in stored) else None


def copy_companion_files(source: Path, target: Path, *, beside_card: bool = False) -> None:
    """Copy ``companion_files`` to a folder; raise OSError if one cannot be read or written."""
    for path, name in companion_files(source, beside_card=beside_card):
        # A link may point to the file itself.
        if not (target / name).exists() or not os.path.samefile(path, target / name):
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target / name)
