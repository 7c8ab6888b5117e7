"""Pipeline stages generate and measure what the whole model does, while each of them reads another pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models.generation.test_engine import assert_as_alone, requests_of
from models.test_exact import KINDS

from shardwise.core.errors import ConfigError, DesyncError, DivergenceError
from shardwise.core.topology import Groups, Topology
from shardwise.models.config import ModelConfig
from shardwise.models.experts import Experts
from shardwise.models.generation import BatchEngine, Request, generate_all, inference_view
from shardwise.models.generation.generation import evaluation_mode
from shardwise.models.gpt import GPT

VOCAB, WINDOW = 101, 16
PLAIN = {"num_layers": 5, "init_method_std": 0.3, "hidden_dropout": 0.0, "attention_dropout": 0.0}
CASES = {"llama": ("llama", {}), "gpt": ("gpt", {}), "alibi": ("alibi", {})}
CASES["experts"] = "llama", {"experts": Experts(num=4, per_token=2, ffn_hidden_size=24)}
CAPACITIES = (
    # chunk_size, page_size, capacity, max_sequences: room for all texts, for little more than one, and tiny pages.
    (512, 16, 1000, 32), (2, 3, 18, 2), (5, 1, 40, 4),
)  # fmt: skip


def stage_of(case: str, topology: Topology, **options: object) -> GPT:
    """This rank's stage; the same weights at every layout."""
    kind, more = CASES[case]
    fields, arguments = KINDS[kind]
    pp = topology.group("pp")
    options = {"pipeline_model_parallel_size": pp.size(), "params_dtype": torch.float64} | options
    torch.manual_seed(1)
    place = {"pre_process": pp.rank() == 0, "post_process": pp.rank() == pp.size() - 1}
    config = ModelConfig(**(fields | PLAIN | more | options))
    return GPT(config, VOCAB, WINDOW, groups=Groups.of(topology), **place, **arguments)


def measured_requests() -> list[Request]:
    """Prompts that begin alike and others, sampled and greedy, some with log-probabilities of other temperatures."""
    plain = requests_of(VOCAB, count=6)
    same = [Request([3, 1, 4, 1, 5, 9, 2, 6], 4 + seed, seed=seed, log_probs=seed, temperature=0.5) for seed in (0, 1)]
    scored = Request([2, 7, 1, 8, 2, 8, 1, 8], 0, prompt_log_probs=2, temperature=2.0)
    return [*plain, *same, scored, Request([7, 7, 7, 7, 7, 7, 7], 3, prompt_log_probs=0, log_probs=1)]


@pytest.mark.ranks(2, 3, 4, slow=(2, 3))
@pytest.mark.parametrize("case", CASES)
def test_stages_give_each_prompt_what_the_whole_model_gives(group, case):
    whole, n = stage_of(case, Topology.create(tp=1)), group.size()
    requests = measured_requests()
    expected = [generate_all(whole, [request])[0] for request in requests]
    for tp in [1] if n < 4 else [1, 2] if case == "llama" else [2]:
        # Layers of a stage, and shards of a sequence, are uneven.
        model = stage_of(case, Topology.create(tp=tp, pp=n // tp), sequence_parallel=tp > 1)
        for chunk_size, page_size, capacity, most in CAPACITIES:
            engine = BatchEngine(
                model, chunk_size=chunk_size, page_size=page_size, capacity=capacity, max_sequences=most
            )
            assert_as_alone(dict(engine.run(requests)), expected)
            assert engine.cache.num_free == engine.cache.num_pages
        view = model if case == "experts" else inference_view(model, fused=False)
        assert_as_alone(dict(enumerate(generate_all(view, requests, chunk_size=4))), expected)


@pytest.mark.ranks(2)
def test_stages_read_at_the_same_time(group):
    """With as many sequences as stages, or more, each stage has something to read in all steps but the first ones."""
    model = stage_of("llama", Topology.create(pp=2))
    read = []
    model.register_forward_pre_hook(lambda _, args: read.append(args[0].size(1)))
    count, steps = 6, 0
    engine = BatchEngine(model)
    engine.add([Request([number], 9) for number in range(count)])
    with evaluation_mode(model):
        while not engine.is_idle:
            engine.step()
            steps += 1
    assert read == [count // 2] * 18
    assert steps == 19


@pytest.mark.ranks(2)
def test_log_probs_arrive_in_fp32(group):
    whole, model = (
        stage_of("llama", Topology.create(**sizes), params_dtype=torch.bfloat16) for sizes in ({}, {"pp": 2})
    )
    request = Request([2, 7, 1, 8, 2, 8, 1, 8], 4, log_probs=1, prompt_log_probs=1)
    assert_as_alone(dict(enumerate(generate_all(model, [request]))), generate_all(whole, [request]), rel=1e-6)


@pytest.mark.ranks(2)
def test_a_run_that_is_left(group):
    """What the stages have in work is dropped on all of them, and the next run is as the first."""
    model = stage_of("gpt", Topology.create(pp=2))
    requests = measured_requests()
    engine = BatchEngine(model, page_size=4)
    expected = dict(engine.run(requests))
    for number in range(3):
        run = engine.run(requests)
        for _ in range(number + 1):
            next(run)
        run.close()
        assert engine.is_idle
        assert engine.cache.num_free == engine.cache.num_pages
        assert_as_alone(dict(engine.run(requests)), [expected[index] for index in range(len(requests))])


@pytest.mark.ranks(4)
def test_ranks_of_a_stage_that_differ_are_an_error_on_every_rank(group):
    """Also if each of them has what its peers in the other stage have."""
    topology = Topology.create(tp=2, pp=2)
    with pytest.raises(DesyncError, match=r"disagree on what to generate: rank \d has '1 requests"):
        generate_all(stage_of("llama", topology), [Request([1, 2 + topology.rank("tp")], 2)])


@pytest.mark.ranks(2)
def test_errors_of_stages_on_every_rank(group):
    topology = Topology.create(pp=2)
    model = stage_of("llama", topology)
    with pytest.raises(DesyncError, match=r"disagree on what to generate: rank 0 has '1 requests"):
        generate_all(model, [Request([1, 2 + group.rank()], 2)])
    with pytest.raises(ConfigError, match=r"fused .* several pipeline stages"):
        inference_view(model, fused=True)
    if group.rank() == 1:
        with torch.no_grad():
            model.output_layer.weight[0] = torch.nan
    engine = BatchEngine(model)
    with pytest.raises(DivergenceError, match="have diverged"):
        list(engine.run([Request([1, 2], 4), Request([1], 2)]))
    assert engine.is_idle
    model.config = replace(model.config, num_layers=4, virtual_pipeline_model_parallel_size=2)
    with pytest.raises(ConfigError, match=r"stage \d of 2, with .* and 2 chunks"):
        BatchEngine(model)
    model.pre_process, model.post_process = model.post_process, model.pre_process
    with pytest.raises(ConfigError, match=r"stage \d of 2, with pre_process=(True|False).* and 2 chunks"):
        BatchEngine(model)
