"""The model in a checkpoint, for the commands that use one: of a training run, or imported from Hugging Face."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import CheckpointError, ConfigError
from shardwise.json_files import shown

if TYPE_CHECKING:
    import torch

    from shardwise.huggingface import PretrainedConfig
    from shardwise.huggingface.building import Model
    from shardwise.huggingface.generation_config import GenerationDefaults
    from shardwise.tokenizer import Tokenizer
    from shardwise.training.ranks import Ranks
    from shardwise.training.settings import Settings


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint without its tensors.

    Attributes:
        folder: of the checkpoint.
        origin: the settings of the run that wrote it, or the ``config.json`` that it was imported with.
        tokenizer: the model's; None if it was imported without one that can be read.
    """

    folder: Path
    origin: Settings | PretrainedConfig
    tokenizer: Tokenizer | None

    @property
    def vocab_size(self) -> int:
        """Of the model, which may have more ids than the tokenizer."""
        from shardwise.training.settings import Settings

        if isinstance(self.origin, Settings):
            assert self.tokenizer is not None
            return self.tokenizer.vocab_size
        return self.origin.description.vocab_size

    def generation_defaults(self) -> GenerationDefaults:
        """What the model's files say about generation; nothing for a training run.

        Raises:
            CheckpointError: they cannot be read.
        """
        from shardwise.huggingface.generation_config import GenerationDefaults
        from shardwise.training.settings import Settings

        if isinstance(self.origin, Settings):
            return GenerationDefaults()
        return GenerationDefaults(self.folder, self.origin.values)

    def check_fits(self, world_size: int) -> None:
        """Raise ConfigError unless the model can be split over ``world_size`` ranks."""
        from shardwise.training.settings import Settings

        origin = self.origin
        heads = origin.model.num_heads if isinstance(origin, Settings) else origin.description.num_attention_heads
        if world_size > heads:
            raise ConfigError(
                f"the model's {heads} attention heads cannot be split over {world_size} ranks; use --nproc {heads} or "
                "less"
            )

    def load_model(self, ranks: Ranks) -> Model:
        """The checkpoint's model, split over all ranks; every rank calls.

        Raises:
            CheckpointError: the tensors are damaged or of another model.
        """
        import torch
        import torch.distributed as dist

        from shardwise import checkpoint
        from shardwise.checkpoint.checkpoint import check_state_fits
        from shardwise.checkpoint.manifest import Manifest
        from shardwise.collectives.agreement import agree
        from shardwise.sharded_state import sharded_state_dict

        world = dist.group.WORLD
        assert world is not None
        # What the settings say is compared with what there is before memory is asked for by it.
        agree(self._check_sizes, group=world)
        with torch.device("meta"):
            outline = self._build_model(torch.device("meta"))
        shapes = sharded_state_dict(outline, "model.", group=world)
        agree(lambda: check_state_fits(self.folder, Manifest.read(self.folder), shapes), group=world)
        model = self._build_model(ranks.device)
        checkpoint.load(self.folder, sharded_state_dict(model, "model.", group=world), group=world, allow_extra=True)
        return model

    def _check_sizes(self) -> None:
        """Check the sizes that decide on the number of tensors, and of what is made beside them."""
        from shardwise.checkpoint.manifest import Manifest
        from shardwise.training.settings import Settings

        origin, tensors = self.origin, Manifest.read(self.folder).tensors.values()
        if isinstance(origin, Settings):
            layers, width = origin.model.num_layers, origin.model.hidden_size
        else:
            layers, width = origin.description.num_layers, origin.description.kv_channels
        if layers > len(tensors):
            raise CheckpointError(
                f"checkpoint {self.folder} has {len(tensors)} tensors, and its settings ask for {layers} layers"
            )
        longest = max((size for tensor in tensors for size in tensor.shape), default=0)
        if width > longest:
            raise CheckpointError(
                f"checkpoint {self.folder} has no tensor as wide as {width}, which its settings ask for"
            )

    def _build_model(self, device: torch.device) -> Model:
        import torch.distributed as dist

        from shardwise.huggingface import build_model, transformer_config
        from shardwise.process_groups_config import ProcessGroupCollection
        from shardwise.training import build
        from shardwise.training.settings import ParallelSettings, Settings

        world = dist.group.WORLD
        assert world is not None
        groups = ProcessGroupCollection(tp=world)
        if isinstance(self.origin, Settings):
            assert self.tokenizer is not None
            # The run's own split says nothing about this one, and splitting the sequence saves nothing on one token.
            settings = dataclasses.replace(self.origin, parallel=ParallelSettings(tp=world.size()))
            return build.build_model(settings, self.tokenizer.vocab_size, pg_collection=groups, device=device)
        config = transformer_config(
            self.origin.description,
            params_dtype=self.origin.dtype,
            tensor_model_parallel_size=world.size(),
            perform_initialization=False,
        )
        return build_model(self.origin.description, config, pg_collection=groups, device=device)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that ``path`` stands for: itself, or the newest of a run or of its folder of checkpoints.

    Raises:
        CheckpointError: there is none.
    """
    from shardwise.checkpoint import latest

    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}; give the --out of a training run or one of its checkpoints")
    if path.name.startswith("step-"):
        return path
    newest = latest(path / "checkpoints") or latest(path)
    if newest is None:
        raise CheckpointError(
            f"{path} holds no checkpoint; give the --out of a training run or one of its checkpoints/step-*"
        )
    return newest


def open_checkpoint(path: Path) -> OpenCheckpoint:
    """Find a checkpoint, and read all of it but its tensors.

    Args:
        path: see ``find_checkpoint``.

    Raises:
        CheckpointError: there is none, it is damaged, or it was written by neither a training run nor an import.
        DataError: its tokenizer cannot be read.
    """
    from shardwise.checkpoint import read_meta
    from shardwise.huggingface import config_from_json
    from shardwise.tokenizer import PaddedTokenizer, Tokenizer
    from shardwise.training.settings import Settings

    folder = find_checkpoint(path)
    meta = read_meta(folder)
    if "huggingface" in meta:
        imported = meta["huggingface"]
        config = imported.get("config") if isinstance(imported, dict) else None
        if not isinstance(config, dict):
            raise CheckpointError(f"{folder}: huggingface.config in its meta is {shown(config)}; it must be an object")
        origin = config_from_json(config, where=f"{folder}: config.json")
        return OpenCheckpoint(folder, origin, PaddedTokenizer.load(folder) if "tokenizer_sha256" in meta else None)
    if "base_sha256" in meta:
        raise CheckpointError(
            f"{folder} is of shardwise finetune, whose --out is a Hugging Face folder, or adapters, once it is done; "
            "run shardwise import-hf on that folder (adapters: repeat finetune with --resume auto --lora-merge first)"
        )
    missing = [name for name in ("settings", "tokenizer_sha256") if name not in meta]
    if missing:
        raise CheckpointError(f"{folder} was not written by shardwise train: {', '.join(missing)} is missing in it")
    tokenizer = Tokenizer.load(folder)
    if tokenizer.sha256 != meta["tokenizer_sha256"]:
        raise CheckpointError(f"{folder / 'tokenizer.json'} is not the tokenizer that the model was trained with")
    try:
        return OpenCheckpoint(folder, Settings.from_json(meta["settings"]), tokenizer)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from error
