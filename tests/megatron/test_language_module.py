"""What ``LanguageModule`` offers to a model written for Megatron, which knows no other class of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_bit_equal, assert_close_to, gather_shards

from shardwise import parallel_state, tensor_parallel
from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError, DesyncError, ShardingError, VocabularyError
from shardwise.core.sharding import ParamLayout
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.errors import AssertedConfigError, AssertedShardingError, NotInitializedError
from shardwise.megatron.models.language_module import LanguageModule
from shardwise.megatron.process_groups_config import ProcessGroupCollection

V, H = 103, 12


def config_of(**settings: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=4, num_attention_heads=4, hidden_size=H, params_dtype=torch.float64, init_method_std=0.3, **settings
    )


class Theirs(LanguageModule):
    """As a program for the reference writes it: attributes of its own, and groups from the ambient topology."""

    def __init__(
        self,
        config: TransformerConfig,
        pre_process: bool = True,
        post_process: bool = True,
        share_embeddings_and_output_weights: bool = True,
        vp_stage: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.pre_process = pre_process
        self.post_process = post_process
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.vp_stage = vp_stage
        tp_group = self.pg_collection.tp
        if pre_process:
            self.embedding = torch.nn.Module()
            self.embedding.word_embeddings = tensor_parallel.VocabParallelEmbedding(
                V, H, init_method=config.init_method, config=config, tp_group=tp_group
            )
        self.decoder = torch.nn.Linear(H, H, dtype=torch.float64)
        if post_process:
            self.output_layer = tensor_parallel.ColumnParallelLinear(
                H,
                V,
                config=config,
                init_method=config.init_method,
                skip_weight_param_allocation=pre_process and share_embeddings_and_output_weights,
                tp_group=tp_group,
            )
        if pre_process or post_process:
            self.setup_embeddings_and_output_layer()


def this_stage(tp: int, pp: int, *, tied: bool = True, **settings: Any) -> Theirs:
    """This rank's stage, in the ambient topology; its weights are drawn alike on the ranks of a stage."""
    virtual = settings.get("virtual_pipeline_model_parallel_size")
    parallel_state.initialize_model_parallel(tp, pp, virtual)
    torch.manual_seed(3 + parallel_state.get_pipeline_model_parallel_rank())
    return Theirs(
        config_of(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **settings),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=tied,
    )


@pytest.mark.ranks(2)
def test_ranks_that_hold_other_values_of_a_whole_parameter_hear_of_it_before_the_first_forward(group):
    parallel_state.initialize_model_parallel(2)
    torch.manual_seed(group.rank())
    model = Theirs(config_of(tensor_model_parallel_size=2))
    model.forward = lambda: pytest.fail("the forward is called")
    message = r"parameter 'decoder.bias' and 1 more: rank 1 holds other values than rank 0, and tensor-parallel ranks"
    with pytest.raises(DesyncError, match=message):
        model()
    torch.manual_seed(0)
    model = Theirs(config_of(tensor_model_parallel_size=2))
    model.forward = lambda: "called"
    with CollectiveCounter() as counter:
        assert model() == "called"
    assert counter.launches == []


@pytest.mark.ranks(1, 2)
def test_tied_weights_on_one_stage(group):
    model = this_stage(group.size(), 1)
    weight = model.embedding.word_embeddings.weight
    assert model.shared_embedding_or_output_weight() is weight
    assert model.output_layer.weight is None
    assert weight.is_embedding_or_output_parameter
    # Two layers add to its gradient.
    assert weight.zero_out_wgrad is True
    # One weight is no copy of another.
    assert not hasattr(weight, "shared")
    assert not hasattr(weight, "shared_embedding")
    assert model._is_in_embd_group()
    state = model.sharded_state_dict(prefix="m.")
    assert sorted(state) == [
        "m.decoder.bias",
        "m.decoder.weight",
        "m.embedding.word_embeddings.weight",
        "m.output_layer.bias",
    ]
    assert {name: entry.key for name, entry in state.items()} == {name: name for name in state}
    assert [name for name, entry in sorted(state.items()) if entry.allow_shape_mismatch] == sorted(state)[2:]


