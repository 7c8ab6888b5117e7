"""The plan of each command that trains is that of its run: the same model, adapters and state."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from storage.adapters.tiny_models import save_model

from shardwise.core.communication.collectives import all_reduce
from shardwise.core.communication.context import context_of
from shardwise.core.communication.transports.channel import channel_bytes
from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.data.tokenizer import Tokenizer
from shardwise.nn.quantization import QuantizedTensor
from shardwise.plan.machine import Surroundings
from shardwise.plan.plan import keyword_workload, plan_of
from shardwise.run import fit_run, plan_run
from shardwise.run.checkpoints import begin_save
from shardwise.run.processes.ranks import Ranks
from shardwise.run.session import open_session
from shardwise.run.settings import DpoSettings, FinetuneSettings, RunSettings
from shardwise.run.tasks.task import Session
from shardwise.storage.adapters.model import trained_of
from shardwise.storage.checkpoint import Snapshot
from shardwise.training.bounds import from_keywords

WORDS = ("grass", "snow", "coal", "blood", "green", "white", "black", "red", *map(str, range(20)))
SETTINGS = {"finetune": FinetuneSettings, "dpo": DpoSettings}
# Command, model, data and settings of the run.
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "finetune": ("finetune", "llama", "texts", {}),
    "adapters": ("finetune", "gpt2", "texts", {"lora_rank": 3, "lora_modules_to_save": ("wte",)}),
    "int8": ("finetune", "llama", "texts", {"lora_rank": 2, "base_quantization": "int8"}),
    "nf4": ("finetune", "llama", "texts", {"lora_rank": 2, "base_quantization": "nf4"}),
    "dpo": ("dpo", "llama", "pairs", {"training": {"dtype": "bfloat16"}}),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Models by transformers, and data of every kind."""
    root = tmp_path_factory.mktemp("commands")
    things, colours = WORDS[:4], WORDS[4:8]
    both = [(f"{number} {thing}", colour) for number in range(4) for thing, colour in zip(things, colours, strict=True)]
    texts = [{"prompt": thing, "completion": f" {colour}"} for thing, colour in both]
    pairs = [{"prompt": thing, "chosen": f" {colour}", "rejected": " no"} for thing, colour in both]
    for name, records in {"texts": texts, "pairs": pairs}.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = Tokenizer.train([" ".join(WORDS)], 280, ("<|endoftext|>", "<pad>"))
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, changes in {"llama": {}, "gpt2": {}, "deep": {"n_layer": 4}}.items():
            save_model("llama" if name == "llama" else "gpt2", root / name, vocab_size=tokenizer.vocab_size, **changes)
        large = {"hidden_size": 48, "num_hidden_layers": 3, "vocab_size": tokenizer.vocab_size + 7}
        save_model("llama", root / "large", dtype=torch.bfloat16, **large)
    for name in ("llama", "gpt2", "deep", "large"):
        tokenizer.save(root / name)
    return root


def run_settings(root, case, *, for_plan: bool) -> dict[str, Any]:
    _, model, data, settings = CASES[case]
    settings = settings | ({} if for_plan else {"data": root / f"{data}.jsonl", "base": root / model})
    training = {"steps": 2, "global_batch_size": 2} | settings.get("training", {})
    return settings | {"device": "cpu", "training": training, "parallel": {"tp": 2}, "model": {"sequence_length": 16}}


@pytest.fixture
def plan(request, root):
    """A case, its workload and its plan, which are made before there are ranks."""
    command, model, *_ = CASES[request.param]
    workload = keyword_workload(command, root / model, run_settings(root, request.param, for_plan=True))
    return request.param, workload, [plan_of(workload, 2, rank) for rank in range(2)]


