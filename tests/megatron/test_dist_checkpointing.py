"""Megatron's save and load: plain values and tensors come back at any layout, and other libraries' folders are told."""

import copy
import logging
from collections import namedtuple

import pytest
import torch
from harness.parity import assert_bit_equal

from shardwise.core.errors import CheckpointError, ConfigError, ShardingError
from shardwise.core.topology import Topology
from shardwise.megatron.core import sharded_entries
from shardwise.megatron.core.checkpoint_strategies import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
    TorchDistSaveShardedStrategy,
)
from shardwise.megatron.core.optimizer import _shards_in
from shardwise.megatron.core.state_dicts import (
    dict_list_map_inplace,
    dict_list_map_outplace,
    diff,
    extract_matching_values,
    nested_values,
)
from shardwise.megatron.dist_checkpointing import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    StrictHandling,
    check_is_distributed_checkpoint,
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_tensors_metadata,
    save,
)
from shardwise.storage import checkpoint
from shardwise.storage.checkpoint.folder import remove_unless_held

WHOLE = torch.arange(24.0).view(3, 8)


def shard(rank, size, data):
    part = WHOLE.view(3, size, 8 // size)[:, rank].clone()
    return ShardedTensor.from_rank_offsets("w", part if data else torch.zeros_like(part), (1, rank, size))


@pytest.mark.ranks(2)
def test_a_state_comes_back_at_another_layout(group, tmp_path):
    folder = tmp_path / "ckpt"
    bias = ShardedTensor.from_rank_offsets("b", torch.ones(2) * 3)
    stacked = ShardedTensor.from_rank_offsets(
        "layers", torch.full((2,), 1.0 + group.rank()), (0, group.rank(), 2), prepend_axis_num=1
    )
    state = {
        "model": {"w": shard(group.rank(), 2, True), "b": bias, "layers": stacked},
        "iteration": 7,
        "schedule": [{"lr": 0.5}, "cosine"],
        "own": LocalNonpersistentObject(object()),
    }
    for _ in range(2):
        # A second one takes the first's place.
        save(state, folder, content_metadata={"of": "a test"})
    assert check_is_distributed_checkpoint(folder)
    assert not check_is_distributed_checkpoint(tmp_path)
    assert load_common_state_dict(folder)["iteration"] == 7
    assert load_content_metadata(folder) == {"of": "a test"}
    # On each rank alone.
    alone, own = Topology.create(tp=1), object()
    wanted = {"model": {"w": shard(0, 1, False)}, "own": LocalNonpersistentObject(own)}
    loaded = load(wanted, folder, process_group=alone.group("tp"))
    assert_bit_equal(loaded["model"]["w"], WHOLE)
    assert (loaded["iteration"], loaded["schedule"], loaded["own"]) == (7, [{"lr": 0.5}, "cosine"], own)
    with pytest.raises(CheckpointError, match="of another model"):
        load(wanted, folder, strict="raise_all", process_group=alone.group("tp"))


@pytest.mark.ranks(1)
def test_no_process_deletes_what_is_being_loaded(group, tmp_path, monkeypatch):
    save({"w": shard(0, 1, True), "iteration": 7}, tmp_path)
    for name, read in (
        ("load", lambda: load({"w": shard(0, 1, False)}, tmp_path)),
        ("read_meta", lambda: load_common_state_dict(tmp_path)),
    ):
        own = getattr(checkpoint, name)

        def after_a_removal(path, *args, own=own, **options):
            remove_unless_held(path)
            return own(path, *args, **options)

        monkeypatch.setattr(checkpoint, name, after_a_removal)
        assert read()["iteration"] == 7


@pytest.mark.ranks(4)
def test_parts_are_boxes_of_any_axes_and_sizes(group, tmp_path):
    """Two axes that are cut, parts of unequal sizes by Megatron's constructor, and a part without elements."""
    rank = group.rank()
    tall, wide = divmod(rank, 2)
    tile = WHOLE[:2, 4 * wide : 4 * wide + 4][tall : tall + 1]
    sizes, starts = (3, 0, 7, 1), (0, 3, 3, 10)
    line = torch.arange(11.0)[starts[rank] : starts[rank] + sizes[rank]]
    state = {
        "tile": ShardedTensor.from_rank_offsets("tile", tile, (0, tall, 2), (1, wide, 2), replica_id=3),
        "line": ShardedTensor("line", line, line.dtype, line.shape, (11,), (starts[rank],), None),
        "deep": ShardedTensor.from_rank_offsets("deep", tile, (0, tall, 2), (2, wide, 2), prepend_axis_num=1),
    }
    assert (state["tile"].global_offset, state["tile"].global_shape) == ((tall, 4 * wide), (2, 8))
    assert (state["tile"].local_shape, state["tile"].axis_fragmentations) == ((1, 4), (2, 2))
    assert (state["deep"].global_shape, state["tile"].replica_id, state["deep"].prepend_axis_num) == ((2, 1, 8), 3, 1)
    save(state, tmp_path)
    wanted = {
        "tile": ShardedTensor.from_rank_offsets("tile", torch.zeros(2, 8)),
        "line": ShardedTensor.from_rank_offsets("line", torch.zeros(11)),
        "deep": ShardedTensor.from_rank_offsets("deep", torch.zeros(1, 8), (0, 1, 2), prepend_axis_num=1),
    }
    found = load(wanted, tmp_path)
    assert_bit_equal(found["tile"], WHOLE[:2])
    assert_bit_equal(found["line"], torch.arange(11.0))
    assert_bit_equal(found["deep"], WHOLE[1:2])
    for offsets, options in (
        ([(0, 2, 2)], {}),
        ([(2, 0, 1)], {}),
        ([(0, 0, 2)] * 2, {}),
        ([], {"prepend_axis_num": 1}),
    ):
        with pytest.raises(ShardingError, match="line: "):
            ShardedTensor.from_rank_offsets("line", line, *offsets, **options)


@pytest.mark.ranks(2)
def test_strict_says_what_becomes_of_tensors_that_one_side_has(group, tmp_path):
    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("shardwise.megatron.core.dist_checkpointing").addHandler(handler)
    only, some = (ShardedTensor.from_rank_offsets(name, torch.ones(2)) for name in ("only", "some"))
    save({"w": shard(group.rank(), 2, True), "only": only, "some": some}, tmp_path)
    extra = ShardedTensor.from_rank_offsets("extra", torch.zeros(3))

    def wanted():
        # "extra" and "some" on rank 1 alone.
        return {"w": shard(group.rank(), 2, False), "in": {"a": [extra, some][: 2 * group.rank()], "b": 5}}

    unexpected = {"extra"} if group.rank() else set()
    for strict in StrictHandling:
        texts.clear()
        if strict.name in ("ASSUME_OK_UNEXPECTED", "RAISE_UNEXPECTED", "RAISE_ALL"):
            with pytest.raises(CheckpointError, match="extra"):
                load(wanted(), tmp_path, strict=strict)
            continue
        found = load(wanted(), tmp_path, strict=strict)
        if strict.name.startswith("RETURN"):
            found, *names = found
            assert names == [{"only"} if strict.name == "RETURN_ALL" else set(), unexpected]
        assert_bit_equal(found["w"], shard(group.rank(), 2, True).data)
        assert "extra" not in str(found)
        logged = {"Unexpected": unexpected if "LOG" in strict.name else (), "Missing": strict.name == "LOG_ALL"}
        assert {what: what in str(texts) for what in logged} == {what: bool(keys) for what, keys in logged.items()}
    assert load({"w": shard(group.rank(), 2, False)}, tmp_path, strict="raise_unexpected").keys() == {"w"}
    with pytest.raises(CheckpointError, match="'only'"):
        load({"w": shard(group.rank(), 2, False)}, tmp_path, strict="raise_all")
    with pytest.raises(CheckpointError, match="only"):
        load({"only": ShardedTensor.from_rank_offsets("only", torch.zeros(3))}, tmp_path)
    lenient = ShardedTensor.from_rank_offsets("only", torch.zeros(3), allow_shape_mismatch=True)
    assert load({"only": lenient}, tmp_path)["only"].tolist() == [1.0, 1.0, 0.0]


@pytest.mark.ranks(2)
def test_factories_are_stored_as_what_they_build(group, tmp_path):
    """The halves of a gated weight, each cut over the ranks; a rank alone reads the weight of one rank."""
    gate, up = torch.arange(8.0).view(4, 2), 100 + torch.arange(8.0).view(4, 2)

    def entry(rank, size, data):
        def build(key, tensor, replica_id, flattened_range):
            assert (replica_id, flattened_range) == ((0, 5), None)
            return [
                ShardedTensor.from_rank_offsets(key, half, (0, rank + i * size, 2 * size))
                for i, half in enumerate(tensor.chunk(2))
            ]

        part = torch.cat([half.chunk(size)[rank] for half in (gate, up)])
        return ShardedTensorFactory("fc1", part if data else torch.zeros_like(part), build, torch.cat, (0, 5))

    save({"mlp": {"fc1": entry(group.rank(), 2, True)}, "step": 3}, tmp_path)
    alone = Topology.create(tp=1).group("tp")
    found = load({"mlp": {"fc1": entry(0, 1, False)}}, tmp_path, process_group=alone)
    assert_bit_equal(found["mlp"]["fc1"], torch.cat([gate, up]))
    assert found["step"] == 3
    with pytest.raises(ConfigError, match="'fc1' is a ShardedTensorFactory, whose optimizer state has no entries"):
        _shards_in({"a": [entry(0, 1, True)]})
    # As programs do it themselves.
    state = {"a": [entry(0, 1, True)]}
    sharded_entries.apply_prefix_mapping(state, {"fc": "new."})
    sharded_entries.apply_factories(state)
    assert [part.key for part in state["a"][0]] == ["new.1"] * 2
    loaded = {"a": [[part.data for part in state["a"][0]]]}
    assert_bit_equal(
        sharded_entries.apply_factory_merges(loaded, {"a": [entry(0, 1, True)]})["a"][0], torch.cat([gate, up])
    )
    with pytest.raises(CheckpointError, match=r"nothing at \['a', 0\], where a factory"):
        sharded_entries.apply_factory_merges({"a": []}, {"a": [entry(0, 1, True)]})


@pytest.mark.ranks(2)
def test_strategies_change_nothing_and_entries_come_from_a_folder(group, tmp_path):
    wrapped = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"), group)
    save({"w": shard(group.rank(), 2, True)}, tmp_path, TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=2))
    save({"w": shard(group.rank(), 2, True)}, tmp_path, wrapped)
    entries = load_tensors_metadata(tmp_path)
    assert {name: (entry.global_shape, entry.dtype) for name, entry in entries.items()} == {"w": ((3, 8), WHOLE.dtype)}
    strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(tmp_path), group)
    assert_bit_equal(load(entries, tmp_path, strategy)["w"], WHOLE)
    with pytest.raises(ConfigError, match="backend is 'zarr'; give 'torch_dist'"):
        get_default_save_sharded_strategy("zarr")
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        get_default_load_sharded_strategy(tmp_path / "other")


