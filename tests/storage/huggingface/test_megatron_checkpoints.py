"""Checkpoints that Megatron wrote (tests/data/megatron) have its logits at every layout; crafted ones run nothing."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_references import groups_of
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from shardwise.cli.main import main
from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.core.tensor_files import StoredTensor
from shardwise.models import ModelConfig
from shardwise.models.experts import Experts
from shardwise.models.transformer.mlp import gelu_tanh
from shardwise.models.transformer.rotary import RotaryScaling
from shardwise.storage.huggingface import load_pretrained
from shardwise.storage.huggingface.fields import Fields
from shardwise.storage.huggingface.megatron.arguments import MEGATRON
from shardwise.storage.huggingface.megatron.chunks import RANK_FILE, Chunk, rank_chunks, read_chunks, shape_of
from shardwise.storage.huggingface.megatron.exporting import save_megatron
from shardwise.storage.huggingface.megatron.folder import MegatronFolder, _placed
from shardwise.storage.huggingface.megatron.optimizer_state import load_optimizer_state
from shardwise.storage.huggingface.megatron.pickles import read_archive
from shardwise.storage.huggingface.pretrained import PretrainedFolder, written_as

KEPT = Path(__file__).parents[2] / "data" / "megatron"
EXPECTED = json.loads((KEPT / "expected.json").read_text())
CASES = ("dense", "llama", "llama_ranks", "experts", "experts_ranks")
FEW = ("dense", "llama_ranks", "experts")
ITERATION = "iter_0000002"
HUGE = 1 << 63


def logits_of(folder: Path, num_ranks: int) -> torch.Tensor:
    model = load_pretrained(folder, groups=groups_of(num_ranks, 1), device="cpu").eval()
    model.parallel_output = False
    with torch.no_grad():
        result: torch.Tensor = model(torch.tensor(EXPECTED["ids"]))
    return result.transpose(0, 1)


def assert_are_megatrons(logits: torch.Tensor, case: str) -> None:
    # Megatron's model computed them in fp32 on two ranks, with sums in another order; the largest is about 3.
    expected = torch.tensor(EXPECTED[case]["logits"])
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_megatrons(group: dist.ProcessGroup, case: str) -> None:
    assert_are_megatrons(logits_of(KEPT / case, group.size()), case)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("case", FEW)
def test_logits_at_other_layouts_are_megatrons(group: dist.ProcessGroup, case: str) -> None:
    assert_are_megatrons(logits_of(KEPT / case, group.size()), case)


@pytest.mark.parametrize("folder", [f"llama_ranks/{ITERATION}", "llama_newer"])
def test_other_forms_and_the_folder_of_an_iteration_are_the_same_model(folder: str) -> None:
    """Files of ranks, and the form of megatron-core 0.19."""
    one, other = MegatronFolder(KEPT / "llama"), MegatronFolder(KEPT / folder)
    assert not (other.path / "common.pt").exists()
    assert (one.config, one.iteration, one.tensors.keys()) == (other.config, other.iteration, other.tensors.keys())
    for name, stored in one.tensors.items():
        whole = (0,) * len(stored.shape), stored.shape
        torch.testing.assert_close(one.read(name, *whole), other.read(name, *whole), rtol=0, atol=0)
        if len(stored.shape) == 2:
            part = one.read(name, (3, 1), (9, 5))
            torch.testing.assert_close(part, one.read(name, *whole)[3:12, 1:6], rtol=0, atol=0)


def test_layers_of_more_than_ten_interleaved_chunks_are_in_order(tmp_path: Path) -> None:
    """Chunk ``model10`` follows ``model9``; chunk ``c`` of stage ``p`` of two holds layer ``2 * c + p``."""
    name, num_chunks = "input_layernorm.weight", 11
    args = argparse.Namespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=2)
    for p in range(2):
        (tmp_path / f"mp_rank_00_{p:03d}").mkdir()
        states = {f"model{c}": {f"decoder.layers.0.{name}": torch.full((2,), 2.0 * c + p)} for c in range(num_chunks)}
        torch.save({"args": args, **states}, tmp_path / f"mp_rank_00_{p:03d}" / RANK_FILE)
    _, chunks = rank_chunks(tmp_path)
    found = [read_chunks(chunks[f"decoder.layers.{layer}.{name}"], (0,), (2,)) for layer in range(2 * num_chunks)]
    assert [each.tolist() for each in found] == [[layer, layer] for layer in range(2 * num_chunks)]


def test_names_of_transformer_engine_and_of_single_shards() -> None:
    def place(
        name: str, sizes: tuple[int, ...], offsets: tuple[int, ...]
    ) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        ((own, chunk),) = _placed(name, [Chunk(offsets, sizes, StoredTensor(name, Path(), "F32", sizes, 0, 0))])
        return own, chunk.offsets, chunk.sizes

    layer = "decoder.layers.3."
    assert place("decoder.layers.self_attention.linear_qkv.layer_norm_weight", (1, 8), (3, 0)) == (
        layer + "input_layernorm.weight",
        (0,),
        (8,),
    )
    assert place(layer + "mlp.linear_fc1.layer_norm_bias", (8,), (0,))[0] == layer + "pre_mlp_layernorm.bias"
    assert place(layer + "mlp.linear_fc1.weight_v", (4, 8), (0, 0)) == (layer + "mlp.linear_fc1.weight", (4, 0), (4, 8))
    expert = layer + "mlp.experts.experts."
    assert place(expert + "5.linear_fc1.weight_v", (4, 8), (0, 0)) == (
        expert + "linear_fc1.weight",
        (5, 4, 0),
        (1, 4, 8),
    )
    assert place(expert + "5.linear_fc2.weight", (8, 4), (0, 0)) == (expert + "linear_fc2.weight", (5, 0, 0), (1, 8, 4))
    assert place(expert + "linear_fc1.weight", (1, 4, 8), (5, 0, 0)) == (
        expert + "linear_fc1.weight",
        (5, 0, 0),
        (1, 4, 8),
    )


def test_the_command_imports_and_the_checkpoint_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, exported = tmp_path / "run", tmp_path / "exported"
    assert main(["import-megatron", str(KEPT / "llama"), "--out", str(run)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"wrote {run / 'checkpoints'}")
    assert said.err.startswith("shardwise import-megatron: the checkpoint has no tokenizer")
    assert main(["export-hf", str(run), "--out", str(exported)]) == 0
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    with torch.no_grad():
        logits = model(torch.tensor(EXPECTED["ids"])).logits
    assert_are_megatrons(logits, "llama")


def test_a_model_without_hugging_face_architecture_keeps_its_arguments(tmp_path: Path) -> None:
    from shardwise.run import import_megatron
    from shardwise.run.commands.opened_model import open_model

    folder = copied("dense", tmp_path)
    # GPT-2 has learned positions, and nothing else has these biases and norms.
    change_arguments(folder, position_embedding_type="none", untie_embeddings_and_output_weights=False)
    change_metadata(folder, lambda found: found.state_dict_metadata.pop("embedding.position_embeddings.weight"))
    imported = import_megatron(folder, tmp_path / "run")
    assert open_model(tmp_path / "run").description == PretrainedFolder(folder).description
    assert json.loads((imported.checkpoint / "config.json").read_text())["model_type"] == "megatron"


def copied(case: str, tmp_path: Path) -> Path:
    shutil.copytree(KEPT / case, tmp_path / case)
    return tmp_path / case


def change_arguments(folder: Path, **changes: Any) -> None:
    """Change arguments in ``common.pt``, or in the files of all ranks."""
    inner = folder / ITERATION
    for path in [inner / "common.pt"] if (inner / "common.pt").exists() else inner.glob("mp_rank_*/model_optim_rng.pt"):
        value = torch.load(path, weights_only=False, pickle_module=_WithoutMegatron)
        vars(value["args"]).update(changes)
        torch.save(value, path)


class _WithoutMegatron(pickle.Unpickler):
    """Reads our own fixtures without Megatron: its enums are numbers."""

    Unpickler: Any
    load: Any

    def find_class(self, module: str, name: str) -> Any:
        return (lambda value: value) if module.startswith("megatron") else super().find_class(module, name)


_WithoutMegatron.Unpickler = _WithoutMegatron


def change_metadata(folder: Path, change: Callable[[Metadata], object]) -> None:
    path = folder / ITERATION / ".metadata"
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))


class Runs:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.called = function, args

    def __reduce__(self) -> Any:
        return self.called


def pickled_in_metadata(value: Callable[[Path], object]) -> Callable[[Path], None]:
    return lambda folder: change_metadata(folder, lambda found: setattr(found, "planner_data", value(folder)))


def metadata_of(content: bytes) -> Callable[[Path], None]:
    return lambda folder: _ignore((folder / ITERATION / ".metadata").write_bytes(content))


def _ignore(_: object) -> None:
    return None


def change_first(**changes: Any) -> Callable[[Path], None]:
    """Change the place of one part of the embedding."""

    def change(found: Metadata) -> None:
        index = next(each for each in found.storage_data if each.fqn == NAME)
        found.storage_data[index] = replace(found.storage_data[index], **changes)

    return lambda folder: change_metadata(folder, change)


def change_chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Callable[[Path], None]:
    def change(found: Metadata) -> None:
        tensor: Any = found.state_dict_metadata[NAME]
        old = tensor.chunks[0]
        tensor.chunks[0] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        place = found.storage_data.pop(MetadataIndex(NAME, old.offsets))
        found.storage_data[MetadataIndex(NAME, torch.Size(offsets))] = place

    return lambda folder: change_metadata(folder, change)


def overlap_in_a_file(found: Metadata) -> None:
    one, other = list(found.storage_data)[:2]
    first = found.storage_data[one]
    found.storage_data[other] = replace(
        found.storage_data[other], relative_path=first.relative_path, offset=first.offset
    )


def cut(name: str, size: Callable[[int], int]) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        (path,) = (folder / ITERATION).glob(name)
        os.truncate(path, size(path.stat().st_size))

    return do


def compressed(folder: Path) -> None:
    path = folder / ITERATION / "common.pt"
    with zipfile.ZipFile(BytesIO(path.read_bytes())) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.namelist():
            new.writestr(entry, old.read(entry))


def saved_as_common(value: object) -> Callable[[Path], None]:
    return lambda folder: torch.save(value, folder / ITERATION / "common.pt")


def other_item(folder: Path) -> None:
    """Put another tensor where ``.metadata`` has the embedding; found when it is read."""
    found = pickle.loads((folder / ITERATION / ".metadata").read_bytes())
    place = found.storage_data[next(each for each in found.storage_data if each.fqn == NAME)]
    path = folder / ITERATION / place.relative_path
    buffer = BytesIO()
    torch.save(torch.zeros(3), buffer)
    content = bytearray(path.read_bytes())
    content[place.offset : place.offset + place.length] = buffer.getvalue().ljust(place.length, b"\0")[: place.length]
    path.write_bytes(content)


def without(name: str) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        path = folder / ITERATION / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return do


NAME = "embedding.word_embeddings.weight"
UNRUN = "is not on the list of names that Megatron's checkpoints have; nothing of it was run"
CRAFTED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a call in .metadata": (
        "llama",
        pickled_in_metadata(lambda folder: Runs(os.system, f"touch {folder.parent / 'ran'}")),
        rf'names "posix.system", which {UNRUN}',
    ),
    "a call in common.pt": (
        "llama",
        lambda folder: saved_as_common({"args": Runs(subprocess.check_call, ["touch", str(folder.parent / "ran")])})(
            folder
        ),
        rf'check_call", which {UNRUN}',
    ),
    "a call in a rank's file": (
        "llama_ranks",
        lambda folder: torch.save(
            {"args": Runs(eval, f"open({str(folder.parent / 'ran')!r}, 'w')")},
            folder / ITERATION / "mp_rank_01_001" / "model_optim_rng.pt",
        ),
        rf'.eval", which {UNRUN}',
    ),
    "a getattr": (
        "llama",
        pickled_in_metadata(lambda folder: Runs(getattr, "a", "upper")),
        "builtins.getattr",
    ),
    "a class of PyTorch": (
        "llama",
        pickled_in_metadata(lambda folder: torch.nn.Linear),
        "torch.nn.modules.linear.Linear",
    ),
    "a function of torch": ("llama", metadata_of(b"\x80\x02ctorch\nload\n."), 'names "torch.load"'),
    "a name inside of a known one": (
        "llama",
        metadata_of(b"\x80\x04\x8c\x08argparse\x8c\x0dNamespace.mro\x93."),
        'names "argparse.Namespace.mro"',
    ),
    "an instance of protocol 0": ("llama", metadata_of(b"(iposix\nsystem\n."), "has the opcode INST"),
    "an object by its class": ("llama", metadata_of(b"\x80\x02(cposix\nsystem\no."), 'names "posix.system"'),
    "an extension": ("llama", metadata_of(b"\x80\x02\x82\x01."), "has the opcode EXT1"),
    "a huge index of the memo": ("llama", metadata_of(b"\x80\x02Nr\xff\xff\xff\xff."), "it is no description"),
    "a long text": (
        "llama",
        metadata_of(b"\x80\x04\x8d" + struct.pack("<Q", HUGE) + b"a."),
        "is damaged: of its pickle",
    ),
    "a long array": ("llama", metadata_of(b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"a."), "is damaged: of its"),
    "state of a text": ("llama", metadata_of(b"\x80\x04\x8c\x01a}b."), "is used as record"),
    "a call of a text": ("llama", metadata_of(b"\x80\x04\x8c\x01a)R."), "is used as name"),
    "a deep key": ("llama", metadata_of(b"\x80\x04}N" + b"\x85" * 100000 + b"Ns."), "a key is a tuple of tuples"),
    "a deep key of arguments": (
        "llama",
        metadata_of(b"\x80\x02ccollections\nOrderedDict\n]]N" + b"\x85" * 100000 + b"aNaa\x85R."),
        "an OrderedDict has its items as arguments",
    ),
    "a tuple of billions by its memo": (
        "llama",
        metadata_of(b"\x80\x02)" + b"q\x00h\x00\x86" * 60 + b"}b."),
        "is used as record",
    ),
    "a layout of billions by its memo": (
        "llama",
        metadata_of(b"\x80\x02ctorch.serialization\n_get_layout\n)" + b"q\x00h\x00\x86" * 60 + b"\x85R."),
        "is used as str",
    ),
    "an empty stack": ("llama", metadata_of(b"\x80\x04R."), "is damaged: of its pickle"),
    "half of .metadata": ("llama", cut(".metadata", lambda size: size // 2), "is damaged: of its pickle"),
    "half of common.pt": (
        "llama",
        cut("common.pt", lambda size: size // 2),
        "is damaged, or not written by torch.save",
    ),
    "compressed": ("llama", compressed, "is compressed, which torch.save never does"),
    "no arguments": ("llama", saved_as_common({"iteration": 2}), "has no args, which Megatron's training saves"),
    "a short file": ("llama", cut("__2_0.distcp", lambda size: size - 1), "__2_0.distcp is truncated"),
    "a missing file": ("llama", without("__1_0.distcp"), "__1_0.distcp, which .metadata names: No such file"),
    "a huge offset": ("llama", change_first(offset=HUGE), f"a tensor cannot be at {HUGE}"),
    "a huge length": ("llama", change_first(length=HUGE), f"with {HUGE} bytes"),
    "a negative offset": ("llama", change_first(offset=-8), "a tensor cannot be at -8"),
    "a file elsewhere": ("llama", change_first(relative_path="../../other"), "cannot be in a file called"),
    "bytes of two parts": (
        "llama",
        lambda folder: change_metadata(folder, overlap_in_a_file),
        "parts of tensors overlap",
    ),
    "parts that overlap": ("llama", change_chunk((16, 0), (32, 16)), "overlap, or do not fill a shape"),
    "a huge part": ("llama", change_chunk((0, 0), (1 << 61, 16)), f"has the shape or position .*{1 << 61}"),
    "a larger part than its bytes": ("llama", change_chunk((0, 0), (1 << 20, 16)), r"a part of \[1048576, 16\]"),
    "a part less": (
        "llama",
        lambda folder: change_metadata(folder, lambda found: _ignore(found.state_dict_metadata[NAME].chunks.pop())),  # type: ignore[union-attr]
        "not \\[64, 16\\]|do not fill",
    ),
    "more layers": ("llama", lambda folder: change_arguments(folder, num_layers=5), "lacks tensor .*layers.4"),
    "fewer layers": ("llama", lambda folder: change_arguments(folder, num_layers=3), "layers.3.* for which a model of"),
    "2^63 layers": ("llama", lambda folder: change_arguments(folder, num_layers=HUGE), f"num_layers is {HUGE}"),
    "another width": ("llama", lambda folder: change_arguments(folder, ffn_hidden_size=32), "has shape"),
    "latent attention": (
        "llama",
        lambda folder: change_arguments(folder, multi_latent_attention=True),
        "multi_latent_attention is true; it must be false",
    ),
    "an argument of another type": (
        "llama",
        lambda folder: change_arguments(folder, hidden_size={}),
        "the argument hidden_size is",
    ),
    "an integer of 5,000 digits": (
        "llama",
        lambda folder: change_arguments(folder, kv_channels=10**5000),
        "the argument kv_channels has a number of more than 64 bits",
    ),
    "a factor that is a text": (
        "experts",
        lambda folder: change_arguments(folder, moe_router_topk_scaling_factor="x"),
        "moe_router_topk_scaling_factor is",
    ),
    "a huge share": ("llama", lambda folder: change_arguments(folder, rotary_percent=1e308), "rotated is 1e\\+308"),
    "a dtype of another type": (
        "llama",
        lambda folder: change_arguments(folder, params_dtype="float32"),
        'the argument params_dtype is "float32"; it must be a dtype',
    ),
    "a window of one number": (
        "llama",
        lambda folder: change_arguments(folder, window_size=1.5),
        "window_size is 1.5; it must be two integers",
    ),
    "a missing rank": ("llama_ranks", without("mp_rank_01_000"), "lacks mp_rank_01_000, a rank of tp 2, pp 2"),
    "a missing rank of experts": ("experts_ranks", without("mp_rank_00_001_001"), "lacks mp_rank_00_001_001"),
    "2^63 ranks": (
        "llama_ranks",
        lambda folder: change_arguments(folder, tensor_model_parallel_size=HUGE),
        "tensor_model_parallel_size is",
    ),
    "more layers than files of ranks": (
        "llama_ranks",
        lambda folder: change_arguments(folder, num_layers=9),
        "lacks tensor",
    ),
    "no iteration": ("llama", without("../" + ITERATION), "the newest iteration by latest_checkpointed_iteration.txt"),
    "an iteration elsewhere": (
        "llama",
        lambda folder: _ignore((folder / "latest_checkpointed_iteration.txt").write_text("../../etc")),
        "it must be the number of an iteration",
    ),
    "another item": ("llama", other_item, "is not the tensor of 512 F32 that .metadata promises"),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_checkpoints_are_one_error_and_run_nothing(group: dist.ProcessGroup, tmp_path: Path, name: str) -> None:
    case, change, message = CRAFTED[name]
    folder = copied(case, tmp_path)
    change(folder)
    with pytest.raises((CheckpointError, ConfigError), match=message) as caught:
        load_pretrained(folder, groups=groups_of(1, 1), device="cpu")
    assert str(tmp_path) in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_every_cut_of_an_archive_is_an_error(tmp_path: Path) -> None:
    content, path = (KEPT / "llama" / ITERATION / "common.pt").read_bytes(), tmp_path / "common.pt"
    for size in range(0, len(content), 131):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"is damaged"):
            read_archive(path)


def test_the_command_names_a_folder_without_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-megatron", str(tmp_path), "--out", str(tmp_path / "run")]) == 2
    assert "has no checkpoint of Megatron" in capsys.readouterr().err


@pytest.mark.ranks(1, 2, 3)
def test_the_optimizer_goes_on_with_megatrons_losses(group: dist.ProcessGroup, tmp_path: Path) -> None:
    """Five steps of Megatron's: the checkpoint has two of them, and three follow here."""
    from shardwise.storage import checkpoint
    from shardwise.training.gradients.finalize import finalize_gradients_
    from shardwise.training.optimizer.adamw import AdamW
    from shardwise.training.optimizer.clipping import clip_grad_norm_
    from shardwise.training.optimizer.optimizer import optimizer_state

    groups = groups_of(group.size(), 1)
    source = PretrainedFolder(KEPT / "dense")
    model = load_pretrained(source, groups=groups, device="cpu")
    state, steps = load_optimizer_state(source, model)
    assert steps == 2
    folder = checkpoint.save(tmp_path, steps, state, group=group)

    optimizer = AdamW(model, learning_rate=0.01, weight_decay=0.1, betas=(0.9, 0.95), epsilon=1e-8)
    weights = model.sharded_state_dict()
    own = {f"model.{key}": shard for key, shard in weights.items()}
    own |= {f"optimizer.{key}": shard for key, shard in optimizer_state(weights, optimizer).items()}
    checkpoint.load(folder, {key: shard.with_key(key) for key, shard in own.items()}, group=group)
    optimizer.set_step_(steps)
    for step, expected in enumerate(EXPECTED["dense"]["losses"][2:], 2):
        ids = torch.randint(0, 60, (4, 13), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(ids[:, :-1], labels=ids[:, 1:]).mean()
        loss.backward()
        finalize_gradients_(model, tp_group=groups.tp, dp_group=groups.dp)
        clip_grad_norm_(model, 1.0, tp_group=groups.tp)
        optimizer.step()
        assert float(loss.detach()) == pytest.approx(expected, abs=2e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", FEW)
def test_what_is_exported_has_megatrons_tensors(group: dist.ProcessGroup, tmp_path: Path, case: str) -> None:
    """PyTorch's own reader finds them; ``make.py --load`` opens such a folder in Megatron."""
    import torch.distributed.checkpoint as dcp

    from shardwise.core.communication.agreement import gather_objects

    out = gather_objects(tmp_path / "out", "the folder", group=group)[0]
    kept, groups = MegatronFolder(KEPT / case), groups_of(group.size(), 1, ep=2 if case == "experts" else 1)
    model = load_pretrained(KEPT / case, groups=groups, device="cpu")
    # One of the first ranks' weights is not finite: all ranks say so, and nothing is left.
    first = next(model.parameters())
    value = first.detach()[0].clone()
    with torch.no_grad():
        first[0] = torch.nan
    with pytest.raises(CheckpointError, match="has values that are not finite"):
        save_megatron(model, out, iteration=7)
    assert not out.exists()
    with torch.no_grad():
        first[0] = value
    save_megatron(model, out, iteration=7)
    exported = MegatronFolder(out)
    assert exported.iteration == 7
    assert exported.tensors.keys() == kept.tensors.keys()
    assert PretrainedFolder(out).description.differences(PretrainedFolder(KEPT / case).description) == {}
    for name, stored in kept.tensors.items():
        whole = (0,) * len(stored.shape), stored.shape
        torch.testing.assert_close(exported.read(name, *whole), kept.read(name, *whole), rtol=0, atol=0)
    found = {name: torch.zeros(shape_of(name, chunks, out)) for name, chunks in exported.stored.items()}
    with pytest.warns(UserWarning, match="load in a single process"):
        dcp.load(found, checkpoint_id=out / "iter_0000007", no_dist=True)
    for name, tensor in found.items():
        (chunk,) = exported.stored[name]
        torch.testing.assert_close(tensor, chunk.read(chunk.offsets, chunk.sizes), rtol=0, atol=0)
    assert_are_megatrons(logits_of(out, group.size()), case)


def test_the_commands_round_trip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    assert main(["import-megatron", str(KEPT / "dense"), "--out", str(run), "--optimizer"]) == 0
    assert main(["export-megatron", str(run), "--out", str(out)]) == 0
    assert f"Megatron loads it: --load {out}" in capsys.readouterr().out
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert main(["export-megatron", str(run), "--out", str(out)]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["import-megatron", str(KEPT / "llama"), "--out", str(tmp_path / "other"), "--optimizer"]) == 2
    assert "its optimizer state is not of a distributed optimizer, or missing" in capsys.readouterr().err


_ROPE = {"position_embedding_type": "rope"}
_EXPERTS = {"num_experts": 4, "add_bias_linear": False}
# Arguments, and what they mean for four layers by Megatron's own reading of them.
ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "window": ({"window_size": [3, 0]}, {"window_size": (3, 0), "windowed_layers": None}),
    "window in some layers": (
        {"window_size": [3, 0], "window_attn_skip_freq": 2},
        {"windowed_layers": (True, False, True, False)},
    ),
    "window in listed layers": (
        {"window_size": [3, 0], "window_attn_skip_freq": [0, 0, 1, 1]},
        {"windowed_layers": (False, False, True, True)},
    ),
    "no rotation": ({**_ROPE, "no_rope_freq": 2}, {"rotary_layers": (True, False, True, False)}),
    "no rotation in listed layers": (
        {**_ROPE, "no_rope_freq": [1, 0, 0, 0]},
        {"rotary_layers": (False, True, True, True)},
    ),
    "biases of queries": (
        {"add_bias_linear": False, "add_qkv_bias": True},
        {"add_qkv_bias": True, "attention_bias": False},
    ),
    "all biases": ({}, {"add_qkv_bias": True, "attention_bias": True, "activation_func": gelu_tanh}),
    "no fused activation": ({"bias_gelu_fusion": False}, {"activation_func": torch.nn.functional.gelu}),
    "no bias to fuse": ({"add_bias_linear": False}, {"activation_func": torch.nn.functional.gelu}),
    "llama 3": (
        {**_ROPE, "use_rope_scaling": True},
        {
            "rope_scaling": RotaryScaling(
                "llama3", 8.0, original_max_position_embeddings=8192, low_freq_factor=1.0, high_freq_factor=4.0
            )
        },
    ),
    "interpolation": (
        {**_ROPE, "rotary_seq_len_interpolation_factor": 2},
        {"rope_scaling": RotaryScaling("linear", 2.0)},
    ),
    "groups without grouped queries": ({"num_query_groups": 2}, {"num_query_groups": 4}),
    "experts": (
        _EXPERTS,
        {"experts": Experts(4, 2, 16, softmax_after_choice=True, normalizes_weights=False)},
    ),
    "experts in some layers": (
        {**_EXPERTS, "moe_layer_freq": 2, "moe_router_pre_softmax": True, "moe_router_topk": 1},
        {
            "experts": Experts(
                num=4,
                per_token=1,
                ffn_hidden_size=16,
                layers=(True, False, True, False),
                softmax_after_choice=False,
                normalizes_weights=False,
            )
        },
    ),
    "experts by sigmoid in groups": (
        {
            **_EXPERTS,
            "moe_layer_freq": [0, 1, 1, 1],
            "moe_router_score_function": "sigmoid",
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 1,
            "moe_router_topk_scaling_factor": 2.5,
        },
        {
            "experts": Experts(
                num=4,
                per_token=2,
                ffn_hidden_size=16,
                layers=(False, True, True, True),
                scores="sigmoid",
                softmax_after_choice=False,
                normalizes_weights=True,
                num_groups=2,
                groups_per_token=1,
                weight_scale=2.5,
            )
        },
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_mean_what_they_do_in_megatron(name: str) -> None:
    given, expected = ARGUMENTS[name]
    sizes = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 4, "kv_channels": 2, "ffn_hidden_size": 16}
    sizes |= {"padded_vocab_size": 8, "max_position_embeddings": 8}
    description = MEGATRON.read(Fields(sizes | given))
    assert {field: getattr(description, field) for field in expected} == expected
    # What is written means the same.
    assert MEGATRON.read(Fields(written_as(MEGATRON, description, None, None))) == description


def test_a_model_without_arguments_of_megatron_is_refused() -> None:
    usual = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 8, "max_sequence_length": 8}
    for field in ({"embedding_layernorm": True}, {"parallel_residual": True}, {"final_logit_softcap": 3.0}):
        with pytest.raises(ConfigError, match=f"it has no way to say {next(iter(field))}"):
            written_as(MEGATRON, ModelConfig(**usual, **field), None, None)


@pytest.mark.slow
def test_finetune_and_generate_read_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = copied("llama", tmp_path)
    words = [*"abcdefghijklmnopqrstuvwxyz 0123456789", "<eos>", "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "unk_token": "<unk>"}))
    lines = [json.dumps({"prompt": f"say {at} ", "completion": "yes"}) for at in range(20)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))

    data = ["--data", str(tmp_path / "data.jsonl")]
    tuned = str(tmp_path / "tuned")
    assert main(["finetune", str(folder), *data, "--out", tuned, "--training.steps", "2"]) == 0
    assert json.loads((tmp_path / "tuned" / "config.json").read_text())["model_type"] == "llama"
    assert main(["generate", str(folder), "--prompt", "say 3 ", "--max-new-tokens", "2"]) == 0
    assert "say 3 " in capsys.readouterr().out
    assert main(["finetune", str(folder), *data, "--out", f"{tuned}2", "--lora-rank", "2"]) == 2
    assert "adapters have the names of a Hugging Face model" in capsys.readouterr().err


BUCKET = "optimizer.distributed.dp_group_idx_{}.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_1.{}"


def exchange_weights(found: Metadata) -> None:
    """Exchange the fp32 weights of the embedding on both tensor-parallel ranks."""
    places: Any = found.storage_data
    one, other = (next(each for each in places if each.fqn == BUCKET.format(rank, "param")) for rank in (0, 1))
    places[one], places[other] = places[other], places[one]


def earlier_iteration(folder: Path) -> None:
    path = folder / ITERATION / "common.pt"
    value = torch.load(path, weights_only=False, pickle_module=_WithoutMegatron)
    torch.save(value | {"iteration": 1}, path)


BAD_STATES: dict[str, tuple[Callable[[Path], None], str]] = {
    "other weights": (
        lambda folder: change_metadata(folder, exchange_weights),
        "fp32 weight of embedding.word_embeddings.weight is not the model's weight",
    ),
    "a bucket less": (
        lambda folder: change_metadata(
            folder, lambda found: _ignore(found.state_dict_metadata.pop(BUCKET.format(0, "exp_avg")))
        ),
        "the buckets of the optimizer",
    ),
    "interleaved": (
        lambda folder: change_arguments(folder, virtual_pipeline_model_parallel_size=2),
        "of interleaved stages",
    ),
    "more steps than iterations": (earlier_iteration, r"the optimizer took 2\.0 steps, .* at most the 1 iter"),
    "another optimizer": (lambda folder: change_arguments(folder, optimizer="sgd"), 'its optimizer is "sgd"'),
    "other groups": (lambda folder: change_arguments(folder, tensor_model_parallel_size=4), "the buckets of the optim"),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", BAD_STATES)
def test_bad_optimizer_states_are_one_error(group: dist.ProcessGroup, tmp_path: Path, name: str) -> None:
    change, message = BAD_STATES[name]
    folder = copied("dense", tmp_path)
    change(folder)
    source = PretrainedFolder(folder)
    model = load_pretrained(source, groups=groups_of(1, 1), device="cpu")
    with pytest.raises((CheckpointError, ConfigError), match=message):
        load_optimizer_state(source, model)