def open_run(settings: RunSettings, root: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setenv("SHARDWISE_CACHE", str(root / "cache"))
    ranks = Ranks(dist.get_rank(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return open_session(settings, ranks)


def flat(tensor: torch.Tensor | None) -> Iterator[torch.Tensor]:
    if isinstance(tensor, QuantizedTensor):
        yield from (each for each in (tensor.codes, tensor.scales, tensor.blocks) if each is not None)
    elif tensor is not None:
        yield tensor


def bytes_of(*tensors: torch.Tensor | None) -> int:
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for one in tensors for each in flat(one)}
    return sum(storages.values())


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("plan", CASES, indirect=True)
def test_the_run_that_is_planned(group, root, tmp_path, monkeypatch, plan):
    case, workload, plans = plan
    step = plans[group.rank()].worst.step
    given = run_settings(root, case, for_plan=False) | {"out": tmp_path / "run"}
    session = open_run(from_keywords(SETTINGS[CASES[case][0]], given), root, monkeypatch)
    trainer, source = session.trainer, session.task.source
    described = source.describe(session.data)
    assert workload.model == described
    dropouts = "hidden_dropout", "attention_dropout"
    assert [getattr(workload.model, name) for name in dropouts] == [getattr(described, name) for name in dropouts]
    assert workload.settings.sequence_length == session.settings.sequence_length
    if workload.adaptation is not None:
        assert workload.adaptation.config == source.settings.lora.config()
    session.task.method.before(session)
    trainer.train_step(0, session.loader)
    params = list(trainer.model.parameters())
    trained = [param for param in params if param.requires_grad]
    assert (step.num_parameters, step.weights) == (sum(param.numel() for param in params), bytes_of(*params))
    assert step.gradients == bytes_of(*(getattr(param, "main_grad", param.grad) for param in trained))
    weight_of = getattr(trainer.optimizer, "weight_of", lambda param: param)
    copies = bytes_of(*map(weight_of, trained)) if weight_of(trained[0]) is not trained[0] else 0
    assert step.masters == copies
    others = [*trainer.model.buffers()]
    # Trained weights next to adapters keep their first values.
    others += [each.original for each in trained_of(trainer.model).parameters]
    assert step.others == bytes_of(*others)
    snapshot = Snapshot()
    saving = begin_save(session, 1, snapshot)
    written = torch.tensor([bytes_of(*snapshot._buffers.values()), step.saved], dtype=torch.int64)
    saving.complete()
    dist.all_reduce(written)
    # Ranks that hold the same tensors share them, each of them whole.
    assert written[0] == pytest.approx(int(written[1]), abs=4)
    session.topology.destroy()


LAYOUTS = {"tp": {"tp": 2}, "stages": {"tp": 2, "pp": 2}, "zero": {"zero": 1}, "a tied weight": {"pp": 4}}


@pytest.fixture
def shared(request, root):
    """A layout, and the shared memory that a plan states for a host of all its ranks."""
    parallel = LAYOUTS[request.param]
    given = run_settings(root, "finetune", for_plan=True) | {"parallel": parallel}
    given["training"] = given["training"] | {"global_batch_size": 4}
    around = Surroundings.of(plan_run(root / "deep", command="finetune", ranks=4, **given), 8)
    return parallel, sum(each.groups * each.num_bytes for each in around.channels)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("shared", LAYOUTS, indirect=True)
def test_shared_memory_is_what_a_run_maps(group, root, tmp_path, monkeypatch, shared):
    parallel, stated = shared
    given = run_settings(root, "finetune", for_plan=False) | {"out": tmp_path / "run", "parallel": parallel}
    given |= {"base": root / "deep", "training": given["training"] | {"global_batch_size": 4}}
    session = open_run(from_keywords(FinetuneSettings, given), root, monkeypatch)
    session.trainer.train_step(0, session.loader)
    # As a run does when it ends.
    all_reduce(torch.zeros(1), group=session.ranks.world)
    mapped = torch.zeros((), dtype=torch.float64)
    for each in (*session.topology.groups(), session.ranks.world):
        if (channel := context_of(each).channel) is not None:
            mapped += channel_bytes(channel.t) / channel.t
            assert channel._slots.untyped_storage().nbytes() == channel_bytes(channel.t)
    dist.all_reduce(mapped)
    assert mapped == stated
    session.topology.destroy()


@pytest.mark.slow
def test_a_plan_reads_configs_alone(root, tmp_path):
    """Without weights, tokenizers and data; what is missing is named."""
    for name in ("llama", "large", "adapters"):
        (tmp_path / name).mkdir()
    for name in ("llama", "large"):
        (tmp_path / name / "config.json").write_bytes((root / name / "config.json").read_bytes())
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps(config))
    plans = {
        "all": plan_run(tmp_path / "llama", command="finetune"),
        "adapters": plan_run(tmp_path / "llama", command="finetune", lora_from=tmp_path / "adapters"),
        "dpo": plan_run(tmp_path / "llama", command="dpo"),
    }
    assert plans["adapters"].worst.step.gradients < plans["all"].worst.step.gradients / 10
    # Two rows a sample.
    assert plans["dpo"].worst.flops == pytest.approx(2 * plans["all"].worst.flops, rel=1e-9)
    (best, *_) = fit_run("1GiB", tmp_path / "llama", command="dpo", ranks=1)
    assert best.plan.mesh.world_size == 1
    with pytest.raises(CheckpointError, match="nowhere"):
        plan_run(tmp_path / "nowhere", command="finetune")


@pytest.mark.parametrize(
    ("command", "settings", "message"),
    [
        ("finetune", {"model": {"sequence_length": 65}}, "model.sequence-length 65 is more than 64"),
        ("finetune", {"model": {"num_layers": 2}}, "unknown setting model.num_layers"),
        ("demo", {}, "command is 'demo'; it must be one of 'train', 'finetune', 'dpo'"),
    ],
)
def test_what_cannot_be_planned(root, command, settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan_run(root / "llama", command=command, **settings)
