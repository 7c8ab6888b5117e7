"""Values of pickles, and of the archives of ``torch.save``. No class is imported, and nothing is called.

A small machine runs the opcodes that Megatron's files have. Names of a closed list stand for plain values or
``Record``; every other name is refused. Tensors are positions in the file.
"""

import os
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO, RawIOBase
from pathlib import Path
from typing import Any

import torch

from shardwise.core.atomic_files import open_regular, read_regular
from shardwise.core.errors import CheckpointError
from shardwise.core.json_text import MAX_TABLE_BYTES, shown
from shardwise.core.tensor_files import DTYPES, StoredTensor, is_shape

_STORAGES = {
    "Float": "F32",
    "Double": "F64",
    "Half": "F16",
    "BFloat16": "BF16",
    "Long": "I64",
    "Int": "I32",
    "Short": "I16",
    "Char": "I8",
    "Byte": "U8",
    "Bool": "BOOL",
}
_REBUILD = "torch._utils._rebuild_tensor_v2"
_DCP, _STRATEGY = "torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.strategies.torch."
_RECORDS = {
    *("argparse.Namespace", "types.SimpleNamespace", "pathlib.PosixPath", "_io.BytesIO", "torch.device"),
    *("numpy.ndarray", "numpy.dtype", "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
    *(f"{_DCP}metadata.{each}" for each in ("Metadata", "TensorStorageMetadata", "TensorProperties", "MetadataIndex")),
    *(f"{_DCP}metadata.{each}" for each in ("ChunkStorageMetadata", "BytesStorageMetadata", "StorageMeta")),
    *(f"{_DCP}metadata._MEM_FORMAT_ENCODING", f"{_DCP}filesystem._StorageInfo"),
    *(f"{_DCP}planner.{each}" for each in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    # Of megatron-core 0.15 and before.
    *(f"{_STRATEGY}MCoreMetadata", f"{_STRATEGY}MCoreSavePlan"),
}
_ENUMS = {
    *("AttnBackend", "AttnMaskType", "AttnType", "LayerType", "ModelType", "CudaGraphScope", "CudaGraphModule"),
    *("InferenceCudaGraphScope", "Fp8Recipe", "Fp4Recipe", "RerunMode", "RerunState", "RerunDiagnostic"),
}
_SIGNALS = {f"signal.SIG{each}" for each in ("TERM", "INT", "USR1", "USR2")}
_VALUES: Mapping[str, Callable[[Any], Any]] = {
    "torch.Size": lambda sizes: _of(tuple, sizes),
    "torch.serialization._get_layout": lambda name: _of(str, name),
    "signal.Signals": lambda number: _of(int, number),
}
_PUSHED = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BINSTRING", "SHORT_BINSTRING"),
}
_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
}
_DAMAGES = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    OverflowError,
    MemoryError,
    EOFError,
    RecursionError,
    struct.error,
)


class _Name(str):
    """A name of the closed list that a pickle mentions."""


@dataclass(eq=False, repr=False)
class Record:
    """An object of a pickle: the name of its class, the arguments of its constructor, and its state."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes; empty if the state is something else."""
        return self.state if isinstance(self.state, dict) else {}

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class _Storage:
    dtype: str
    start: int
    num_bytes: int


def read_pickle(path: Path) -> Any:
    """Return the value of a file that is one pickle; raise CheckpointError if it is damaged or names anything else."""
    try:
        content = read_regular(path, limit=MAX_TABLE_BYTES)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return _parsed(content, path, lambda *args: None)


def read_archive(path: Path, start: int = 0, length: int | None = None) -> Any:
    """Return the value of an archive of ``torch.save``, a whole file or a part of one, with tensors as positions.

    Tensors are ``StoredTensor`` without a name.

    Raises:
        CheckpointError: the file cannot be read, is damaged or has another byte order, or its pickle names anything
            outside of the closed list.
    """
    try:
        with open_regular(path) as descriptor:
            size = os.fstat(descriptor).st_size - start if length is None else length
            with zipfile.ZipFile(_Part(descriptor, start, size)) as archive:
                entries = {each.filename.partition("/")[2]: each for each in archive.infolist()}
                pickled = entries["data.pkl"]
                if any(each.compress_type or each.compress_size != each.file_size for each in entries.values()):
                    raise CheckpointError(f"{path} is compressed, which torch.save never does; use another copy of it")
                if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
                    raise CheckpointError(f"{path} was written by a machine of another byte order; save it on this one")
                if pickled.file_size > MAX_TABLE_BYTES:
                    raise CheckpointError(
                        f"{path} has a pickle of {pickled.file_size} bytes; at most {MAX_TABLE_BYTES}"
                    )
                content = archive.read(pickled)

            def storage(kind: str, dtype: str, key: str, device: str, count: int) -> _Storage:
                entry = entries[f"data/{key}"]
                name = _STORAGES[dtype.removeprefix("torch.").removesuffix("Storage")]
                header = os.pread(descriptor, 30, start + entry.header_offset)
                names, extra = struct.unpack("<26x2H", header)
                begin = entry.header_offset + 30 + names + extra
                if kind != "storage" or count * DTYPES[name].itemsize > entry.file_size:
                    raise ValueError(f"its storage {shown(key)} of {count} {name} has {entry.file_size} bytes")
                if begin + entry.file_size > size:
                    raise ValueError(
                        f"its storage {shown(key)} ends at {begin + entry.file_size}, after its {size} bytes"
                    )
                return _Storage(name, start + begin, entry.file_size)

            return _parsed(content, path, storage)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, *_DAMAGES) as error:
        if isinstance(error, CheckpointError):
            raise
        what = "no data.pkl" if isinstance(error, KeyError) else error
        raise CheckpointError(
            f"{path} is damaged, or not written by torch.save of PyTorch 1.6 or newer ({what}); use another copy of it"
        ) from error


