r"""Makes the checkpoints of this folder, and ``expected.json``, on a CPU: Megatron's own models, optimizer and writer.

    pip install --no-deps --target REFERENCE megatron-core==0.16.1
    sed -i -e "s/device='cuda'/device='cpu'/" -e 's/device="cuda"/device="cpu"/' -e 's/\.cuda()/.cpu()/' \
        -e 's/torch\.cuda\.FloatTensor/torch.FloatTensor/' \
        $(find REFERENCE/megatron/core -name '*.py')
    PYTHONPATH=REFERENCE python tests/data/megatron/make.py

The second command is all that changes in Megatron's files; ``on_cpu`` replaces three functions, compiles none, and
names what is missing without Transformer Engine.
Tests do not need Megatron: they compare with the files that this script leaves in its folder.

    PYTHONPATH=REFERENCE python tests/data/megatron/make.py llama --load FOLDER

loads what ``shardwise export-megatron`` wrote of an import of ``llama``, and compares the logits.

- ``dense``: GPT-2's options, tp 2 x pp 2, ``torch_dist`` with stacked keys, ``dp_reshardable`` optimizer state;
- ``llama``: rotary positions, RMSNorm, gated, two key-value heads, tp 2 x pp 2, ``torch_dist`` with stacked keys;
- ``llama_ranks``: the same model, ``mp_rank_XX_YYY/model_optim_rng.pt``;
- ``llama_newer``: ``llama`` as megatron-core 0.19.2 writes it (its wheel, for Python 3.12, ran on 3.11; ``make.py
  llama`` in another folder), without ``common.pt``: its content is an item of the ``.distcp`` files;
- ``experts``: four experts, tp 2 x pp 2 x ep 2, ``torch_dist`` with a key for each layer, expert and half;
- ``experts_ranks``: four experts, pp 2 x ep 2, ``mp_rank_XX_YYY_ZZZ/model_optim_rng.pt``.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HERE = Path(__file__).parent
STEP = 2
BATCH, LENGTH = 4, 12

SIZES = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "kv_channels": 4, "ffn_hidden_size": 24}
LLAMA = {
    **SIZES,
    "group_query_attention": True,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "rotary_base": 1000,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
EXPERTS = {
    **LLAMA,
    "num_layers": 2,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 12,
    "moe_router_pre_softmax": False,
    "expert_tensor_parallel_size": 1,
    "expert_model_parallel_size": 2,
}
CASES = {
    "dense": ("torch_dist", {**SIZES, "num_layers": 2, "tensor_model_parallel_size": 2}),
    "llama": ("torch_dist", {**LLAMA, "tensor_model_parallel_size": 2}),
    "llama_ranks": ("ranks", {**LLAMA, "tensor_model_parallel_size": 2}),
    "experts": ("single", {**EXPERTS, "tensor_model_parallel_size": 2}),
    "experts_ranks": ("ranks", EXPERTS),
}
# Names and defaults of Megatron-LM's arguments.
DEFAULTS = {
    "group_query_attention": False,
    "num_query_groups": 1,
    "position_embedding_type": "learned_absolute",
    "max_position_embeddings": 16,
    "seq_length": LENGTH,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "apply_layernorm_1p": False,
    "apply_residual_connection_post_layernorm": False,
    "qk_layernorm": False,
    "swiglu": False,
    "squared_relu": False,
    "openai_gelu": False,
    "bias_gelu_fusion": True,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "init_method_std": 0.2,
    "vocab_size": 60,
    "padded_vocab_size": 64,
    "make_vocab_size_divisible_by": 32,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": None,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "context_parallel_size": 1,
    "num_experts": None,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": None,
    "moe_layer_freq": 1,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_grouped_gemm": False,
    "multi_latent_attention": False,
    "mtp_num_layers": None,
    "transformer_impl": "local",
    "use_distributed_optimizer": False,
    "params_dtype": torch.float32,
    "optimizer": "adam",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "weight_decay": 0.1,
    "lr": 0.01,
    "clip_grad": 1.0,
    "iteration": STEP,
    "world_size": 4,
    "exit_signal": signal.SIGTERM,
}


def on_cpu() -> None:
    """Replace what needs a GPU: the current device, waiting for it, and the streams of its random numbers."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args: None
    torch._dynamo.config.disable = True
    moe_utils.te_general_gemm = None
    CudaRNGStatesTracker.fork = lambda *args: contextlib.nullcontext()


