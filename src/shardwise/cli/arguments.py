"""Arguments of the commands: dataclasses whose fields are the flags. tyro writes their help.

Flags are parsed in one pass and override the settings of a TOML file. A mistake gives an error of one line.
``VARIABLES`` lists the environment variables that are read or set.
"""

import dataclasses
import inspect
import os
import re
import textwrap
import tomllib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, cast, get_origin

import tyro

from shardwise.core.atomic_files import no_data, no_folder, read_regular
from shardwise.core.errors import CheckpointError, ConfigError, DataError
from shardwise.core.folder_lock import check_free
from shardwise.run.settings import DpoSettings, FinetuneSettings, RunSettings, Settings
from shardwise.run.unfinished import check_done, check_unused, resume_hint
from shardwise.training.bounds import (
    DEFAULT_TIMEOUT,
    LOCAL_RANKS,
    RANKS,
    TIMEOUT,
    Checked,
    annotations_of,
    check_value,
    checked,
    kind_of,
    nearest,
    with_values,
)

_T = TypeVar("_T")
_TRUTH_VALUES = ("true", "false", "yes", "no", "on", "off", "1", "0")
_MAX_BYTES = 1_000_000
_MAX_DEPTH = 16
_SETTINGS = {"train": Settings, "finetune": FinetuneSettings, "dpo": DpoSettings}
_NAME = "'([^']*)'"
_TUPLE = re.compile(rf"\((?:{_NAME}, ?)*(?:{_NAME})?\)")
# A key of many parts. For each part, tomllib stores all parts before it.
_LONG_KEY = re.compile(
    r"""^[ \t\[]*+(?:[ \t]*+(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.){17}""",
    re.MULTILINE,
)


@dataclass(frozen=True, kw_only=True)
class Arguments(Checked, prefix="--"):
    """Arguments that all commands have, and the work of a command.

    Attributes:
        debug: show stack traces, and PyTorch's log.
        lasts: whether the command continues when its output loses its reader.
    """

    debug: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    lasts: ClassVar[bool] = False

    def begins(self) -> str:
        """Return what the command does first, to print before PyTorch is imported; empty if it is not imported."""
        return "starting"

    def check_early(self) -> None:
        """Raise other mistakes that are found without PyTorch; not called in a rank of several."""

    def work(self) -> Callable[[], object] | None:
        """Do the work of the command on one rank, or return the function that does it.

        Imports of the work are inside this method, because PyTorch takes seconds.
        """
        raise NotImplementedError

    def resume_hint(self) -> str:
        """Return how to resume the command after it ended early; empty if it cannot be resumed."""
        return ""

    def import_hint(self) -> None:
        """Import what ``resume_hint`` needs, while the ranks start, so that an interrupted command ends at once."""


@dataclass(frozen=True, kw_only=True)
class LaunchArguments(Arguments):
    """Arguments of the commands that start ranks.

    Attributes:
        nproc: ranks to start on this machine; if not given, the fewest that tp, pp, cp, ep and etp allow.
    """

    nproc: Annotated[int | None, LOCAL_RANKS] = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks to start if neither the user nor a launcher specifies it."""
        raise NotImplementedError

    def check_world(self, world_size: int) -> None:
        """Raise ConfigError unless ``world_size`` ranks can do the work."""
        raise NotImplementedError

    def prepare(self, world_size: int) -> None:
        """Raise the mistakes that one of ``world_size`` ranks would raise; imports PyTorch, as the ranks do."""


@dataclass(frozen=True, kw_only=True)
class SplitArguments(LaunchArguments):
    """Arguments of the commands whose ranks only split one model.

    Attributes:
        tp: number of ranks that split each layer; all ranks of a stage if not given.
        pp: number of pipeline stages, which split the layers; more than one only in generate, score and chat.
        nproc: ranks to start on this machine; tp times pp if not given.
        timeout: seconds that a rank waits for another rank, before all ranks end with an error that names it.
    """

    tp: Annotated[int | None, LOCAL_RANKS, tyro.conf.arg(aliases=("--parallel.tp",))] = None
    pp: Annotated[int, RANKS, tyro.conf.arg(aliases=("--parallel.pp",))] = 1
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT

    has_stages: ClassVar = False

    def _check_together(self) -> None:
        if self.pp > 1 and not self.has_stages:
            raise ConfigError(f"--pp is {self.pp}, but this command has no pipeline stages; split the layers with --tp")

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments of the function of ``shardwise.run``: all fields but those of the launch."""
        names = {field.name for field in dataclasses.fields(self)} - {"debug", "nproc", "tp"}
        names -= set() if self.has_stages else {"pp"}
        return {name: getattr(self, name) for name in names}

    @property
    def num_ranks(self) -> int:
        return (self.tp or 1) * self.pp

    def check_world(self, world_size: int) -> None:
        if self.tp is not None and self.num_ranks != world_size:
            product = f"--tp {self.tp}" if self.pp == 1 else f"--tp {self.tp} times --pp {self.pp}"
            raise ConfigError(
                f"{product} is not the number of ranks, {world_size}, and all of them split the layers; leave "
                "--tp or --nproc out"
            )


