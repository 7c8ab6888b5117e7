"""Fine-tuning is what transformers and peft do: the losses of ten steps, at every number of ranks."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.parity import gather_shards
from run.test_run import interrupted_at
from safetensors.torch import load_file
from storage.adapters.reference_steps import CLIP, DECAY, RATE, STEPS, WARMUP, cross_entropy, reference_losses
from storage.adapters.tiny_models import save_model, with_adapters

from shardwise.core.errors import CheckpointError, ConfigError, DataError
from shardwise.data import DataLoader, TokenRows
from shardwise.data.tokenizer import Tokenizer
from shardwise.models.generation.generation import generate
from shardwise.models.generation.sampling import Sampling
from shardwise.plan.workload import planned_workload
from shardwise.run.metrics import read_metrics
from shardwise.run.processes.ranks import Ranks
from shardwise.run.run import train
from shardwise.run.session import open_session
from shardwise.run.settings import (
    CorpusSettings,
    FinetuneOptimizerSettings,
    FinetuneSettings,
    LoraSettings,
    ParallelSettings,
    PretrainedSettings,
    TrainingSettings,
)
from shardwise.run.tasks import results
from shardwise.run.tasks.pretrained_model import PretrainedModel
from shardwise.run.tasks.texts import encode_texts, read_data
from shardwise.storage.adapters.targets import adapter_targets
from shardwise.tensor_parallel.layers import named_param_layouts

BATCH, LENGTH = 4, 20
CORPUS = CorpusSettings(held_out_fraction=0.02)
# The rotary angles of transformers are of fp32 whatever the weights are; of GPT-2 all is fp64.
KINDS = {"llama": torch.float32, "gpt2": torch.float64}
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-11}


def settings_of(
    root, kind, out, *, tp=1, pp=1, sequence_parallel=False, fsdp=False, zero=0, lora=None, resume="never", **training
):
    return FinetuneSettings(
        base=str(root / kind),
        data=(str(root / "text.txt"),),
        out=str(out),
        resume=resume,
        device="cpu",
        model=PretrainedSettings(sequence_length=LENGTH),
        parallel=ParallelSettings(tp=tp, pp=pp, sequence_parallel=sequence_parallel, fsdp=fsdp, zero=zero),
        optimizer=FinetuneOptimizerSettings(
            learning_rate=RATE, warmup_steps=WARMUP, clip_grad_norm=CLIP, weight_decay=DECAY
        ),
        training=TrainingSettings(
            **({"steps": STEPS, "global_batch_size": BATCH, "dtype": str(KINDS[kind])[len("torch.") :]} | training)
        ),
        corpus=CORPUS,
        lora=lora or LoraSettings(),
    )


LORA = LoraSettings(lora_rank=3, lora_alpha=7)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Models with a tokenizer, a text, adapters by peft, and the losses of ten steps with transformers and peft."""
    root = tmp_path_factory.mktemp("finetuning")
    # For models as small as these, more only wait for each other.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    text = Path(argparse.__file__).read_text()[:30_000]
    (root / "text.txt").write_text(text)
    tokenizer = Tokenizer.train([text], 290)
    stream = encode_texts_in(root, tokenizer)
    loader = DataLoader(TokenRows(stream, LENGTH), BATCH, seed=1234)
    batches = [next(loader.batch(step)) for step in range(STEPS)]
    expected = {}
    for kind, dtype in KINDS.items():
        # More rows than the tokenizer has ids, and a number that two ranks do not divide.
        model = save_model(kind, root / kind, dtype=dtype, vocab_size=301)
        tokenizer.save(root / kind)
        with torch.no_grad():
            still = [cross_entropy(model, batch).item() for batch in batches]
        adapted = with_adapters(model, r=3, lora_alpha=7)
        for name, param in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.zeros_(param)
        adapted.save_pretrained(root / kind / "adapter")
        lora = reference_losses(adapted, batches)
        whole = reference_losses(save_model(kind, root / "again", dtype=dtype, vocab_size=301), batches)
        expected[kind] = {"lora": lora, "full": whole, "still": still}
    (root / "expected.json").write_text(json.dumps(expected))
    # A tokenizer with more ids than the model has rows.
    shutil.copytree(root / "gpt2", root / "grown")
    Tokenizer.train([text], 320).save(root / "grown")
    torch.set_num_threads(num_threads)
    return root


