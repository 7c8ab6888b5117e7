"""A program of Megatron that cuts its batches for context-parallel ranks trains as on one rank."""

import pytest
import torch
from harness.model_options import NO_DROPOUT
from harness.parity import assert_close_to

from shardwise import parallel_state
from shardwise.core.errors import ConfigError, ShardingError
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.distributed import DistributedDataParallel, DistributedDataParallelConfig
from shardwise.megatron.layer_specs import get_gpt_layer_local_spec
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.moe import MoELayer
from shardwise.megatron.packed_seq_params import PackedSeqParams
from shardwise.megatron.process_groups_config import ProcessGroupCollection
from shardwise.megatron.schedules import get_forward_backward_func
from shardwise.megatron.utils import get_batch_on_this_cp_rank

V, S = 23, 12


def make_gpt(cp=1, way=None, *, pg_collection=None, **settings):
    torch.manual_seed(3)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=12,
        num_attention_heads=4,
        **NO_DROPOUT,
        params_dtype=torch.float64,
        context_parallel_size=cp,
        cp_comm_type=way,
        **settings,
    )
    options = {"position_embedding_type": "rope", "pg_collection": pg_collection}
    spec = get_gpt_layer_local_spec(settings.get("num_moe_experts"))
    return GPTModel(config, spec, V, S, **options)


def batch_of(number):
    tokens = torch.randint(V, (2, S), generator=torch.Generator().manual_seed(number))
    forbidden = torch.ones(S, S, dtype=torch.bool).triu(1).expand(2, 1, S, S).clone()
    # A document ends at the fifth position.
    forbidden[:, :, 5:, :5] = True
    positions = torch.arange(S).expand(2, S)
    return {"tokens": tokens, "labels": tokens.roll(-1, 1), "attention_mask": forbidden, "position_ids": positions}


def loss_of(model, batch):
    arguments = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    return model(*arguments, labels=batch["labels"])


def two_micro_batches(forward_step, model, **options):
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=map(batch_of, range(2)),
        model=model,
        num_microbatches=2,
        seq_length=S,
        micro_batch_size=2,
        **options,
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["a2a", "all_gather", None])
def test_a_step_is_that_of_one_rank(group, way):
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    plain = make_gpt()
    expected = sum(loss_of(plain, batch_of(number)).mean() / 2 for number in range(2))
    expected.backward()
    model = make_gpt(2, way)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)

    def forward_step(batches, model):
        losses = loss_of(model, get_batch_on_this_cp_rank(next(batches)))
        assert losses.shape == (2, S // 2)
        # Divided by the number of labels of all ranks that share the samples.
        return losses, lambda losses: (losses.sum() / (2 * S), losses.detach().sum() / (2 * S))

    results = two_micro_batches(forward_step, wrapped)
    wrapped.finish_grad_sync()
    mean = torch.stack(results).mean()
    torch.distributed.all_reduce(mean, group=group)
    assert_close_to(mean, expected.detach(), rtol_of_norm=1e-12)
    for (name, param), own in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert_close_to(own.main_grad, param.grad, rtol_of_norm=1e-10, name=name)


EXPERTS = {"num_moe_experts": 4, "add_bias_linear": False, "moe_router_topk": 2}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("balance", [{"moe_z_loss_coeff": 0.1}, {"moe_aux_loss_coeff": 0.1}], ids=str)
def test_losses_of_experts_are_those_of_one_rank(group, balance):
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    alone = ProcessGroupCollection(
        **dict.fromkeys(("tp", "cp", "pp"), parallel_state.get_pipeline_model_parallel_group())
    )
    found = []
    for cp, collection in ((1, alone), (2, None)):
        torch.manual_seed(3)
        model = make_gpt(cp, None if cp == 1 else "all_gather", pg_collection=collection, **EXPERTS, **balance)
        trained = model
        if cp > 1:
            trained = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)

        def forward_step(batches, model, cp=cp):
            batch = next(batches)
            losses = loss_of(model, batch if cp == 1 else get_batch_on_this_cp_rank(batch))
            # The loss of the tokens has no gradient, so that those of the experts are compared.
            return losses, lambda losses: (0.0 * losses.sum(), losses.detach().sum())

        two_micro_batches(forward_step, trained, pg_collection=collection)
        if cp > 1:
            trained.finish_grad_sync()
        found.append({name: getattr(param, "main_grad", param.grad) for name, param in model.named_parameters()})
    of_routers = [name for name in found[0] if "router" in name]
    assert len(of_routers) == 2
    for name in of_routers:
        assert found[0][name].norm() > 1e-3
        assert_close_to(found[1][name], found[0][name], rtol_of_norm=1e-10, name=name)


class Own(torch.nn.Module):
    """A program's own model."""

    def __init__(self, config, **options):
        super().__init__()
        self.config, self.layer = config, MoELayer(config, **options)

    def set_input_tensor(self, tensor):
        assert tensor is None

    def forward(self, hidden):
        return self.layer(hidden)[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shares", [True, False])
def test_losses_of_a_layer_are_multiplied_by_the_ranks_that_share_its_positions(group, shares):
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    collection = None if shares else ProcessGroupCollection(tp=parallel_state.get_pipeline_model_parallel_group())
    config = make_gpt(2, "all_gather", moe_aux_loss_coeff=0.1, **EXPERTS).config
    model = Own(config, pg_collection=collection)

    def forward_step(batches, model):
        next(batches)
        hidden = torch.randn(S // 2, 2, config.hidden_size, dtype=config.params_dtype)
        return model(hidden), lambda output: (output.sum(), None)

    two_micro_batches(forward_step, model)
    assert model.layer.loss_scale == (1.0 if shares else 0.5)


@pytest.mark.ranks(2)
def test_what_a_program_gets_wrong(group):
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    # As Megatron deals positions: the first and the last quarter, or those between.
    own = get_batch_on_this_cp_rank({"tokens": torch.arange(S)[None], "labels": None})
    places = [0, 1, 2, 9, 10, 11] if group.rank() == 0 else [3, 4, 5, 6, 7, 8]
    assert own["tokens"].tolist() == [places]
    assert own["labels"] is None
    with pytest.raises(AssertionError, match="tokens has 10 positions along dimension 1, which 4 does not divide"):
        get_batch_on_this_cp_rank({"tokens": torch.zeros(2, 10)})
    with pytest.raises(ConfigError, match=r"context_parallel_size of the config is 4, and the .* group has 2 ranks"):
        make_gpt(4)
    model = make_gpt(2)
    with pytest.raises(ShardingError, match=r"\[2, 5\] does not have two runs .*; cut batches with get_batch_on"):
        model(torch.zeros(2, 5, dtype=torch.int64))
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 4, 6]))
    with pytest.raises(ConfigError, match=r"packed_seq_params describes a row .*; give document_ids"):
        model(torch.zeros(1, 6, dtype=torch.int64), packed_seq_params=packed)