@pytest.mark.ranks(2, 4)
def test_tied_weights_over_two_stages(group):
    tp = group.size() // 2
    model = this_stage(tp, 2)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    assert model._is_in_embd_group()
    weight = model.shared_embedding_or_output_weight()
    assert weight is (model.output_layer.weight if stage else model.embedding.word_embeddings.weight)
    assert weight.is_embedding_or_output_parameter
    assert weight.shared_embedding
    assert not hasattr(weight, "zero_out_wgrad")
    assert getattr(weight, "shared", False) == (stage == 1)
    # Both hold what the first stage drew.
    torch.manual_seed(3)
    drawn = tensor_parallel.VocabParallelEmbedding(V, H, init_method=model.config.init_method, config=model.config)
    assert_bit_equal(weight.detach(), drawn.weight.detach(), name="tied weight")
    tied = "embedding.word_embeddings.weight"
    state = model.sharded_state_dict()
    assert sorted(state) == ["decoder.bias", "decoder.weight", tied, *(["output_layer.bias"] if stage else [])]
    assert (state[tied].key, state[tied].allow_shape_mismatch) == (tied, True)
    assert state[tied].data is weight
    whole = gather_shards(state[tied].data, state[tied].layout, parallel_state.get_tensor_model_parallel_group())
    assert whole.shape == (V, H)


@pytest.mark.ranks(4)
def test_a_stage_between_holds_neither(group):
    model = this_stage(1, 4)
    holds = group.rank() in (0, 3)
    assert model._is_in_embd_group() == holds
    assert (model.shared_embedding_or_output_weight() is not None) == holds
    assert ("embedding.word_embeddings.weight" in model.sharded_state_dict()) == holds