def encode_texts_in(root, tokenizer):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CACHE", str(root / "cache"))
        return encode_texts(
            read_data([str(root / "text.txt")], CORPUS), tokenizer, CORPUS, sequence_length=LENGTH
        ).train.stream


def open_run(settings, root, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(root / "cache"))
    ranks = Ranks(dist.get_rank(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    session = open_session(settings, ranks)
    return session, session.task


def start_from(adapters, session, base):
    """Give the adapters the values of a file by peft."""
    tensors = load_file(adapters / "adapter_model.safetensors")
    for site in adapter_targets(session.trainer.model, base.source.folder.architecture):
        if site.adapter is None:
            continue
        rank = site.adapter.group.rank()
        for name, layout in site.adapter.param_layouts.items():
            param = site.adapter.get_parameter(name)
            param.data.copy_(layout.take(tensors[f"base_model.model.{site.path}.{name}.weight"], rank))


def losses_of(session):
    return [session.trainer.train_step(step, session.loader).loss for step in range(STEPS)]


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.ranks(1, 2, 3)
def test_ten_steps_are_those_of_transformers_and_peft(group, root, tmp_path, monkeypatch):
    expected = json.loads((root / "expected.json").read_text())
    kinds_and_options = itertools.product(KINDS, (None, LORA), {False, group.size() > 1})
    for kind, lora, sequence_parallel in kinds_and_options:
        started = LoraSettings(lora_from=str(root / kind / "adapter")) if lora is not None and kind == "llama" else lora
        settings = settings_of(
            root, kind, tmp_path / "run", tp=group.size(), sequence_parallel=sequence_parallel, lora=started
        )
        session, base = open_run(settings, root, monkeypatch)
        if started is LORA:
            start_from(root / kind / "adapter", session, base)
        losses = losses_of(session)
        theirs = expected[kind]["full" if lora is None else "lora"]
        assert theirs[-1] < expected[kind]["still"][-1] - 0.02, "nothing is learned"
        assert losses == pytest.approx(theirs, rel=TOLERANCE[KINDS[kind]]), (kind, lora, sequence_parallel)
        for name, param, layout in named_param_layouts(session.trainer.model, group.size()):
            # Copies, such as those of key-value heads on three ranks, are still the same.
            gather_shards(param.detach(), layout, group)
            assert param.requires_grad == (lora is None or "lora" in name)
            assert param.grad is not None or not param.requires_grad
        session.topology.destroy()


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_two_stages_are_one_model(group, root, tmp_path, monkeypatch):
    expected = json.loads((root / "expected.json").read_text())
    for lora in (None, LORA):
        session, base = open_run(settings_of(root, "gpt2", tmp_path / "run", pp=2, lora=lora), root, monkeypatch)
        if lora is not None:
            start_from(root / "gpt2" / "adapter", session, base)
        theirs = expected["gpt2"]["full" if lora is None else "lora"]
        assert losses_of(session) == pytest.approx(theirs, rel=TOLERANCE[torch.float64])
        session.topology.destroy()


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "lora",
    [None, LORA, dataclasses.replace(LORA, lora_merge=True), dataclasses.replace(LORA, train_new_tokens=True)],
    ids=["all", "lora", "merged", "new tokens"],
)
def test_what_is_written_and_said_after_a_run_with_state_split(group, root, tmp_path, monkeypatch, lora):
    found = []
    for name, parallel in {"whole": {}, "fsdp": {"fsdp": True}, "zero": {"zero": 1}}.items():
        out = tmp_path / name
        settings = settings_of(root, "gpt2", out, steps=4, dtype="float64", **parallel)
        grown = {"base": str(root / "grown"), "resize_vocab": True} if lora and lora.train_new_tokens else {}
        settings = dataclasses.replace(settings, lora=lora or LoraSettings(), **grown)
        session, base = open_run(settings, root, monkeypatch)
        train(session)
        base.write(session)
        said = generate(session.trainer.model, [3, 4], max_new_tokens=8, sampling=Sampling(temperature=0.0), seed=1)
        dist.barrier(group=group)
        (file,) = out.glob("*model.safetensors")
        found.append((load_file(file), list(said)))
        session.topology.destroy()
    (whole, said), *others = found
    for split, said_again in others:
        assert split.keys() == whole.keys()
        for name, tensor in split.items():
            torch.testing.assert_close(tensor, whole[name], rtol=1e-9, atol=1e-12)
        assert said == said_again


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_resumed_run_of_adapters_is_the_run(group, root, tmp_path, monkeypatch):
    """Stopped after six steps at tp 2 and resumed as two data-parallel ranks; checkpoints hold adapters only."""
    lora = LoraSettings(lora_rank=2, lora_dropout=0.2, lora_targets=("c_attn", "mlp.c_proj"))
    whole = settings_of(root, "gpt2", tmp_path / "whole", tp=2, lora=lora, steps=8)
    session, base = open_run(whole, root, monkeypatch)
    train(session)
    base.write(session)
    session.topology.destroy()
    saves = {"save_every": 6, "asynchronous_saves": False}
    broken = settings_of(root, "gpt2", tmp_path / "run", tp=2, lora=lora, steps=8, **saves)
    session, _ = open_run(broken, root, monkeypatch)
    interrupted_at(7, session)
    dist.barrier(group=group)
    session.topology.destroy()
    names = set()
    for file in (tmp_path / "run" / "checkpoints" / "step-00000006").glob("*.safetensors"):
        names |= set(load_file(file))
    assert names
    assert all("lora" in name for name in names)
    again = settings_of(root, "gpt2", tmp_path / "run", tp=1, lora=lora, steps=8, resume="auto", save_every=6)
    session, base = open_run(again, root, monkeypatch)
    train(session)
    base.write(session)
    dist.barrier(group=group)
    session.topology.destroy()
    losses = [[row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("run", "whole")]
    # Data-parallel ranks draw other masks than one, so only the six steps are the same.
    assert losses[0][:6] == losses[1][:6]
    assert len(losses[0]) == 8
    other = settings_of(root, "gpt2", tmp_path / "run", tp=2, lora=LoraSettings(lora_rank=3), steps=8, resume="auto")
    session, _ = open_run(other, root, monkeypatch)
    with pytest.raises(CheckpointError, match=r"lora\.lora_rank was 2 and is 3"):
        train(session)
    session.topology.destroy()


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_what_is_trained_beside_adapters_goes_on_from_a_checkpoint(group, root, tmp_path, monkeypatch):
    """At tp 2, gpt2's tied weight in two from the beginning, and then as two data-parallel ranks."""
    lora = LoraSettings(
        lora_rank=2, lora_bias="lora_only", lora_targets=("c_attn", "lm_head"), lora_modules_to_save=("wte", "ln_f")
    )
    found = {}
    for name, tps in {"whole": (2,), "run": (2, 1)}.items():
        for number, tp in enumerate(tps):
            settings = settings_of(
                root, "gpt2", tmp_path / name, tp=tp, lora=lora, steps=6, resume="auto", save_every=4,
                asynchronous_saves=False,
            )  # fmt: skip
            session, base = open_run(settings, root, monkeypatch)
            if number + 1 < len(tps):
                interrupted_at(5, session)
            else:
                train(session)
                base.write(session)
            dist.barrier(group=group)
            session.topology.destroy()
        found[name] = load_file(tmp_path / name / "adapter_model.safetensors")
    assert {name.rpartition("lora_")[0] for name in found["run"] if "lora_" in name} >= {"base_model.model.lm_head."}
    assert {"base_model.model.transformer.wte.weight", "base_model.model.transformer.ln_f.bias"} <= found["run"].keys()
    for name, tensor in found["whole"].items():
        torch.testing.assert_close(found["run"][name], tensor, rtol=1e-9, atol=1e-12)
    before = load_file(root / "gpt2" / "model.safetensors")
    assert not torch.equal(found["run"]["base_model.model.transformer.ln_f.bias"], before["transformer.ln_f.bias"])


@pytest.mark.ranks(2)
def test_what_cannot_be_is_said_on_every_rank(group, root, tmp_path, monkeypatch):
    def refused(error, message, base="gpt2", more=(), **options):
        settings = settings_of(root, "gpt2", **({"out": tmp_path / "run"} | options))
        dist.barrier(group=group)
        with pytest.raises(error, match=message):
            # An absolute path stands for itself.
            open_run(dataclasses.replace(settings, base=str(root / base), **dict(more)), root, monkeypatch)

    lora = LoraSettings(lora_rank=2, lora_targets=("q_proj",))
    refused(
        ConfigError,
        "no linear layer 'q_proj' to adapt; did you mean c_proj.; it has c_attn, c_fc, c_proj, lm_head, wte",
        lora=lora,
    )
    refused(ConfigError, "is the model's own folder", out=root / "gpt2")
    refused(ConfigError, r"has a config\.json, which no run put there", out=root / "llama")
    for number, name in enumerate(
        ("adapter_config.json", "adapter_model.safetensors", "model-00001-of-00003.safetensors")
    ):
        if group.rank() == 0:
            (tmp_path / f"{number}").mkdir()
            (tmp_path / f"{number}" / name).write_text("{}")
        said = rf"has an? {re.escape(name)}, which no run put there"
        refused(ConfigError, said, out=tmp_path / f"{number}")
        assert (tmp_path / f"{number}" / name).exists()
    refused(ConfigError, "of 2 data-parallel|multiple of the 2 data-parallel", tp=1, global_batch_size=3)
    bare = tmp_path / "bare"
    first = group.rank() == 0
    if first:
        bare.mkdir()
        for name in ("config.json", "model.safetensors"):
            (bare / name).write_bytes((root / "gpt2" / name).read_bytes())
    refused(DataError, r"no tokenizer at '.*bare/tokenizer\.json'", base=bare)
    if first:
        Tokenizer.train([(root / "text.txt").read_text()], 320).save(bare)
    refused(ConfigError, "has 320 ids, and its model rows for 301: .* --resize-vocab gives", base=bare)
    new = LoraSettings(lora_rank=2, train_new_tokens=True)
    settings = dataclasses.replace(
        settings_of(root, "gpt2", tmp_path / "run"), base=str(bare), **(resized := {"resize_vocab": True, "lora": new})
    )
    source, planned = PretrainedModel(settings), planned_workload(settings)
    assert source.folder.description.vocab_size == planned.model.vocab_size == 320
    assert source.adapters.trainable_token_indices == {"wte": tuple(range(301, 320))}
    assert planned.adaptation.config == source.adapters
    refused(ConfigError, "has rows for all tokens of its tokenizer, 301, so none is new", more=resized)
    if first:
        (bare / "config.json").unlink()
    refused(CheckpointError, r"has no config\.json; give the folder of a model", base=bare)


def test_settings_that_contradict_each_other():
    for options, message in (
        ({"lora_rank": 0}, "--lora-rank is 0; it must be from 1 to 65,536"),
        ({"lora_alpha": 3.0}, "--lora-alpha without --lora-rank"),
        ({"lora_rank": 2, "lora_dropout": 1.0}, "--lora-dropout is 1.0"),
        ({"lora_rank": 2, "lora_targets": ()}, "--lora-targets names no layer"),
        ({"lora_merge": True}, "--lora-merge without --lora-rank"),
        ({"lora_from": "x", "lora_rank": 2}, "--lora-rank with --lora-from"),
        ({"lora_rank": 2, "lora_target_pattern": "("}, "'\\(' is no regular expression: missing \\)"),
        (
            {"lora_rank": 2, "lora_target_pattern": "a", "lora_targets": ("b",)},
            "--lora-targets cannot be used with --lora-target-pattern",
        ),
        ({"lora_rank": 2, "lora_rank_pattern": ("q_proj",)}, "--lora-rank-pattern has 'q_proj'; write a name and"),
        ({"lora_rank": 2, "lora_rank_pattern": ("q_proj=0",)}, "the LoRA rank is 0"),
        ({"lora_rank": 2, "lora_alpha_pattern": ("q_proj=nan",)}, "the alpha of q_proj is nan"),
    ):
        with pytest.raises(ConfigError, match=message):
            LoraSettings(**options)
    with pytest.raises(ConfigError, match="no model to start from"):
        FinetuneSettings(data=("x",))
    with pytest.raises(ConfigError, match="no text to train on"):
        FinetuneSettings(base="x")
    new = {"base": "x", "data": ("y",), "lora": LoraSettings(lora_rank=1, train_new_tokens=True)}
    with pytest.raises(ConfigError, match="--train-new-tokens without --resize-vocab"):
        FinetuneSettings(**new)
    with pytest.raises(ConfigError, match="--exact has no exact form of --train-new-tokens"):
        FinetuneSettings(**new, resize_vocab=True, parallel=ParallelSettings(exact=True))
    with pytest.raises(ConfigError, match=r"model\.sequence-length is 1"):
        PretrainedSettings(sequence_length=1)
    assert FinetuneSettings(base="x", data=("y",)).optimizer.learning_rate == 2e-5
    assert FinetuneSettings(base="x", data=("y",), lora=LoraSettings(lora_rank=1)).optimizer.learning_rate == 2e-4
    patterns = {"lora_rank_pattern": (r"layers\.1\..*=4",), "lora_alpha_pattern": ("v_proj=0.5",)}
    lora = LoraSettings(lora_rank=3, lora_target_pattern=".*_proj", lora_dora=True, **patterns)
    config = lora.config()
    assert (config.target_modules, config.use_dora) == (".*_proj", True)
    first, second = (config.at(f"model.layers.{layer}.self_attn.v_proj") for layer in range(2))
    assert [(each.r, each.lora_alpha) for each in (first, second)] == [(3, 0.5), (4, 0.5)]
    once = FinetuneSettings(base="x", data=("y",), lora=lora)
    assert FinetuneSettings.from_json(once.to_json()) == once


def test_a_folder_holds_what_was_asked_for_last(tmp_path):
    """Adapters beside a model, of whichever run, would be taken for that model's."""
    out, partial = tmp_path / "out", tmp_path / "out" / "export.partial"
    partial.mkdir(parents=True)
    kept, adapters = {"checkpoints", "settings.json"}, {"adapter_config.json", "adapter_model.safetensors"}
    of_model = {"config.json", "model.safetensors"}
    for name in kept | adapters | {"model-00001-of-00002.safetensors", "model.safetensors.index.json"}:
        (out / name).touch()
    for name in of_model:
        (partial / name).touch()
    # The run left the files of the base model at its beginning.
    templates = "additional_chat_templates"
    for folder, text in ((out, "of the base"), (partial, "of the export")):
        (folder / templates).mkdir()
        (folder / templates / "tool_use.jinja").write_text(text)
    results._move_into_place(partial, out)
    assert (out / templates / "tool_use.jinja").read_text() == "of the export"
    shutil.rmtree(out / templates)
    assert {path.name for path in out.iterdir()} == kept | of_model
    results._remove(out, results.MODEL_FILES)
    assert {path.name for path in out.iterdir()} == kept