def ids_of(step: int) -> torch.Tensor:
    """Return the tokens of a step, and one more of each sequence."""
    return torch.randint(0, 60, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def arguments_of(case: str) -> argparse.Namespace:
    from megatron.core.transformer.enums import AttnBackend

    args = argparse.Namespace(**{**DEFAULTS, "attention_backend": AttnBackend.unfused, **CASES[case][1]})
    args.use_distributed_optimizer = case == "dense"
    return args


def model_of(args: argparse.Namespace):
    import torch.nn.functional as F
    from megatron.core import parallel_state as state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = TransformerConfig.__dataclass_fields__
    fields = {name: value for name, value in vars(args).items() if name in names and value is not None}
    del fields["init_method_std"]
    config = TransformerConfig(
        **{**fields, "num_query_groups": args.num_query_groups if args.group_query_attention else None},
        num_moe_experts=args.num_experts,
        init_method=lambda weight: torch.nn.init.normal_(weight, std=args.init_method_std),
        output_layer_init_method=lambda weight: torch.nn.init.normal_(weight, std=args.init_method_std),
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else F.gelu,
        bias_activation_fusion=args.bias_gelu_fusion and not args.swiglu,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        moe_token_dispatcher_type="allgather",
    )
    spec = get_gpt_layer_local_spec(args.num_experts, normalization=args.normalization)
    if args.num_experts is not None:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization)
    model = GPTModel(
        config,
        spec,
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=state.is_pipeline_first_stage(),
        post_process=state.is_pipeline_last_stage(),
        parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
    )
    # Norms and biases that begin at 1 and 0 would hide that they were not read.
    generator = torch.Generator().manual_seed(17)
    for name, weight in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            whole = torch.randn(4 * weight.numel(), generator=generator)
            shard = state.get_tensor_model_parallel_rank() if getattr(weight, "tensor_model_parallel", False) else 0
            weight.data += 0.1 * whole[shard * weight.numel() :][: weight.numel()]
    return config, model


def forward(model, config, ids: torch.Tensor) -> torch.Tensor | None:
    """Return the logits ``[b, s, v]``, on the last stage."""
    from megatron.core import parallel_state as state

    length = ids.shape[1]
    positions = torch.arange(length).expand_as(ids)
    mask = ~torch.ones(1, 1, length, length).tril().bool()
    first = state.get_pipeline_model_parallel_rank() == 0
    inner = torch.empty(length, len(ids), config.hidden_size, requires_grad=True)
    previous, following = state.get_pipeline_model_parallel_prev_rank(), state.get_pipeline_model_parallel_next_rank()
    if first:
        output = model(ids, positions, mask)
        dist.send(output.detach(), following)
        if torch.is_grad_enabled():
            gradient = torch.empty_like(output)
            dist.recv(gradient, following)
            output.backward(gradient)
        return None
    dist.recv(inner.data, previous)
    getattr(model, "module", model).set_input_tensor(inner)
    logits = model(ids, positions, mask)
    if torch.is_grad_enabled():
        logits.inner = inner
    return logits


def learn(model, config, optimizer, step: int) -> float:
    """Take one step on this data-parallel rank's sequences, and return the mean loss of all."""
    from megatron.core import parallel_state as state
    from megatron.core.distributed import finalize_model_grads

    group = state.get_data_parallel_group()
    ids = ids_of(step)[group.rank() :: group.size()]
    model.zero_grad_buffer()
    optimizer.zero_grad()
    logits = forward(model, config, ids[:, :-1])
    loss = torch.zeros(())
    if logits is not None:
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        dist.send(logits.inner.grad, state.get_pipeline_model_parallel_prev_rank())
    finalize_model_grads([model])
    assert optimizer.step()[0]
    loss = loss.detach()
    dist.all_reduce(loss, group=group)
    loss /= group.size()
    dist.broadcast(loss, dist.get_world_size() - 1)
    return float(loss)