@pytest.mark.ranks(2)
def test_of_a_stage_in_chunks_the_first_and_the_last_are_in_the_embedding_group(group):
    parallel_state.initialize_model_parallel(1, 2, 2)
    stage = group.rank()
    config = config_of(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    chunks = [
        Theirs(config, pre_process=(stage, chunk) == (0, 0), post_process=(stage, chunk) == (1, 1), vp_stage=chunk)
        for chunk in (0, 1)
    ]
    assert [chunk._is_in_embd_group() for chunk in chunks] == [stage == 0, stage == 1]
    copies: list[Any] = [None, None]
    dist.all_gather_object(copies, chunks[stage].shared_embedding_or_output_weight().detach(), group=group)
    assert_bit_equal(copies[0], copies[1])
    assert copies[0].any()


@pytest.mark.ranks(2)
def test_weights_that_are_not_tied(group):
    model = this_stage(1, 2, tied=False)
    assert model.shared_embedding_or_output_weight() is None
    weight = model.embedding.word_embeddings.weight if group.rank() == 0 else model.output_layer.weight
    assert weight.is_embedding_or_output_parameter
    assert not hasattr(weight, "shared_embedding")
    assert not hasattr(weight, "zero_out_wgrad")
    assert ("output_layer.weight" in model.sharded_state_dict()) == (group.rank() == 1)
    copies: list[Any] = [None, None]
    dist.all_gather_object(copies, weight.detach(), group=group)
    assert not torch.equal(*copies)


@pytest.mark.ranks(4)
def test_an_embedding_group_with_a_stage_that_holds_nothing_is_refused(group):
    parallel_state.initialize_model_parallel(1, 4, get_embedding_ranks=lambda ranks: [ranks[0], ranks[1], ranks[3]])
    first, last = group.rank() == 0, group.rank() == 3
    if first or last:
        with pytest.raises(
            ConfigError, match=r"group has ranks \[0, 1, 3\], and of the stages \[0, 1, 2, 3\] the first"
        ):
            Theirs(config_of(pipeline_model_parallel_size=4), pre_process=first, post_process=last)


@pytest.mark.ranks(2)
def test_tying_a_state_dict(group):
    parallel_state.initialize_model_parallel(1, 2)
    names = {"output_layer_weight_key": "out", "first_stage_word_emb_key": "emb"}
    stage = group.rank()
    model = Theirs(config_of(pipeline_model_parallel_size=2), pre_process=stage == 0, post_process=stage == 1)
    entry = next(iter(model.sharded_state_dict().values()))
    other: dict[str, Any] = {"else": entry}
    if stage == 0:
        model.tie_embeddings_and_output_weights_state_dict(other, **names)
        assert other == {"else": entry}
        with pytest.raises(AssertedShardingError, match="'out' is in the state of a stage without output layer"):
            model.tie_embeddings_and_output_weights_state_dict({"out": entry}, **names)
        return
    with pytest.raises(ShardingError, match="'out' is not in the state of the last stage"):
        model.tie_embeddings_and_output_weights_state_dict(other, **names)
    own = type(entry)("out", model.output_layer.weight, ParamLayout.split((V, H), 0, 1), 0)
    state = {"out": own}
    model.tie_embeddings_and_output_weights_state_dict(state, **names, metadata={})
    assert list(state) == ["emb"]
    assert (state["emb"].key, state["emb"].data) == ("emb", own.data)


@pytest.mark.ranks(1, 2)
def test_losses_are_the_dense_ones(group):
    model = this_stage(group.size(), 1, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="linear")
    model.vocab_size = V
    weight = model.embedding.word_embeddings.weight
    whole = gather_shards(weight, ParamLayout.split((V, H), 0, group.size()), group)
    hidden = torch.randn(5, 3, H, dtype=torch.float64)
    labels = torch.randint(V, (3, 5))
    labels[1, 4] = -100
    logits = (hidden @ whole.T).transpose(0, 1)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(3, 5)
    local = (hidden @ weight.T).detach()
    assert_close_to(model.compute_language_model_loss(labels, local), expected, rtol_of_norm=1e-13)
    fused = model.compute_output_layer_and_language_model_loss
    assert_close_to(fused(hidden, labels, weight).detach(), expected, rtol_of_norm=1e-13)
    mean = fused(hidden, labels, weight, reduction="mean", ignore_index=-100)
    assert_close_to(mean.detach(), expected.sum() / 14, rtol_of_norm=1e-13)
    bias = torch.randn(weight.size(0), dtype=torch.float64)
    with_bias = model.compute_language_model_loss(labels, local + bias)
    assert_close_to(fused(hidden, labels, weight, bias=bias).detach(), with_bias, rtol_of_norm=1e-13)
    # By the output layer, as the config asks.
    model.config.cross_entropy_loss_fusion = False
    separate = {"column_parallel_linear": model.output_layer, "col_linear_kwargs": {"weight": weight}}
    assert_close_to(fused(hidden, labels, **separate).detach(), expected, rtol_of_norm=1e-13)
    with pytest.raises(ConfigError, match="reduction='sum' and ignore_index=-100 need output layer and loss in one"):
        fused(hidden, labels, **separate, reduction="sum")
    with pytest.raises(AssertedConfigError, match="need the output layer's weight; pass it"):
        fused(hidden, labels)
    with pytest.raises(VocabularyError, match=f"{V} "):
        model.compute_language_model_loss(labels.clamp(min=V), local)


@pytest.mark.ranks(1)
def test_groups_and_backends_that_are_not_there(group):
    with pytest.raises(NotInitializedError, match="model parallelism is not initialised"):
        LanguageModule(config_of())
    groups = ProcessGroupCollection(tp=group)
    module = LanguageModule(config_of(), groups)
    assert (module.pp_group, module.embd_group, module._is_in_embd_group()) == (None, None, False)
    module._set_attention_backend()
    module.config.attention_backend = "fused"
    with pytest.raises(ConfigError, match="attention_backend 'fused' does not work on cpu"):
        module._set_attention_backend()
    with pytest.raises(ConfigError, match="attention_backend 'fused' does not work on cpu"):
        LanguageModule(config_of(attention_backend="fused"), groups)
