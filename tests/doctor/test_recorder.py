"""Recordings: what they have, that they change nothing, and bad input."""

from __future__ import annotations

import json
import os
import re
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_bit_equal
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.core.errors import ConfigError, DataError, UnwritableError
from shardwise.doctor import diagnose, record, recorder as recorders
from shardwise.doctor.places import Key
from shardwise.doctor.recording import Recording, check_replaceable
from shardwise.doctor.report import as_text
from shardwise.doctor.sketches import Sketch, alike, concatenated, distance, placed

Pair = namedtuple("Pair", ["first", "second"])


class Strange(nn.Module):
    """Returns nested things; has a buffer, a frozen parameter, a module called twice and one that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.never = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("offset", torch.ones(6))

    def forward(self, x: Tensor, *, mask: Tensor | None = None, extra: dict[str, Tensor] | None = None) -> Any:
        assert extra is not None
        y = self.twice(self.twice(x)) + self.frozen(x) + self.offset + extra["more"]
        return {"pair": Pair(y, None), "list": [y * 2, (y.sum(),)], "number": 3}


class Model(nn.Module):
    def __init__(self, recomputes: str = "") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.strange, self.head = nn.Embedding(11, 6), Strange(), nn.Linear(6, 11)
        self.recomputes = recomputes

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.recomputes:
            return self.head(checkpoint(self.inner, x, use_reentrant=self.recomputes == "reentrant"))
        return self.head(self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        out = self.strange(x, extra={"more": torch.ones(6)})
        return out["pair"].first + out["list"][0]


def train(model: nn.Module, recorder_of: Any = None, *, steps: int = 2) -> tuple[list[Tensor], Any]:
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.1)
    recorder = recorder_of(model, optimizer) if recorder_of is not None else None
    for step in range(steps):
        optimizer.zero_grad()
        for micro_batch in range(2):
            ids = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(10 * step + micro_batch))
            F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        if recorder is not None:
            recorder.gradients()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()], recorder


def into(folder, **options):
    return lambda model, optimizer: record(model, folder, optimizer=optimizer, **options)


@pytest.mark.parametrize("recomputes", ["", "reentrant", "not reentrant"])
def test_recording_keeps_the_bits_and_records_each_call_once(tmp_path, recomputes):
    plain, _ = train(Model(recomputes))
    recorded, recorder = train(Model(recomputes), into(tmp_path / "one"))
    for one, other in zip(plain, recorded, strict=True):
        assert_bit_equal(one, other)
    assert recorder.is_done
    recording = Recording(tmp_path / "one")
    keys = recording.recorded
    assert len(keys) == len(set(keys))
    outputs = [key for key in keys if key.what == "output" and key.name == "strange.twice" and key.step == 0]
    assert [(key.micro_batch, key.call) for key in outputs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    gradients = {key for key in keys if key.what == "output gradient" and key.name == "strange.twice"}
    assert len(gradients) == 2 * 2 * 2
    assert {key.leaf for key in keys if key.what == "output" and key.name == "strange"} == {
        "pair.0",
        "list.0",
        "list.1.0",
    }
    assert not any("never" in key.name and key.what != "updated" for key in keys)
    assert not any(key.what == "gradient" and "frozen" in key.name for key in keys)
    assert {key.micro_batch for key in keys if key.what == "accumulated"} == {0, 1}
    # Clipping divides all gradients.
    assert all(0 < update["clip_factor"] < 1 for update in recording.facts["updates"])
    assert diagnose(tmp_path / "one", tmp_path / "one").is_sound


def test_recomputed_values_and_gradients_are_those_without_recomputation(tmp_path):
    for recomputes in ("", "reentrant", "not reentrant"):
        train(Model(recomputes), into(tmp_path / (recomputes or "none")))
    for recomputes in ("reentrant", "not reentrant"):
        diagnosis = diagnose(tmp_path / "none", tmp_path / recomputes)
        assert diagnosis.is_sound
        assert max(each.ratio for each in diagnosis.judged) == 0
        assert not [note for note in diagnosis.notes if "not in the suspect" in note]


def test_without_a_call_gradients_are_those_of_the_update(tmp_path):
    def forgetful(folder):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with record(model, folder, optimizer=optimizer, steps=1):
            model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
            optimizer.step()

    forgetful(tmp_path / "one")
    assert Recording(tmp_path / "one").facts["updates"][0]["was_clipped"]


def test_gradients_are_recorded_without_a_call_and_an_optimizer(tmp_path):
    """The script keeps its optimizer, which deletes the gradients, to itself."""

    def train_alone(folder, times):
        model = Model()
        model.head.weight.register_hook(lambda gradient: gradient * times)
        optimizers = [
            torch.optim.SGD(each.parameters(), lr=0.1) for each in (model.embedding, model.strange, model.head)
        ]
        with record(model, folder):
            for _ in range(2):
                model(torch.zeros(1, 2, dtype=torch.int64)).square().sum().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()

    train_alone(tmp_path / "one", 1.0)
    train_alone(tmp_path / "other", 1.69)
    assert Recording(tmp_path / "one").steps == 2
    first = diagnose(tmp_path / "one", tmp_path / "other").first
    assert first is not None
    assert (first.where, first.module, first.kind, first.step) == ("backward", "head.weight", "scaled", 0)


def test_a_verdict_says_what_was_not_recorded(tmp_path):
    for name in ("one", "other"):
        model = Model()
        with record(model, tmp_path / name, steps=1):
            model(torch.zeros(1, 2, dtype=torch.int64))
    text = as_text(diagnose(tmp_path / "one", tmp_path / "other"))
    assert "sound" not in text
    assert "not recorded: gradients of parameters (recorder.gradients() records them)" in text
    train(Model(), into(tmp_path / "trained"))
    assert as_text(diagnose(tmp_path / "trained", tmp_path / "trained")).endswith("sound: all differences are rounding")


def test_a_step_that_was_not_begun_is_not_counted(tmp_path):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, tmp_path, optimizer=optimizer, steps=3) as recorder:
        model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
        optimizer.step()
    assert recorder.is_done
    assert Recording(tmp_path).steps == 1


def test_an_evaluation_is_not_recorded(tmp_path):
    model = Model()
    with record(model, tmp_path, steps=1):
        model.eval()
        model(torch.zeros(1, 2, dtype=torch.int64))
        model.train()
        with torch.no_grad():
            model(torch.zeros(1, 2, dtype=torch.int64))
    assert not Recording(tmp_path).facts["calls"]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_module_is_one_unit(tmp_path):
    model = Model()
    model.head = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 11)), backend="eager")
    train(model, into(tmp_path))
    names = {key.name for key in Recording(tmp_path).recorded if key.what == "output"}
    assert "head" in names
    assert not any(name.startswith("head.") for name in names)


def test_a_perturbed_run_differs_by_rounding(tmp_path):
    train(Model(), into(tmp_path / "one"))
    train(Model(), into(tmp_path / "rounding", perturb=1))
    train(Model(), into(tmp_path / "other", perturb=2))
    diagnosis = diagnose(tmp_path / "one", tmp_path / "other", tmp_path / "rounding")
    assert diagnosis.is_sound
    assert diagnosis.rounding_is_measured
    assert max(each.ratio for each in diagnosis.judged if each.key.what == "output") > 0


def test_a_rounding_that_is_not_recorded_is_estimated(tmp_path):
    train(Model(), into(tmp_path / "one"))
    train(Model(), into(tmp_path / "rounding", perturb=1, budget=3_000))
    train(Model(), into(tmp_path / "other", perturb=2))
    assert Recording(tmp_path / "rounding").facts["dropped"]
    assert diagnose(tmp_path / "one", tmp_path / "other", tmp_path / "rounding").is_sound


def test_the_budget_and_the_number_of_layers_are_kept(tmp_path):
    def layers():
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))

    for name, options in (("few", {"first_layers": 2}), ("small", {"budget": 20_000}), ("full", {"full": ("3",)})):
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with record(model, tmp_path / name, optimizer=optimizer, steps=1, **options):
            model(torch.ones(600, 64)).sum().backward()
            optimizer.step()
    few = {key.name for key in Recording(tmp_path / "few").recorded if key.what == "output"}
    assert few == {"", "0", "1"}
    small = Recording(tmp_path / "small")
    assert small.facts["dropped"]
    assert (tmp_path / "small/rank00000.safetensors").stat().st_size < 40_000
    full = Recording(tmp_path / "full").entries(Key("output", "3", 0, 0))[0].sketch
    assert full.is_whole


def test_bad_input(tmp_path, monkeypatch):
    model = Model()
    with pytest.raises(ConfigError, match="steps is 0; record at least one step"):
        record(model, tmp_path, steps=0)
    with pytest.raises(ConfigError, match="tp is rank 2 of 2; ranks count from 0"):
        record(model, tmp_path, axes={"tp": (2, 2)})
    train(Model(), into(tmp_path / "one"))
    with pytest.raises(ConfigError, match="has a recording already"):
        record(model, tmp_path / "one")
    with pytest.raises(DataError, match="has no recording"):
        diagnose(tmp_path / "nothing", tmp_path / "one")
    other = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with record(other, tmp_path / "other", optimizer=optimizer, steps=1):
        other(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    with pytest.raises(ConfigError, match="no module or parameter in common"):
        diagnose(tmp_path / "one", tmp_path / "other")
    reseeded = Model()
    for param in reseeded.parameters():
        param.data += 1
    train(reseeded, into(tmp_path / "reseeded"))
    with pytest.raises(
        ConfigError, match=r"7 of 7 parameters begin with other values .* give both runs the same initial"
    ):
        diagnose(tmp_path / "one", tmp_path / "reseeded")
    train(Model(), into(tmp_path / "older"))
    facts = tmp_path / "older/rank00000.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"torch": "1.0"}))
    notes = diagnose(tmp_path / "one", tmp_path / "older").notes
    assert any(note.endswith("the suspect with 1.0") for note in notes)
    monkeypatch.setattr(recorders.shutil, "disk_usage", lambda folder: namedtuple("Usage", "free")(1000))
    with pytest.raises(UnwritableError, match="1,000 bytes free, and the recording of rank 0 needs"):
        train(Model(), into(tmp_path / "full disk"))


def test_torn_recordings(tmp_path):
    train(Model(), into(tmp_path / "one"))
    facts, tensors = tmp_path / "one/rank00000.json", tmp_path / "one/rank00000.safetensors"
    own = facts.read_text(), tensors.read_bytes()
    tensors.write_bytes(own[1][:1000])
    with pytest.raises(DataError, match="no complete recording"):
        diagnose(tmp_path / "one", tmp_path / "one")
    tensors.write_bytes(own[1])
    for text in (own[0][:500], "[]", json.dumps(json.loads(own[0]) | {"version": 99})):
        facts.write_text(text)
        with pytest.raises(DataError, match=r"no complete recording|version 99"):
            diagnose(tmp_path / "one", tmp_path / "one")
    facts.write_text(json.dumps(json.loads(own[0]) | {"world_size": 2}))
    with pytest.raises(DataError, match=r"those of ranks \[1\] are missing"):
        diagnose(tmp_path / "one", tmp_path / "one")


MISSING = object()
# A value that each field of a recording cannot have, by the path to the field, and what is said of it.
DAMAGE: list[tuple[str, Any, str]] = [
    ("rank", MISSING, "rank is missing"),
    ("rank", 1, "its rank is 1, and its world_size 1"),
    ("world_size", 10**9, r"recordings of ranks 0 of 1000000000; those of ranks \[1, 2, 3, 4\] are missing"),
    ("world_size", 0, "world_size is 0"),
    ("world_size", 10**30, "world_size is 10"),
    ("version", True, "version true"),
    ("torch", 2, "torch is 2; it must be a string"),
    ("axes", [], "axes is"),
    ("axes", {"tp": [0]}, r"axes\.tp is \[0\]; it must be a list of 2"),
    ("axes", {"tp": [2, 2]}, r"axes\.tp is \[2, 2\]"),
    ("axes", {str(axis): [0, 1] for axis in range(9)}, "axes are 9"),
    ("steps", None, "steps is null"),
    ("steps", 10**12, "steps is 1000000000000, and 2 have a record"),
    ("steps", 1, r"step is 1, and its steps are 1"),
    ("perturb", "x", "perturb is"),
    ("modules", {"": None}, r"modules\. is null"),
    ("parameters", {"a": 1}, r"parameters\.a is 1; it must be an object"),
    ("dropped", ["a", 1], r"dropped\[1\] is 1"),
    ("inputs", [{"step": 0, "rows": {"ids": [1]}, "num_labels": None}], r"inputs\[0\]\.rows\.ids\[0\] is 1"),
    ("inputs", [{"step": 0, "rows": {}, "num_labels": -1}], r"num_labels is -1; it must be an integer .* or null"),
    ("updates.0.clip_factor", "x", r"updates\[0\]\.clip_factor is"),
    ("updates.0.step", 3, r"updates\[0\]\.step is 3"),
    ("calls.0.inputs", [10**6], r"calls\[0\]\.inputs has 1000000"),
    ("calls.0.outputs", [-2], r"calls\[0\]\.outputs\[0\] is -2"),
    ("calls.0.class", 1, r"calls\[0\]\.class is 1"),
    ("calls.0.moves", [["all_reduce"]], r"calls\[0\]\.moves\[0\]"),
    ("tensors", [], "facts of 0 tensors"),
    ("tensors.1", None, r"tensors\[1\] is null; it must be an object"),
    ("tensors.1.what", "outputs", r"tensors\[1\]\.what is .*; it must be one of input, output"),
    ("tensors.1.step", 2, r"tensors\[1\]\.step is 2, and its steps are 2"),
    ("tensors.1.micro_batch", -2, "micro_batch is -2"),
    ("tensors.1.call", 0.5, "call is 0.5"),
    ("tensors.1.leaf", MISSING, r"tensors\[1\]\.leaf is missing"),
    ("tensors.1.dtype", "nope", "dtype is .*nope.*; it must be a floating-point dtype"),
    ("tensors.1.dtype", "int32", "it must be a floating-point dtype"),
    ("tensors.1.dtype", "bfloat16", "is stored as F32"),
    ("tensors.1.shape", [-1], r"shape\[0\] is -1"),
    ("tensors.1.shape", [10**15, 10**15], "shape is"),
    ("tensors.1.shape", [2, 2, 2], "strides are"),
    ("tensors.1.strides", None, "strides is null"),
    ("tensors.1.strides", [3, 1], "strides are .* powers of two"),
    ("tensors.1.layouts", {"tp": []}, r"layouts\.tp is \[\], which is no layout"),
    ("tensors.1.layouts", {"tp": ["V", 9]}, r"layouts\.tp is"),
    ("tensors.1.layouts", {"tp": ["placed", 0, [[[5, 1]]]]}, r"layouts\.tp is"),
    ("tensors.1.layouts", {"tp": "V"}, r"layouts\.tp is .*; it must be a list"),
]


def damage(facts: Any, place: str, value: Any) -> None:
    *outer, last = (int(part) if part.isdigit() else part for part in place.split("."))
    for part in outer:
        facts = facts[part]
    if value is MISSING:
        del facts[last]
    else:
        facts[last] = value


def test_damaged_fields_of_recordings(tmp_path):
    train(Model(), into(tmp_path / "one"))
    path = tmp_path / "one/rank00000.json"
    own = path.read_text()
    for place, value, said in DAMAGE:
        facts = json.loads(own)
        damage(facts, place, value)
        path.write_text(json.dumps(facts))
        with pytest.raises(DataError, match=rf"{re.escape(str(tmp_path / 'one'))}.*{said}"):
            Recording(tmp_path / "one")


def test_files_of_recordings_that_are_none(tmp_path):
    train(Model(), into(tmp_path / "one"))
    facts, tensors = tmp_path / "one/rank00000.json", tmp_path / "one/rank00000.safetensors"
    own = facts.read_text(), load_file(tensors)
    for text, said in (
        (own[0].replace('"rank": 0', '"rank": NaN'), '"rank" is NaN'),
        (own[0].replace('"rank": 0', '"rank": 0, "rank": 0'), '"rank" twice'),
        (own[0].replace('"rank": 0', f'"rank": {"[" * 99}{"]" * 99}'), "nested more than"),
    ):
        facts.write_text(text)
        with pytest.raises(DataError, match=f"one/rank00000.json is no complete recording.*{said}"):
            Recording(tmp_path / "one")
    facts.write_text(own[0])
    for names, said in (({"x": "1.slice"}, "which no recorder writes"), ({"1.0": "1.slice"}, "has 0 and slice stored")):
        save_file(own[1] | {name: own[1][other].clone() for name, other in names.items()}, tensors)
        with pytest.raises(DataError, match=said):
            Recording(tmp_path / "one")
    for path in (tensors, facts):
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(DataError, match="named pipe"):
            Recording(tmp_path / "one")


def test_a_folder_that_may_be_replaced_has_a_recording_alone(tmp_path):
    check_replaceable(tmp_path / "nothing")
    train(Model(), into(tmp_path / "one"))
    check_replaceable(tmp_path / "one")
    (tmp_path / "one/.rank00000.json.shardwise-file-1-2-3.tmp").write_text("half")
    facts = (tmp_path / "one/rank00000.json").read_text()
    (tmp_path / "one/rank00000.json").unlink()
    check_replaceable(tmp_path / "one")
    for name, text in (
        ("rank00000.json", json.dumps(json.loads(facts) | {"version": 99})),
        ("rank00000.json", '{"mine": 1}'),
        ("rank00001.safetensors", "mine"),
        ("thesis.txt", "mine"),
    ):
        (tmp_path / "one" / name).write_text(text)
        with pytest.raises(ConfigError, match=f"one/{name} is not of a recording.*it is not deleted: move it away"):
            check_replaceable(tmp_path / "one")
        (tmp_path / "one" / name).unlink()
    (tmp_path / "one/rank00001.json").symlink_to(tmp_path / "elsewhere.json")
    (tmp_path / "link").symlink_to("one")
    (tmp_path / "file").write_text("mine")
    for name in ("one", "link", "file"):
        with pytest.raises(ConfigError, match="it is not deleted"):
            check_replaceable(tmp_path / name)


@pytest.mark.parametrize("shape", [(512, 3, 64), (500, 513), (70_000,), (300, 2, 16, 16)])
def test_sketches_of_shards_merge_to_that_of_the_tensor(shape):
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for dim in range(len(shape)):
        shards = whole.tensor_split(2, dim)
        reference, *others = alike([Sketch.of(whole), *map(Sketch.of, shards)])
        merged = concatenated(others, dim)
        assert merged.shape == tuple(shape)
        assert merged.views
        assert max(distance(merged, reference).values()) < 1e-4
        cut = shards[0].size(dim)
        reference, *others = alike([Sketch.of(whole), Sketch.of(shards[1]), Sketch.of(shards[0])])
        (turned,) = placed(others, dim, [[[cut, shape[dim]]], [[0, cut]]])
        assert max(distance(turned, reference).values()) < 1e-4