def save(case: str, args: argparse.Namespace, model, optimizer) -> None:
    from megatron.core import dist_checkpointing, parallel_state as state
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    form = CASES[case][0]
    folder = HERE / case / f"iter_{STEP:07d}"
    common = {"args": args, "checkpoint_version": 3.0, "iteration": STEP}
    if dist.get_rank() == 0:
        shutil.rmtree(HERE / case, ignore_errors=True)
        folder.mkdir(parents=True)
        (HERE / case / "latest_checkpointed_iteration.txt").write_text(str(STEP))
    dist.barrier()
    if form == "ranks":
        place = [f"{state.get_tensor_model_parallel_rank():02d}", f"{state.get_pipeline_model_parallel_rank():03d}"]
        if args.expert_model_parallel_size > 1:
            place.append(f"{state.get_expert_model_parallel_rank():03d}")
        own = folder / "_".join(["mp_rank", *place])
        own.mkdir()
        torch.save(common | {"model": model.state_dict_for_save_checkpoint()}, own / "model_optim_rng.pt")
        return
    metadata = {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}
    # Megatron's training sets it since 0.14: a key for each layer, expert and half of a gated layer.
    metadata["singleton_local_shards"] = form == "single"
    sharded = getattr(model, "module", model).sharded_state_dict(metadata=metadata)
    content = common | {"model": sharded}
    if optimizer is not None:
        content["optimizer"] = optimizer.sharded_state_dict(sharded, metadata=metadata)
    dist_checkpointing.save(
        content, str(folder), TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1), content_metadata=metadata
    )


def load(folder: Path, model) -> None:
    """Load the newest iteration of a folder into a model, as Megatron's training does."""
    from megatron.core import dist_checkpointing

    latest = (folder / "latest_checkpointed_iteration.txt").read_text()
    inner = str(folder / (latest if latest == "release" else f"iter_{int(latest):07d}"))
    metadata = dist_checkpointing.load_content_metadata(inner)
    sharded = {"model": model.sharded_state_dict(metadata=metadata)}
    model.load_state_dict(dist_checkpointing.load(sharded, inner)["model"])


def work(rank: int, case: str, results: Path, loaded: Path | None) -> None:
    os.environ.update(RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="29711")
    from megatron.core import parallel_state as state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    args = arguments_of(case)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=args.world_size)
    state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    # Ranks of a tensor-parallel group draw whole weights on the CPU, and each keeps its part.
    torch.manual_seed(5 + state.get_pipeline_model_parallel_rank())
    config, model = model_of(args)
    optimizer, losses = None, []
    if loaded is not None:
        for weight in model.parameters():
            weight.data.zero_()
        load(loaded, model)
    elif args.use_distributed_optimizer:
        model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            weight_decay=args.weight_decay,
            adam_beta1=args.adam_beta1,
            adam_beta2=args.adam_beta2,
            adam_eps=args.adam_eps,
            clip_grad=args.clip_grad,
            use_distributed_optimizer=True,
        )
        optimizer = get_megatron_optimizer(settings, [model])
        # It also takes the decay of weights from biases and norms, as in Megatron's training.
        OptimizerParamScheduler(
            optimizer,
            init_lr=args.lr,
            max_lr=args.lr,
            min_lr=args.lr,
            lr_warmup_steps=0,
            lr_decay_steps=100,
            lr_decay_style="constant",
            start_wd=args.weight_decay,
            end_wd=args.weight_decay,
            wd_incr_steps=100,
            wd_incr_style="constant",
        )
        losses = [learn(model, config, optimizer, step) for step in range(STEP)]
    if loaded is None:
        save(case, args, model, optimizer)
    with torch.no_grad():
        logits = forward(model.eval(), config, ids_of(0)[:2, :-1])
    model.train()
    if optimizer is not None:
        losses += [learn(model, config, optimizer, step) for step in range(STEP, STEP + 3)]
    if rank == args.world_size - 1:
        results.write_text(json.dumps({"logits": logits.double().tolist(), "losses": losses}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    on_cpu()
    expected = {"ids": ids_of(0)[:2, :-1].tolist()}
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--load", type=Path)
    options = parser.parse_args()
    for case in options.cases:
        with tempfile.NamedTemporaryFile() as file:
            results = Path(file.name)
            ranks = arguments_of(case).world_size
            mp.start_processes(work, (case, results, options.load), ranks, start_method="fork")
            expected[case] = json.loads(results.read_text())
        print(case, expected[case]["losses"], flush=True)
        if options.load is not None:
            kept = json.loads((HERE / "expected.json").read_text())[case]["logits"]
            print(
                "largest difference", float((torch.tensor(kept) - torch.tensor(expected[case]["logits"])).abs().max())
            )
    if options.load is None and options.cases == list(CASES):
        text = json.dumps(json.loads(json.dumps(expected), parse_float=lambda text: round(float(text), 6)))
        (HERE / "expected.json").write_text(text + "\n")
