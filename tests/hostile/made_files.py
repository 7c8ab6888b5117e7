"""Small folders as this package writes them, made in a moment, for tests that damage them; and readers of each."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.core.sharded_state import sharded_state_dict
from shardwise.core.topology import Groups
from shardwise.data.tokenizer import Tokenizer
from shardwise.models.adapters import LoraConfig
from shardwise.run.build import build_model
from shardwise.run.commands.opened_model import open_checkpoint
from shardwise.run.processes.ranks import Ranks
from shardwise.run.settings import ModelSettings, Settings
from shardwise.storage import checkpoint
from shardwise.storage.adapters import add_lora_, load_adapter_, save_adapter
from shardwise.storage.checkpoint.manifest import _checksum
from shardwise.storage.huggingface import load_pretrained, save_pretrained
from shardwise.storage.huggingface.architectures import ARCHITECTURES

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


class Folders:
    """A checkpoint of a run, its model as a Hugging Face folder, and its adapter; all within ``open_ranks``."""

    def __init__(self, root: Path) -> None:
        self.step = root / "run" / "checkpoints" / "step-00000003"
        self.model, self.adapter = root / "model", root / "adapter"
        tokenizer = Tokenizer.train(["def eins(zwei):\n    return zwei\n"], 270)
        sizes = ModelSettings(num_layers=2, hidden_size=16, num_heads=2, vocab_size=270, sequence_length=32)
        settings = Settings(data=("x",), out="run", model=sizes)
        groups = _groups()
        world = groups.tp
        assert world is not None
        torch.manual_seed(0)
        model = build_model(settings, tokenizer.vocab_size, groups=groups, device=CPU)
        checkpoint.save(
            self.step.parent,
            3,
            sharded_state_dict(model, "model.", group=world),
            {"settings": settings.to_json(), "tokenizer_sha256": tokenizer.sha256},
            group=world,
            extra_files=tokenizer.save,
        )
        tokenizer.save(root / "tokenizer")
        save_pretrained(model, self.model, source=root / "tokenizer", max_file_size=20_000)
        architecture = ARCHITECTURES["llama"]
        add_lora_(model, LoraConfig(r=2, target_modules=("q_proj", "down_proj")), architecture)
        save_adapter(model, self.adapter, architecture)

    def read_step(self) -> Tensors:
        """The checkpoint's tensors, as ``generate`` and ``verify`` read them."""
        checkpoint.verify(self.step)
        opened = open_checkpoint(self.step)
        return _tensors(opened.load_model(Ranks(0, 0, 1, CPU)))

    def read_model(self) -> Tensors:
        """The Hugging Face folder's tensors, after a look at its tokenizer."""
        Tokenizer.load(self.model)
        return _tensors(load_pretrained(self.model, groups=_groups()))

    def read_adapter(self) -> Tensors:
        """The adapter's tensors in a model of the right shape."""
        settings = Settings(
            data=("x",),
            model=ModelSettings(num_layers=2, hidden_size=16, num_heads=2, vocab_size=270, sequence_length=32),
        )
        torch.manual_seed(0)
        model = build_model(settings, 264, groups=_groups(), device=CPU)
        load_adapter_(model, self.adapter, ARCHITECTURES["llama"])
        return {name: tensor for name, tensor in _tensors(model).items() if "lora" in name}


def _groups() -> Groups:
    return Groups(tp=dist.group.WORLD)


def _tensors(model: Any) -> Tensors:
    assert not isinstance(model, list)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if tensor is not None}


def rewrite(path: Path, change: Callable[[Any], object]) -> None:
    """Change the JSON of a file; a manifest's checksum, and a header's length, are made to match."""
    content = path.read_bytes()
    is_tensors = path.suffix == ".safetensors"
    end = 8 + int.from_bytes(content[:8], "little") if is_tensors else len(content)
    value = json.loads(content[8 if is_tensors else 0 : end])
    change(value)
    if path.name == "meta.json" and isinstance(value, dict):
        body = {key: value[key] for key in ("step", "serial", "meta", "files", "tensors") if key in value}
        with contextlib.suppress(ValueError):  # NaN has none.
            value["crc32"] = _checksum(body)
    text = json.dumps(value).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:] if is_tensors else text)


STRANGE_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 2**31, 2**40, 2**63, 10**30, 1e9, 1.5, -0.5, math.inf, math.nan, "", "x", "../x",
    "/dev/zero", "\ud800", "a\0b", [], [1], [[]], {}, {"a": 1}, [2**40, 2**40], "9" * 5000,
)  # fmt: skip


def mutate(value: Any, draw: random.Random) -> None:
    """Change one place of a JSON value: another value, one of its neighbours', one more or one less."""
    places = list(_places(value))
    holder, key = draw.choice(places)
    others = [other[other_key] for other, other_key in places if type(other) is type(holder)]
    how = draw.randrange(4)
    if how == 0:
        holder[key] = draw.choice(STRANGE_VALUES)
    elif how == 1:
        holder[key] = json.loads(json.dumps(draw.choice(others)))
    elif how == 2:
        del holder[key]
    elif isinstance(holder, list):
        holder.append(json.loads(json.dumps(holder[key])))
    else:
        holder[f"{key}x"] = json.loads(json.dumps(holder[key]))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def strange_kinds() -> dict[str, Callable[[Path], object]]:
    """What a stranger may put in a file's place: by name, a function that puts it there."""

    def sparse(path: Path) -> None:
        path.touch()
        os.truncate(path, 1 << 40)

    return {
        "a named pipe": os.mkfifo,
        "a folder": Path.mkdir,
        "a device": lambda path: path.symlink_to("/dev/zero"),
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a terabyte of nothing": sparse,
    }