@dataclass(frozen=True, kw_only=True)
class SettingsArguments(Arguments):
    """Arguments of a command that takes the settings of a run.

    Attributes:
        config: TOML file with settings, which flags override.
        settings: settings of the run.
    """

    config: str | None = None
    settings: RunSettings


@dataclass(frozen=True, kw_only=True)
class RunArguments(SettingsArguments, LaunchArguments):
    """Arguments of a command that trains."""

    lasts: ClassVar[bool] = True

    @property
    def num_ranks(self) -> int:
        return self.settings.parallel.fewest_ranks

    def check_world(self, world_size: int) -> None:
        self.settings.check_world(world_size)

    def begins(self) -> str:
        return f"starting a run in {self.settings.out}"

    def check_early(self) -> None:
        check_free(Path(self.settings.out))
        if self.settings.resume == "never":
            check_unused(Path(self.settings.out))
        self.check_inputs()

    def check_inputs(self) -> None:
        """Raise an error if the data or the model to train is not there."""
        if isinstance(self.settings, FinetuneSettings):
            check_model(self.settings.base)
            if (adapters := self.settings.lora.lora_from) is not None:
                check_model(adapters)
            check_data(self.settings.samples.held_out)
            check_file(self.settings.samples.prompt_template, "--prompt-template")
        check_file(self.settings.corpus.tokenizer, "--corpus.tokenizer")
        check_data(self.settings.data)

    def resume_hint(self) -> str:
        folder = Path(self.settings.out) / "checkpoints"
        if not folder.exists():
            return resume_hint(None)
        from shardwise.storage.checkpoint import latest

        try:
            return resume_hint(latest(folder))
        except CheckpointError as error:
            return str(error)

    def import_hint(self) -> None:
        import shardwise.storage.checkpoint  # noqa: F401  # PyTorch, which takes seconds


@dataclass(frozen=True)
class _Argument:
    """A flag or a positional argument.

    Attributes:
        path: names of the nested fields that lead to its value; the last name is its own.
        annotation: type of the field.
        required: whether it has no default.
        appends: whether the flag has one value, and may be repeated.
        sets, negation: value that a switch sets, and switch that sets the opposite value.
    """

    path: tuple[str, ...]
    annotation: Any
    required: bool
    appends: bool = False
    sets: bool | None = None
    negation: str | None = None


