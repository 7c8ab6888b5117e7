"""SmolLM2 learns as with peft, learns from twenty steps, has the same bits at each layout, scores as in lm_eval."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples.test_grpo import run_grpo
from run.run_processes import hashes, run_command, run_commands, run_in_processes
from storage.adapters.reference_steps import CLIP, DECAY, STEPS, WARMUP, reference_losses
from storage.adapters.tiny_models import with_adapters

from shardwise.data import DataLoader, TokenRows
from shardwise.data.tokenizer import Tokenizer
from shardwise.run.processes.ranks import Ranks
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
from shardwise.run.tasks.task import Session
from shardwise.run.tasks.texts import encode_texts, read_data

LENGTH, BATCH, LORA_RATE = 32, 2, 1e-3
CORPUS = CorpusSettings(held_out_fraction=0.02)


@pytest.fixture(scope="session")
def topics() -> Mapping[str, str]:
    """Python's documentation, which the standard library has: texts by their topics."""
    from pydoc_data.topics import topics

    return topics


@pytest.fixture(scope="session")
def text(topics: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n".join(topics.values())[:100_000])
    return file


def settings_of(
    base: Path, text: Path, out: Path, *, steps: int, rate: float, lora: Path | None = None, **parallel: Any
) -> FinetuneSettings:
    return FinetuneSettings(
        base=str(base),
        data=(str(text),),
        out=str(out),
        device="cpu",
        model=PretrainedSettings(sequence_length=LENGTH),
        parallel=ParallelSettings(**parallel),
        optimizer=FinetuneOptimizerSettings(
            learning_rate=rate, warmup_steps=WARMUP, clip_grad_norm=CLIP, weight_decay=DECAY
        ),
        training=TrainingSettings(steps=steps, global_batch_size=BATCH),
        corpus=CORPUS,
        lora=LoraSettings(lora_from=None if lora is None else str(lora)),
    )


def opened(settings: FinetuneSettings) -> Session:
    return open_session(settings, Ranks(dist.get_rank(), dist.get_rank(), dist.get_world_size(), torch.device("cpu")))


@pytest.fixture(scope="session")
def adapted(smollm: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters by peft, and the losses of ten steps of theirs in ``losses.json``."""
    import transformers

    folder = tmp_path_factory.mktemp("adapters")
    stream = encode_texts(
        read_data([str(text)], CORPUS), Tokenizer.load(smollm), CORPUS, sequence_length=LENGTH
    ).train.stream
    loader = DataLoader(TokenRows(stream, LENGTH), BATCH, seed=TrainingSettings().seed)
    batches = [next(loader.batch(step)) for step in range(STEPS)]
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    adapted = with_adapters(model, r=4, lora_alpha=8)
    for name, param in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.zeros_(param)
    adapted.save_pretrained(folder)
    losses = reference_losses(adapted, batches, highest=LORA_RATE)
    (folder / "losses.json").write_text(json.dumps(losses))
    return folder


@pytest.mark.ranks(2)
def test_adapters_learn_as_with_peft(
    group: dist.ProcessGroup, smollm: Path, text: Path, adapted: Path, tmp_path: Path
) -> None:
    """Five and four query heads, two and one key-value heads."""
    settings = settings_of(smollm, text, tmp_path, steps=STEPS, rate=LORA_RATE, lora=adapted, tp=2)
    session = opened(settings)
    losses = [session.trainer.train_step(step, session.loader).loss for step in range(STEPS)]
    assert losses == pytest.approx(json.loads((adapted / "losses.json").read_text()), rel=1e-5)


@pytest.mark.ranks(2)
def test_three_steps_of_reinforcement_learning(
    group: dist.ProcessGroup, smollm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine heads, three of keys and values, on two ranks that sample: no exact mode, but ratios of about 1."""
    rewards, ratios = run_grpo(monkeypatch, str(smollm), "--steps", "3", "--prompts", "4", "--samples", "4")
    if group.rank() == 0:
        assert len(rewards) == 3
        assert 0 < max(ratios) < 1e-2


@pytest.mark.ranks(4)
@pytest.mark.parametrize("steps", [20, pytest.param(100, marks=pytest.mark.matrix)])
def test_steps_of_all_weights(group: dist.ProcessGroup, smollm: Path, text: Path, tmp_path: Path, steps: int) -> None:
    """Two replicas of two tensor-parallel ranks, which share the optimizer's state."""
    session = opened(settings_of(smollm, text, tmp_path, steps=steps, rate=1e-4, tp=2, zero=1))

    def measured() -> float:
        return session.trainer.evaluate(session.data.held_out)["held_out_bits_per_byte"]

    before = measured()
    for step in range(steps):
        session.trainer.train_step(step, session.loader)
    after = measured()
    assert after < 0.95 * before, (before, after)


def test_exact_runs_have_the_same_bits(smollm: Path, text: Path, tmp_path: Path) -> None:
    """On one rank, and on two replicas of two stages; nine heads are no multiple of two, and not summed in parts."""

    def run(name: str, num_ranks: int, **parallel: int) -> dict[str, str]:
        out = tmp_path / name
        settings = settings_of(smollm, text, out, steps=2, rate=1e-4, exact=True, **parallel)
        run_in_processes(settings, num_ranks, tmp_path / f"{name}-ranks")
        found = hashes(out)
        shutil.rmtree(out)
        return found

    expected = run("one", 1)
    assert expected.keys() >= {"loss of step 1", "grad_norm of step 1", "held_out_bits_per_byte of step 1"}
    assert run("stages", 4, pp=2) == expected
    for tp, reason in ((2, "9"), (3, "powers of two")):
        flags = ("--data", text, "--out", tmp_path / "refused", "--device", "cpu", "--exact", "--tp", tp)
        for code, _, error in run_commands(tmp_path, [("finetune", smollm, *flags)] * tp):
            assert code == 2
            assert reason in error
        for code, _, error in run_commands(tmp_path, [("generate", smollm, "--exact", "--device", "cpu")] * tp):
            assert code == 2
            assert reason in error


TASK = """
task: topics
dataset_path: json
dataset_kwargs:
  data_files: {folder}/topics.jsonl
  cache_dir: {folder}/datasets
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{text}}}}\\nThis text is about"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list:
  - metric: acc
  - metric: acc_norm
"""


@pytest.fixture
def task(topics: Mapping[str, str], tmp_path: Path) -> Path:
    """A task of ``lm_eval``: which topic of Python's documentation has this beginning?"""
    names = [name for name in topics if name.isalpha()][:8]
    with (tmp_path / "topics.jsonl").open("w") as file:
        for place, name in enumerate(names):
            choices = [f" {names[(place + number) % 8]}" for number in range(4)]
            file.write(json.dumps({"text": topics[name][:160], "choices": choices}) + "\n")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/topics.yaml").write_text(TASK.format(folder=tmp_path))
    return tmp_path / "tasks"


def test_a_task_of_lm_eval_scores_as_its_own_model(smollm: Path, task: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        report = lm_eval.simple_evaluate(
            model=HFLM(str(smollm), device="cpu", dtype="float32", batch_size=4),
            tasks=["topics"],
            task_manager=lm_eval.tasks.TaskManager(include_path=str(task), include_defaults=False),
            bootstrap_iters=0,
        )
    # Nine heads on three ranks.
    run_command(
        *(tmp_path, 3, "eval", smollm, "--task-path", task, "--tasks", "topics", "--device", "cpu", "--tp", 3),
        *("--output", tmp_path / "report.json"),
        HF_HOME=tmp_path / "hf",
        HF_HUB_OFFLINE=1,
        HF_DATASETS_OFFLINE=1,
    )
    own = json.loads((tmp_path / "report.json").read_text())
    for name in ("acc,none", "acc_norm,none", "sample_len"):
        assert own["results"]["topics"][name] == report["results"]["topics"][name]
    answers = [
        [float(answer[0][0]) for answer in sample["resps"]]
        for each in (own, report)
        for sample in sorted(each["samples"]["topics"], key=lambda sample: sample["doc_id"])
    ]
    for found, expected in zip(answers[:8], answers[8:], strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