def test_states_are_mapped_divided_and_compared():
    state = {"a": [1, {"b": 2, "c": []}], "d": {"e": 4, 7: "x"}, "f": {}}
    assert dict_list_map_outplace(str, state) == {"a": ["1", {"b": "2", "c": []}], "d": {"e": "4", 7: "x"}, "f": {}}
    assert state["a"][0] == 1
    doubled = copy.deepcopy(state)
    assert dict_list_map_inplace(lambda value: 2 * value, doubled) is doubled
    assert doubled == {"a": [2, {"b": 4, "c": []}], "d": {"e": 8, 7: "xx"}, "f": {}}
    assert [*nested_values(state)] == [1, 2, 4, "x"]
    is_even = lambda value: value in (2, 4)  # noqa: E731
    found, rest = extract_matching_values(state, is_even)
    assert (found, rest) == ({"a": [{"b": 2}], "d": {"e": 4}}, {"a": [1, {"c": []}], "d": {7: "x"}, "f": {}})
    assert extract_matching_values(state, is_even, return_lists_as_dicts=True)[0]["a"] == {1: {"b": 2}}
    other = {"a": [1, {"b": 3, "c": [0]}], "d": {"e": torch.ones(2)}, "g": 1}
    assert diff(state, other)[0] == [("f",), ("d", 7)]
    assert sorted(diff(state, other)[1]) == [("a", 1, "c", 0), ("g",)]
    assert sorted(diff(state, other)[2]) == [(("a", 1, "b"), int, int), (("d", "e"), int, torch.Tensor)]
    tensors = [{"w": torch.ones(2)}, {"w": torch.ones(2)}, {"w": torch.ones(3)}, {"w": 2 * torch.ones(2)}]
    assert [len(diff(tensors[0], each)[2]) for each in tensors] == [0, 0, 1, 1]
    with pytest.raises(ConfigError, match="got a int; give a dict or a list"):
        extract_matching_values(3, is_even)
    entries = [ShardedTensor.from_rank_offsets(key, torch.ones(1)) for key in ("a.b.c", "a.d", "e")]
    sharded_entries.apply_prefix_mapping(entries, {"a.": "x.", "a.b.": "y.", "e": ""})
    assert [entry.key for entry in entries] == ["x.b.c", "x.d", ""]