@dataclass(frozen=True)
class FlagReader:
    """Reads the flags and arguments of a dataclass and of its nested dataclasses, with the names of tyro's help.

    It supports ``Positional``, ``FlagCreatePairsOff`` and ``UseAppendAction`` of ``tyro.conf``, and the options
    ``name=""`` (flags of a dataclass have no prefix), ``metavar`` and ``aliases`` of its ``arg``. Flags may contain
    ``_`` instead of ``-``.

    Attributes:
        cls: the dataclass.
        flags: arguments by flag, such as ``--model.num-layers``.
        positional: positional arguments by their names in help, in order.
    """

    cls: type
    flags: dict[str, _Argument] = field(default_factory=dict)
    positional: dict[str, _Argument] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._add(self.cls, "", ())

    def _add(self, cls: Any, prefix: str, path: tuple[str, ...]) -> None:
        for each in dataclasses.fields(cls):
            annotation, marks = annotations_of(cls)[each.name]
            own = (*path, each.name)
            shown: Any = next((mark for mark in marks if hasattr(mark, "aliases")), tyro.conf.arg())
            if dataclasses.is_dataclass(annotation):
                self._add(annotation, prefix if shown.name == "" else f"{prefix}{each.name}.", own)
                continue
            required = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
            argument = _Argument(own, annotation, required, tyro.conf.UseAppendAction in marks)
            if tyro.conf.Positional in marks:
                self.positional[shown.metavar] = argument
                continue
            for name in (f"--{prefix}{each.name}", *(shown.aliases or ())):
                name = name.replace("_", "-")
                if annotation is not bool:
                    self.flags[name] = argument
                    continue
                group, dot, last = name.removeprefix("--").rpartition(".")
                no = None if tyro.conf.FlagCreatePairsOff in marks else f"--{group}{dot}no-{last}"
                self.flags[name] = dataclasses.replace(argument, sets=True, negation=no)
                if no is not None:
                    self.flags[no] = dataclasses.replace(argument, sets=False)

    def read(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the given values by field; a nested dataclass gives a nested dict.

        Raises:
            ConfigError: an unknown flag; a value that is missing, of the wrong type or after a switch; a repeated flag
                of many values; an argument that no flag takes; or a missing argument.
        """
        found: dict[tuple[str, ...], Any] = {}
        words, waiting = deque(argv), deque(self.positional.items())
        only_positional = False
        while words:
            word = words.popleft()
            if word == "--" and not only_positional:
                only_positional = True
            elif word.startswith("-") and not only_positional:
                self._read_flag(word, words, found)
            elif waiting:
                name, argument = waiting.popleft()
                found[argument.path] = _value_of(name, argument.annotation, word)
            else:
                hint = "; files and folders of data go after --data" if "--data" in self.flags else ""
                raise ConfigError(f"no flag takes {word}{hint}")
        for name, argument in (self.positional | self.flags).items():
            if argument.required and argument.path not in found:
                raise ConfigError(f"{name} is missing; see --help")
        values: dict[str, Any] = {}
        for path, value in found.items():
            table = values
            for part in path[:-1]:
                table = table.setdefault(part, {})
            table[path[-1]] = value
        return values

    def _read_flag(self, word: str, words: deque[str], found: dict[tuple[str, ...], Any]) -> None:
        """Read the flag ``word`` and take its values from ``words``."""
        name, equals, text = word.partition("=")
        name = name.replace("_", "-")
        flag = self.flags.get(name)
        if flag is None:
            close = nearest(name.lstrip("-"), [known.removeprefix("--") for known in self.flags])
            raise ConfigError(f"unknown flag {name}" + (f"; did you mean --{close}?" if close else "; see --help"))
        if flag.annotation is bool:
            if equals or (words and words[0].lower() in _TRUTH_VALUES):
                hint = f"; write {name} or {flag.negation}" if flag.negation else ""
                raise ConfigError(f"{name} takes no value, got {text if equals else words[0]!r}{hint}")
            found[flag.path] = flag.sets
        elif get_origin(flag.annotation) is tuple and not flag.appends:
            if flag.path in found:
                raise ConfigError(f"{name} is given twice; write all its values after one {name}")
            texts = [text] if equals else []
            while words and not words[0].startswith("--"):
                texts.append(words.popleft())
            found[flag.path] = tuple(texts)
        else:
            if not equals:
                if not words or words[0].startswith("--"):
                    raise ConfigError(f"{name} needs a value")
                text = words.popleft()
            if flag.appends:
                found[flag.path] = (*found.get(flag.path, ()), text)
                return
            found[flag.path] = _value_of(name, flag.annotation, text)


def _value_of(name: str, annotation: Any, text: str) -> Any:
    value: Any = text
    kind = kind_of(annotation)
    if kind in (int, float):
        try:
            value = cast(Any, kind)(text)
        except ValueError as error:
            # Python limits integers to a few thousand digits.
            if text.lstrip("+-").isdecimal():
                raise ConfigError(f"{name} is too large an integer") from error
    check_value(name, value, annotation)
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Return the values of a TOML file.

    Raises:
        ConfigError: the file is not TOML (the message names the line), is not a regular file, is larger than
            ``_MAX_BYTES``, or is nested more than ``_MAX_DEPTH`` deep.
    """
    try:
        # Editors of Windows write a byte-order mark.
        text = read_regular(path, limit=_MAX_BYTES).decode("utf-8-sig")
        if _LONG_KEY.search(text) is None and _depth(values := tomllib.loads(f"{text}\n")) <= _MAX_DEPTH:
            return values
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    # This covers TOMLDecodeError, text that is not UTF-8, and integers with more digits than Python reads.
    except ValueError as error:
        # tomllib shows a table's name as a tuple, and no name of a key that is given twice.
        reason = _TUPLE.sub(lambda match: f"[{'.'.join(re.findall(_NAME, match[0]))}]", str(error))
        if at := re.fullmatch(r"Cannot overwrite a value \(at line (\d+), .*", reason):
            key, equals, _ = text.split("\n")[int(at[1]) - 1].partition("=")
            reason = f"{key.strip()} is given twice (at line {at[1]})" if equals else reason
        raise ConfigError(f"{path} is not TOML: {reason}") from error
    except RecursionError:
        pass  # Nested even deeper.
    raise ConfigError(f"{path} is nested more than {_MAX_DEPTH} deep; settings stand in tables of one level")


def _depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max((1 + _depth(each) for each in inner), default=0)


def parse_command(cls: type[_T], argv: Sequence[str], prog: str) -> _T:
    """Parse the arguments of a command into a dataclass whose docstring is the help.

    Flags override the TOML file of ``--config``, which overrides the defaults.

    Args:
        cls: a dataclass.
        argv: the arguments after the command's name.
        prog: the command's name, for help.

    Raises:
        ConfigError: an unknown flag or setting, a missing value, a value of the wrong type, a mistake that the
            dataclass finds, or an unreadable TOML file.
        SystemExit: help was requested and printed.
    """
    if "-h" in argv or "--help" in argv:
        # Indentation keeps tyro from joining lines, such as examples. tyro shows the attributes as flags.
        summary = (inspect.getdoc(cls) or "").partition("\n\nAttributes:\n")[0]
        text = textwrap.indent(summary.replace("\n\n", "\n"), "  ") if issubclass(cls, SettingsArguments) else None
        tyro.cli(cls, prog=prog, description=text, args=["--help"], config=(tyro.conf.DisallowNone,))
    values = FlagReader(cls).read(argv)
    if issubclass(cls, SettingsArguments):
        path, settings_class = values.get("config"), annotations_of(cast(Any, cls))["settings"][0]
        table = {} if path is None else checked(settings_class, read_toml(Path(path)), f"{path}: ", _SETTINGS)
        values = _merged({"settings": table}, values)
    return with_values(cls, values)


def _merged(values: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    inner = {key: _merged(values.get(key, {}), value) for key, value in over.items() if isinstance(value, dict)}
    return values | over | inner


def check_model(folder: str, hint: str = "") -> None:
    """Raise CheckpointError if there is nothing at the path of a model, or a run that has not written its model yet."""
    if not os.path.exists(folder):
        raise CheckpointError(no_folder(Path(folder), hint))
    check_done(Path(folder))


def check_file(path: str | None, flag: str) -> None:
    """Raise ConfigError if there is nothing at the path that a flag gives."""
    if path is not None and not os.path.exists(path):
        raise ConfigError(f"{flag}: {path!r} does not exist; check its spelling and the folder")


def check_data(paths: Sequence[str]) -> None:
    """Raise DataError if there is nothing at a path of data; ``paths`` may be those of a blend, with weights."""
    for path in paths[1::2] if paths and _is_number(paths[0]) else paths:
        if path != "stdlib" and not os.path.exists(path):
            raise DataError(no_data(Path(path)))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


VARIABLES = {
    "SHARDWISE_CACHE": "folder of the cache (tokenizers, token streams); default ~/.cache/shardwise",
    "XDG_CACHE_HOME": "replaces ~/.cache",
    "SHARDWISE_SHARED_MEMORY": "0: CPU ranks of one machine communicate through gloo only",
    "SHARDWISE_ONEDNN": "0: PyTorch chooses the library of fp32 products on the CPU",
    "SHARDWISE_TRITON": "0: PyTorch's own operations replace the Triton kernels on CUDA",
    "SHARDWISE_CUDA_GRAPHS": "1: generation on CUDA records the pass of a token once and replays it; not tried yet",
    "CC": "C compiler of the CPU kernels and of Triton; default cc, gcc or clang",
    "OMP_NUM_THREADS": "threads of each rank; the launcher sets the physical cores divided by the ranks",
    "TOKENIZERS_PARALLELISM": "true: the tokenizer may use several threads; false is set by default",
    "MALLOC_TRIM_THRESHOLD_": "of the C library; training keeps freed memory unless it is set",
    "MALLOC_MMAP_THRESHOLD_": "the same",
    "TORCH_CPP_LOG_LEVEL": "PyTorch's log level; ERROR is set by default, except with --debug",
    "GLOO_SOCKET_IFNAME": "network interface between hosts; default: the one that reaches the master",
    "NCCL_SOCKET_IFNAME": "the same for CUDA ranks; ranks of one host use loopback",
    "CUDA_DEVICE_MAX_CONNECTIONS": "of CUDA; 1 starts collectives before the products that hide them; set to 1 with tp",
    "TORCH_NCCL_HIGH_PRIORITY": "of PyTorch; 1 lets NCCL's kernels run while products run; set to 1 with tp",
    "PYTORCH_ALLOC_CONF": "of PyTorch's allocator of GPU memory; expandable_segments:True if nothing is set",
    "PYTORCH_CUDA_ALLOC_CONF": "its old name",
    "ATEN_CPU_CAPABILITY": "of PyTorch: its CPU kernels",
    "MKL_CBWR": "of MKL: its kernels; an exact run on an Intel processor sets the reproducible ones",
    "MKL_ENABLE_INSTRUCTIONS": "the same",
    "ONEDNN_MAX_CPU_ISA": "of oneDNN: its kernels",
    "ONEDNN_DEFAULT_FPMATH_MODE": "of oneDNN: whether fp32 products may be less precise",
    "NVIDIA_TF32_OVERRIDE": "of CUDA's libraries: 0 forbids TF32",
    "CUBLAS_WORKSPACE_CONFIG": "of cuBLAS: an exact run on CUDA sets a deterministic one",
    "NO_COLOR": "any value: no colours where tokens are shown",
    "FORCE_COLOR": "any value: colours where tokens are shown, even if the output is no terminal",
    "WANDB_PROJECT": "of wandb: the project of --track wandb; default shardwise",
    "MLFLOW_EXPERIMENT_NAME": "of MLflow: the experiment of --track mlflow; default shardwise",
    "MLFLOW_EXPERIMENT_ID": "the same, by its id",
    "DISABLE_MULTIPROC": "lm-evaluation-harness starts no processes; shardwise eval --tasks sets it to 1",
    "RANK": "this process's rank; set by launchers, as those below",
    "WORLD_SIZE": "number of ranks",
    "LOCAL_RANK": "this process's rank on its host",
    "LOCAL_WORLD_SIZE": "number of ranks on this host; if it is not set, the ranks compare their hosts",
    "GROUP_RANK": "this host's number",
    "MASTER_ADDR": "address at which the ranks meet",
    "MASTER_PORT": "its port",
    "TORCHELASTIC_RUN_ID": "set by torchrun: ranks end when torchrun ends",
    "TORCHELASTIC_ERROR_FILE": "set by torchrun: the ranks of a host print an error only once",
    "SHARDWISE_RANK_REPORTS": "set by the launcher: folder in which ranks leave their errors",
    "SHARDWISE_RANK_STORE": "set by the launcher: file in which ranks meet",
    "SHARDWISE_LAUNCHER_PID": "set by the launcher: its process; ranks end when it ends",
}
"""Name and meaning of each environment variable, the ones for users first."""
