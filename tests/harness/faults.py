"""Plant faults that tests must find, one at a time in a copy of the source: ``faults.py [--list] [NAME ...]``.

A fault changes one expression in one function, which is found by its name in any folder. First the tests of all chosen
faults must pass with the unmodified source. Then each fault is planted, and its test must fail.
``harness_test/test_faults.py`` checks that every fault of the table can still be planted.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import operator
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"


@dataclass(frozen=True)
class Fault:
    """A change that breaks one function, and the test that must find it.

    Attributes:
        name: name of the fault, for the command line and the report.
        function: end of the module's name, and qualified name of the function: ``moves:_Copy.backward``. Unique.
        old: part of the function's source that occurs once.
        new: replacement for ``old``.
        test: pytest id of the narrowest test that fails, in the test file of that function.
    """

    name: str
    function: str
    old: str
    new: str
    test: str


FAULTS = (
    # Sums over ranks that are missing or doubled.
    Fault(
        "lost all-reduce of one path",
        "attention:SelfAttention.__init__",
        "intervals=layout.intervals,",
        "intervals=layout.intervals, parallelism=None if config.sequence_parallel else "
        "type(ColumnLinear._usual_parallelism[0]).LOCAL,",
        "tests/nn/test_linear.py::test_the_projection_of_queries_keys_and_values_equals_dense",
    ),
    Fault(
        "gradient times tp",
        "moves:gather",
        "partial(split_for_rank, **along)",
        "partial(collectives.reduce_scatter, **along)",
        "tests/core/communication/test_moves.py::test_a_move_along_a_dimension",
    ),
    Fault(
        "norm gradients not summed under sequence parallelism",
        "finalize:finalize_gradients_",
        '_summed_over(model, "tp")',
        "[]",
        "tests/training/gradients/test_finalize.py::test_partial_sums_of_sequence_parallelism_are_completed",
    ),
    Fault(
        "tied weight on one stage",
        "finalize:finalize_gradients_",
        "sum_tied_embedding_gradients_(model, embd_group=embd_group)",
        "pass",
        "tests/training/gradients/test_finalize.py::test_copies_of_a_tied_weight_have_the_sum_of_their_gradients",
    ),
    Fault(
        "copies of key-value heads not written back",
        "finalize:finalize_gradients_",
        "copies.write_back_()",
        "pass",
        "tests/training/gradients/test_finalize.py::test_copies_of_a_key_value_head_have_the_sum_of_their_gradients",
    ),
    Fault(
        "shared dropout stream",
        "dropout:sharded_dropout",
        "DATA_PARALLEL_STREAM if dim is None else TENSOR_PARALLEL_STREAM",
        "DATA_PARALLEL_STREAM",
        "tests/nn/test_dropout.py::test_per_rank_masks_are_each_rank_s_own",
    ),
    Fault(
        "vocabulary offset by one",
        "vocabulary:columns_of",
        "start, stop = interval",
        "start, stop = interval[0] + (interval[0] > 0), interval[1]",
        "tests/nn/loss/test_loss_cross_entropy.py::test_fp64_equals_dense",
    ),
    Fault(
        "mean over the rank's own labels",
        "trainer:Trainer.train_step",
        "loader.num_labels(step)",
        "sum(int((batch[1] != -100).sum()) for batch in prepared[2])",
        "tests/run/test_samples.py::test_the_loss_is_a_mean_over_the_labels_of_all_ranks",
    ),
    Fault(
        "norm counted twice",
        "grad_norm:_counted_here",
        "if layout.dim is None and rank > 0:",
        "if False:",
        "tests/training/gradients/test_finalize.py::test_norm_equals_the_dense_one",
    ),
    Fault(
        "optimizer state misplaced",
        "optimizer:_OfOtherTensors.state_of",
        "self._others.get(param, param)",
        "param",
        "tests/training/optimizer/test_master_weights.py::test_copies_are_updated_as_an_fp32_model_would_be",
    ),
    Fault(
        "positions restart",
        "generation:_next_logits",
        "torch.arange(cache.length, cache.length + unread.size(1), device=unread.device)",
        "torch.arange(unread.size(1), device=unread.device)",
        "tests/models/generation/test_generation.py::test_greedy_tokens_are_the_oracles_also_when_the_context_slides",
    ),
    Fault(
        "stale overlap buffer",
        "overlap:gather_and_multiply",
        "place.copy_(shard)",
        "pass",
        "tests/core/communication/test_overlap.py::test_bits_of_the_collectives",
    ),
    Fault(
        "bucket sent too early",
        "gradient_buffers:GradientBuffers._arrived",
        "len(following.arrived) < len(following.params)",
        "not following.arrived",
        "tests/training/gradients/test_gradient_buffers.py::test_gradients_are_those_of_plain_all_reduces_bit_for_bit",
    ),
    Fault(
        "masters not rounded on load",
        "optimizer:MasterWeights.set_step_",
        "self.round_()",
        "pass",
        "tests/training/optimizer/test_master_weights.py::test_after_loading_the_model_is_its_copies_rounded",
    ),
    Fault(
        "samples overlap",
        "loader:BatchSchedule.micro_batches",
        "first = dp_rank * of_rank",
        "first = dp_rank * (of_rank - 1)",
        "tests/data/test_loader.py::test_ranks_and_micro_batches_in_order_are_the_global_batch",
    ),
    Fault(
        "ZeRO parameters read before they are gathered",
        "parameter_buffers:ParameterBuffers._before_module",
        "self._wait_for(self._buckets_of[module])",
        "pass",
        "tests/training/gradients/test_parameter_buffers.py::test_a_weight_that_is_read_without_a_call_is_waited_for",
    ),
    # What no longer overlaps on a GPU with one hardware queue.
    Fault(
        "all gathers of ZeRO launched at once",
        "parameter_buffers:ParameterBuffers.gather_",
        "self._start(1)",
        "self.start()",
        "tests/run/test_overlaps.py::test_what_overlaps",
    ),
    Fault(
        "all shifts of rows launched before the first product",
        "overlap:gather_and_multiply",
        "following = start(step + 1) if step + 1 < t else None",
        "launched = launched if step else [start(each) for each in range(1, t)]; "
        "following = launched[step] if step + 1 < t else None",
        "tests/run/test_overlaps.py::test_what_overlaps",
    ),
    # Mutations of the core: communication.
    Fault(
        "copy without its backward",
        "moves:_Copy.backward",
        "all_reduce(grad, group=ctx.group)",
        "grad",
        "tests/core/communication/test_moves.py::test_a_move_of_whole_tensors",
    ),
    Fault(
        "gather for parts that only splits its gradient",
        "moves:gather_for_parts",
        "partial(collectives.reduce_scatter, **along)",
        "partial(split_for_rank, **along)",
        "tests/core/communication/test_moves.py::test_a_move_along_a_dimension",
    ),
    Fault(
        "all-to-all that goes back the way it came",
        "moves:all_to_all",
        "output_sizes=input_sizes, input_sizes=output_sizes",
        "output_sizes=output_sizes, input_sizes=input_sizes",
        "tests/core/communication/test_moves.py::test_all_to_all_and_its_inverse",
    ),
    Fault(
        "shards of uneven sizes taken as even",
        "collectives:split_for_rank",
        "sum(sizes[:rank])",
        "rank * sizes[rank]",
        "tests/core/communication/test_collectives.py::test_every_collective_on_any_shape",
    ),
    Fault(
        "reduce-scatter in the memory of its input",
        "collectives:reduce_scatter_async",
        "may_overwrite and dim == 0 and tensor.is_contiguous()",
        "dim == 0 and tensor.is_contiguous()",
        "tests/core/communication/test_collectives.py::test_every_collective_on_any_shape",
    ),
    Fault(
        "error of another rank unheard",
        "agreement:decide",
        "next((failure for _, failure in gathered if failure is not None), None)",
        "gathered[0][1]",
        "tests/core/communication/test_agreement.py::test_one_rank_fails",
    ),
    Fault(
        "tree over halves instead of neighbours",
        "trees:tree_sum_stacked_",
        "terms[0::2].add_(terms[1::2])",
        "terms[: terms.size(0) // 2].add_(terms[terms.size(0) // 2 :])",
        "tests/core/communication/test_trees.py::test_the_tree_within_a_rank",
    ),
    # Sharding and layers.
    Fault(
        "remainder on the last ranks",
        "balanced:balanced_sizes",
        "rank < remainder",
        "rank >= t - remainder",
        "tests/core/sharding/test_sharding.py::test_balanced_rule_against_dealing_one_by_one",
    ),
    Fault(
        "interval of a part not moved to its place in the whole",
        "shard:ParamShard._pieces_of_interval",
        "offsets[dim] += start - local_start",
        "pass",
        "tests/core/sharding/test_param_shard.py::test_an_interval_of_a_part_consists_of_pieces_that_the_first_holder_writes",
    ),
    Fault(
        "sections gathered rank by rank",
        "column:ColumnLinear.gather",
        "[part[section] for section in range(self.sections) for part in parts]",
        "[part[section] for part in parts for section in range(self.sections)]",
        "tests/nn/test_parallel_layers.py::test_outputs_may_be_written_to",
    ),
    Fault(
        "bias of a row layer added on every rank",
        "arithmetic:Norm.row_output",
        "bias is None or self.group.size() == 1",
        "True",
        "tests/nn/test_parallel_layers.py::test_row_linear_is_a_part_of_linear",
    ),
    Fault(
        "first id of the next rank looked up",
        "embedding:look_up_own",
        "(local >= stop - start)",
        "(local > stop - start)",
        "tests/nn/test_parallel_layers.py::test_vocab_embedding_is_a_part_of_embedding",
    ),
    # Loss, gradients and optimizer.
    Fault(
        "target's logit below its own rank's maximum",
        "vocabulary:combine",
        "(every[..., 2] + below).amax(dim=0)",
        "every[..., 2].amax(dim=0)",
        "tests/nn/loss/test_loss_cross_entropy.py::test_fp64_equals_dense",
    ),
    Fault(
        "only the last micro-batch's gradient",
        "gradient_buffers:GradientBuffers._take_in",
        "slot.view.add_(grad)",
        "slot.view.copy_(grad)",
        "tests/training/gradients/test_gradient_buffers.py::test_a_wider_buffer_loses_nothing_of_many_micro_batches",
    ),
    Fault(
        "gradients clipped and not unscaled",
        "clipping:scale_gradients_",
        "own, on_host / loss_scale)",
        "own, on_host)",
        "tests/training/gradients/test_finalize.py::test_clipping",
    ),
    Fault(
        "decay of biases and norms",
        "adamw:AdamW.__init__",
        '"weight_decay": 0.0',
        '"weight_decay": weight_decay',
        "tests/training/optimizer/test_adamw.py::test_what_decays",
    ),
    # Pipeline, checkpoint, random streams and recomputation.
    Fault(
        "recomputed chunk on a later micro-batch's input",
        "stage:_Step._backward",
        "self._set_input(chunk, input_)",
        "pass",
        "tests/training/pipeline/test_stage_execution.py::test_a_whole_chunk_may_be_recomputed",
    ),
    Fault(
        "damaged values loaded",
        "storage:SafetensorsReader.check_sums",
        "found % MODULUS != chunk.checksum",
        "False",
        "tests/storage/checkpoint/test_errors.py::test_no_flipped_bit_goes_unnoticed",
    ),
    Fault(
        "inner stream lost at the end of its block",
        "random:RandomStreams.fork",
        "self._entered[-1] if self._entered else _DEFAULT",
        "_DEFAULT",
        "tests/core/test_random.py::test_streams_nested_in_any_way_go_on_where_they_were",
    ),
    Fault(
        "recomputation draws anew",
        "recompute:_Recomputation.__enter__",
        "self._streams.restore(self.first)",
        "pass",
        "tests/nn/test_recompute.py::test_gradients_and_random_numbers_are_those_of_a_plain_call",
    ),
    # Generation for many prompts, models by plan, and files of others.
    Fault(
        "ranks with caches of other sizes",
        "engine:BatchEngine._usual_capacity",
        "range(model.tp_group.size())",
        "[model.tp_group.rank()]",
        "tests/models/generation/test_engine.py::test_ranks_with_other_numbers_of_heads_have_as_many_pages",
    ),
    Fault(
        "pages shared after their end",
        "paged_cache:PagedCache.release_",
        "del self._full[self._keys.pop(page)]",
        "pass",
        "tests/models/generation/test_engine.py::test_nothing_is_shared_between_runs",
    ),
    Fault(
        "penalties without the prompt",
        "sequences:RunningSequence.history",
        "[*self.request.earlier_ids, *self.request.start],",
        "(),",
        "tests/models/generation/test_engine.py::test_requests_join_and_leave_while_others_go_on",
    ),
    Fault(
        "weights of classes ignored",
        "logits:_cross_entropy",
        "weight is None and size_average",
        "size_average",
        "tests/models/by_plan/test_logits.py::test_a_forward_that_reads_logits_otherwise_has_whole_ones",
    ),
    Fault(
        "tenth chunk before the second",
        "chunks:_states",
        "sorted(numbered)",
        "sorted(numbered, key=str)",
        "tests/storage/huggingface/test_megatron_checkpoints.py"
        "::test_layers_of_more_than_ten_interleaved_chunks_are_in_order",
    ),
)


def functions(node: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield every function inside ``node`` with its qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            if isinstance(child, ast.FunctionDef):
                yield within + child.name, child
            yield from functions(child, f"{within}{child.name}.")


def planted(fault: Fault, source: Path = SOURCE) -> tuple[Path, str]:
    """Return the file of a fault's function, and the file's text with the fault."""
    module, _, name = fault.function.partition(":")
    files = list(source.rglob(f"{module.replace('.', '/')}.py"))
    every = [(path, *each) for path in files for each in functions(ast.parse(path.read_text()))]
    found = [(path, node) for path, qualified, node in every if qualified == name]
    if len(found) != 1:
        looked_into = ", ".join(str(path.relative_to(source)) for path in files) or "no file"
        raise ValueError(
            f"{fault.name}: {len(found)} functions are {fault.function!r} (looked into: {looked_into}); name one, with "
            "as much of its module's name as that takes"
        )
    ((path, node),) = found
    lines, first = path.read_text().splitlines(keepends=True), node.lineno - 1
    before, body, after = map("".join, (lines[:first], lines[first : node.end_lineno], lines[node.end_lineno :]))
    if body.count(fault.old) != 1:
        raise ValueError(
            f"{fault.name}: {fault.old!r} occurs {body.count(fault.old)} times in {fault.function}, in "
            f"{path.relative_to(source)}; choose a part of its source that occurs once"
        )
    text = before + body.replace(fault.old, fault.new) + after
    try:
        compile(text, str(path), "exec")
    except SyntaxError as error:
        raise ValueError(f"{fault.name}: with the fault {path.relative_to(source)} is no Python: {error}") from error
    return path, text


def plant(fault: Fault) -> None:
    """Plant a fault in this process until its end, in a function that is already imported."""
    path, text = planted(fault)
    module = importlib.import_module(".".join(path.relative_to(SOURCE).with_suffix("").parts))
    name = fault.function.partition(":")[2]
    codes = [compile(text, str(path), "exec")]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    (changed,) = (code for code in codes if code.co_qualname == name)
    inspect.unwrap(operator.attrgetter(name)(module)).__code__ = changed


def failure(tests: Collection[str], source: Path, scratch: Path) -> str | None:
    """Return the first test that fails with the package at ``source``, and the reason; None if all pass."""
    paths = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    # The next run must not start with an example that failed because of a fault. COLUMNS: pytest truncates the reason.
    own = {"PYTHONPATH": paths, "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"), "COLUMNS": "250"}
    # The same selection as in `make test`.
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not matrix"]
    done = subprocess.run([*pytest, *tests], cwd=ROOT, env=os.environ | own, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    return next((line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))), None)


def failure_with(fault: Fault) -> str | None:
    """Return how the fault's test fails in a copy of the source with the fault; None if it passes."""
    path, text = planted(fault)
    with tempfile.TemporaryDirectory(prefix="shardwise-fault-") as folder:
        copy = Path(folder) / "src"
        # Copy compiled files too, except that of the changed file.
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns(f"{path.stem}.*.pyc"))
        (copy / path.relative_to(SOURCE)).write_text(text)
        return failure([fault.test], copy, Path(folder))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plant faults, one at a time, and see a test find each.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a fault's name, or a part of it; all if none")
    parser.add_argument("--list", action="store_true", help="show the faults and their tests, and run nothing")
    options = parser.parse_args(arguments)
    chosen = [fault for fault in FAULTS if not options.names or any(name in fault.name for name in options.names)]
    if not chosen:
        parser.error(f"no fault has {' or '.join(map(repr, options.names))} in its name; --list shows them all")
    width = max(len(fault.name) for fault in chosen)
    if options.list:
        for fault in chosen:
            print(f"{fault.name:{width}}  {fault.function}  {fault.test}")
        return 0
    with tempfile.TemporaryDirectory(prefix="shardwise-fault-") as folder:
        if failed := failure({fault.test: None for fault in chosen}, SOURCE, Path(folder)):
            print(f"a test fails without any fault, which must be mended first: {failed}", file=sys.stderr)
            return 2
    missed = 0
    for fault in chosen:
        failed = failure_with(fault)
        missed += failed is None
        print(f"{fault.name:{width}}  {failed or f'NOT FOUND by {fault.test}'}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