PLAIN = {
    "by_rank": {0: "a", 1: {2: (3,)}},
    "shape": (2, (3, [4, (5, None)])),
    "pair": {(1, "x"): 1.5, None: True, 2.5: {}},
    "empty": ((), [], {}),
    "looks alike": {"__tuple__": [1], "__items__": [[1, 2]]},
    "text": {"0": 1, "1": [2]},
}


@pytest.mark.ranks(2)
def test_plain_values_come_back_as_they_are(group, tmp_path):
    """At the top, next to tensors, and in the metadata; keys of numbers also lead to tensors."""
    state = {**PLAIN, 7: {"w": shard(group.rank(), 2, True), "of": (1, {3: 4})}}
    state["mixed"] = (1, ShardedTensor.from_rank_offsets("b", torch.ones(2)), {5: "c"})
    save(state, tmp_path, content_metadata=PLAIN)

    def same(found, saved):
        assert type(found) is type(saved)
        assert found == saved

    same(load_content_metadata(tmp_path), PLAIN)
    common = load_common_state_dict(tmp_path)
    same(load_content_metadata(preloaded_state_dict=common), PLAIN)
    with pytest.raises(ConfigError, match="needs checkpoint_dir or preloaded_state_dict"):
        load_content_metadata()
    same({key: common[key] for key in PLAIN}, PLAIN)
    assert [*map(type, common["pair"])] == [tuple, type(None), float]
    wanted = {7: {"w": shard(group.rank(), 2, False)}}
    wanted["mixed"] = (0, ShardedTensor.from_rank_offsets("b", torch.zeros(2)), {})
    found = load(wanted, tmp_path)
    same({key: found[key] for key in PLAIN}, PLAIN)
    same(found[7]["of"], (1, {3: 4}))
    assert_bit_equal(found[7]["w"], shard(group.rank(), 2, True).data)
    first, tensor, last = found["mixed"]
    assert (first, tensor.tolist(), last, type(found["mixed"])) == (1, [1.0, 1.0], {5: "c"}, tuple)