class _Part(RawIOBase):
    """Consecutive bytes of an open file, for ``zipfile``."""

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        self._descriptor, self._start, self._size, self._at = descriptor, start, size, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        if self._at < 0:
            raise ValueError(f"its directory is at {self._at}")
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        content = os.pread(
            self._descriptor, left if count is None or count < 0 else min(count, left), self._start + self._at
        )
        self._at += len(content)
        return content


def _parsed(content: bytes, path: Path, storage: Callable[..., Any]) -> Any:
    try:
        return _run(content, path, storage)
    except _DAMAGES as error:
        raise CheckpointError(f"{path} is damaged: of its pickle, {error}; use another copy of it") from error


def _run(content: bytes, path: Path, storage: Callable[..., Any]) -> Any:
    """Return the value of a pickle."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    marks: list[int] = []

    def to_mark() -> list[Any]:
        at = marks.pop()
        items = stack[at:]
        del stack[at:]
        return items

    arg: Any
    for opcode, arg, _ in pickletools.genops(BytesIO(content)):
        name = opcode.name
        if name in _PUSHED:
            stack.append(arg)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if arg is None else arg] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[arg])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "TUPLE":
            stack.append(tuple(to_mark()))
        elif name in ("APPENDS", "APPEND", "ADDITEMS"):
            items = [stack.pop()] if name == "APPEND" else to_mark()
            target = _of(set if name == "ADDITEMS" else list, stack[-1])
            (target.update if name == "ADDITEMS" else target.extend)(map(_key, items) if name == "ADDITEMS" else items)
        elif name in ("SETITEMS", "SETITEM"):
            items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else to_mark()
            _of(dict, stack[-1]).update(zip(map(_key, items[::2]), items[1::2], strict=True))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            parts = arg.split(" ") if name == "GLOBAL" else [_of(str, stack.pop(-2)), _of(str, stack.pop())]
            stack.append(_named(".".join(parts), path))
        elif name in ("REDUCE", "NEWOBJ"):
            args = _of(tuple, stack.pop())
            stack[-1] = _made(_of(_Name, stack[-1]), args)
        elif name == "BUILD":
            state = stack.pop()
            # A dict keeps its items; the attributes of an OrderedDict do not matter here.
            if not isinstance(stack[-1], dict):
                _of(Record, stack[-1]).state = state
        elif name == "BINPERSID":
            stack.append(storage(*_of(tuple, stack.pop())))
        elif name == "STOP":
            (value,) = stack
            return value
        elif name not in ("PROTO", "FRAME"):
            raise CheckpointError(f"{path}: its pickle has the opcode {name}, which Megatron's files never have")
    raise EOFError("it has no end")


def _key(value: Any) -> Any:
    # The hash of a deep tuple would overflow the stack of the process.
    if isinstance(value, tuple) and any(isinstance(each, tuple) for each in value):
        raise TypeError("a key is a tuple of tuples")
    return value


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{shown(value)} is used as {kind.__name__.strip('_').lower()}")
    return value


def _named(name: str, path: Path) -> Any:
    """Return what stands for a name; raise CheckpointError if it is not of the list."""
    prefix, _, last = name.rpartition(".")
    if prefix == "torch" and isinstance(dtype := getattr(torch, last, None), torch.dtype):
        return dtype
    is_enum = prefix.startswith("megatron.") and last in _ENUMS
    is_storage = prefix == "torch" and last.removesuffix("Storage") in _STORAGES and last.endswith("Storage")
    known = name in _RECORDS or name in _VALUES or name in (_REBUILD, "collections.OrderedDict", "_codecs.encode")
    if name in _SIGNALS:
        return name
    if not (is_enum or is_storage or known):
        raise CheckpointError(
            f"{path} is a pickle that names {shown(name)}, which is not on the list of names that Megatron's "
            "checkpoints have; nothing of it was run. If you trust the file, load it in Megatron and save it "
            "without that object"
        )
    return _Name(name)


def _made(name: str, args: tuple[Any, ...]) -> Any:
    """Return what the call of a name stands for."""
    if name == _REBUILD:
        return _tensor(*args[:4])
    if name == "collections.OrderedDict":
        if args:
            raise TypeError("an OrderedDict has its items as arguments, which Python 3 does not write")
        return {}
    if name == "_codecs.encode":
        return _of(str, args[0]).encode("latin-1")
    if name in _VALUES:
        return _VALUES[name](*args)
    if name.rpartition(".")[2] in _ENUMS:
        return args[0]
    return Record(name, args)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any) -> StoredTensor:
    storage, sizes, size = _of(_Storage, storage), list(_of(tuple, shape)), DTYPES[storage.dtype].itemsize
    if not is_shape(sizes) or type(offset) is not int or offset < 0:
        raise ValueError(f"a tensor has the shape {shown(sizes)} at {shown(offset)}")
    count = 1
    expected: list[int] = []
    for length in reversed(sizes):
        expected.insert(0, count)
        count *= length
    if any(a != b and length > 1 for a, b, length in zip(expected, stride, sizes, strict=True)):
        raise ValueError(f"a tensor of shape {sizes} has the strides {shown(stride)}, and not its elements in order")
    if (offset + count) * size > storage.num_bytes:
        raise ValueError(f"a tensor of shape {sizes} begins at {offset} of a storage of {storage.num_bytes} bytes")
    return StoredTensor("", Path(), storage.dtype, tuple(sizes), storage.start + offset * size, count * size)