@pytest.mark.ranks(2)
def test_plain_values_that_differ_between_ranks_are_an_error_on_all(group, tmp_path):
    rank, own = group.rank(), shard(group.rank(), 2, True)
    start = "ranks disagree on a plain value of the state, and one value is stored: "
    for values, message in (
        ({"number": rank}, r"'number' is 0 on rank 0 and 1 on rank 1; leave it out"),
        ({"deep": [{"a": (1, rank)}]}, r"'deep\.0\.a\.1' is 0 on rank 0 and 1 on rank 1"),
        ({"keys": {rank: 1}}, r"'keys\.\[0\]' is 1 on rank 0 and no value on rank 1"),
        ({"only": 1} if rank else {}, r"'only' is no value on rank 0 and 1 on rank 1"),
        ({"in": {"only": 1} if rank else {}}, r"'in\.only' is no value on rank 0 and 1 on rank 1"),
        ({"kind": True if rank else 1}, r"'kind' is 1 on rank 0 and True on rank 1"),
    ):
        for given in ({"sharded_state_dict": values | {"w": own}}, {"content_metadata": values}):
            prefix = "content_metadata." if "content_metadata" in given else ""
            if prefix and not values:
                given = {"content_metadata": {}}
            with pytest.raises(CheckpointError, match=start + message.replace("'", f"'{prefix}", 1)):
                save(**{"sharded_state_dict": {"w": own}, "checkpoint_dir": tmp_path} | given)
    assert list(tmp_path.iterdir()) == []
    # Tensors, values of a rank alone, and what the program leaves out may differ.
    values = {"own": LocalNonpersistentObject(rank), "at": [own, None] if rank else [None, own], "args": {"rank": rank}}
    keep = lambda common: {key: value for key, value in common.items() if key != "args"}  # noqa: E731
    save(values, tmp_path, preprocess_common_before_consistancy_check=keep)
    assert load_common_state_dict(tmp_path)["args"] == {"rank": 0}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("metadata.json", "Megatron"),
        (".metadata", "torch.distributed.checkpoint"),
        ("model.safetensors", "Hugging Face"),
    ],
)
def test_a_folder_of_another_library_is_told_on_every_rank(group, tmp_path, name, library):
    (tmp_path / name).touch()
    for act in (load, save):
        with pytest.raises(CheckpointError, match=f"holds a checkpoint of {library}"):
            act({"w": shard(group.rank(), 2, True)}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


NamedPair = namedtuple("NamedPair", "x y")


@pytest.mark.ranks(2)
def test_what_cannot_be_stored_is_told_on_every_rank(group, tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        load({}, tmp_path)
    # On one rank alone.
    state = {"w": shard(group.rank(), 2, True), "rng": {"cuda": object() if group.rank() else 1}}
    with pytest.raises(CheckpointError, match=r"'rng\.cuda' is a object; give tensors as ShardedTensor"):
        save(state, tmp_path)
    with pytest.raises(CheckpointError, match="'w' is a Tensor"):
        save({"w": torch.ones(2)}, tmp_path)
    for content in ({"w": state["w"]}, {"a": {1: object()}}):
        with pytest.raises(CheckpointError, match=r"content_metadata\.(w' is a tensor|a\.1' is a object); give"):
            save({}, tmp_path, content_metadata=content)
    # It would come back as a plain tuple.
    pair = NamedPair(1, 2)
    with pytest.raises(CheckpointError, match=r"'in\.0' is a NamedPair; give"):
        save({"in": [pair]}, tmp_path)
    with pytest.raises(CheckpointError, match=r"'content_metadata\.in' is a NamedPair; give"):
        save({}, tmp_path, content_metadata={"in": pair})
    with pytest.raises(CheckpointError, match="'a key of by' is a frozenset; give"):
        save({"by": {frozenset(): 1}}, tmp_path)
    twice = {"a.w": shard(group.rank(), 2, True), "a": {"w": shard(group.rank(), 2, True)}}
    with pytest.raises(CheckpointError, match=r"two tensors of the path 'a\.w'; rename a key"):
        save(twice, tmp_path)
    with pytest.raises(ConfigError, match="async_sharded_save is True"):
        save({}, tmp_path, async_sharded_save=True)
    with pytest.raises(ConfigError, match="strict is 'log'; it must be one of assume_ok_unexpected"):
        load({}, tmp_path, strict="log")
    with pytest.raises(ConfigError, match="'rng' would be stored pickled"):
        ShardedObject("rng", object(), (1,), (0,))
    assert list(tmp_path.iterdir()) == []
