"""Which kernels are chosen, from plain values, and what is said when they are not the fastest."""

import contextlib
import json
import sys
from pathlib import Path

import pytest
import torch
from harness.program import run

from shardwise.core.errors import ConfigError
from shardwise.kernels import dispatch, loss_reference, products
from shardwise.kernels.dispatch import LOSS_CPU, LOSS_TRITON, PATHS, Call, FastPath, loss_kernels, report


@pytest.fixture(autouse=True)
def _nothing_is_remembered():
    for cached in (dispatch._no_triton, dispatch._no_kernel):
        cached.cache_clear()
    yield
    for cached in (dispatch._no_triton, dispatch._no_kernel):
        cached.cache_clear()


PATH = FastPath("a", "for b", "xpu", (torch.float32, torch.int8), 10, "apples", missing=lambda call: "it is not here")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (Call("cuda", torch.float32, 10), "there is a kernel for xpu, none for cuda"),
        (Call("xpu", torch.float64, 10), "there is no kernel for torch.float64"),
        (Call("xpu", torch.float32, 9), "9 apples are fewer than 10"),
        (Call("xpu", torch.float32, 10, is_autocast=True), "it is not used under autocast"),
        (Call("xpu", torch.float32, 10), "it is not here"),
        (Call("xpu"), "it is not here"),
    ],
)
def test_a_path_is_chosen_from_plain_values(call, reason):
    assert PATH.why_not(call) == reason
    assert PATH.report(call) == (f"a on {call.device_type}", False, reason)
    here = FastPath("a", "for b", "xpu", PATH.dtypes, 10)
    assert (here.why_not(call) is None) == (reason == "it is not here")
    assert here.report(Call("xpu")) == ("a on xpu", True, "for b")


def test_what_a_path_does_not_take(monkeypatch):
    path = FastPath("a", "for b", "cpu", (torch.float32,), 4)
    x = torch.ones(4)
    assert path.runs(x)
    assert path.runs(torch.nn.Parameter(x), x)
    assert path.runs(x[:1], size=4)
    assert not path.runs(x, size=3)
    assert not path.runs(x, x.double())
    assert not path.runs(x.double())
    assert not path.runs(x, fits=lambda: False)
    assert not path.runs(x.to("meta"))
    assert not path.runs(x, x.as_subclass(type("Sub", (torch.Tensor,), {})))
    with torch.autocast("cpu", torch.bfloat16):
        assert not path.runs(x)
        assert FastPath("a", "for b", "cpu", in_autocast=True).runs(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not path.runs(x)


def test_what_is_missing_is_asked_last():
    asked = []
    path = FastPath("a", "for b", "cpu", (torch.float32,), 4, missing=lambda call: asked.append(call))
    for tensors, options in (((torch.ones(3),), {}), ((torch.ones(4),), {"fits": lambda: False})):
        assert not path.runs(*tensors, **options)
    assert not asked
    assert path.runs(torch.ones(5))
    assert asked == [Call("cpu", torch.float32, 5)]


def test_the_report_tells_of_the_paths_that_matter():
    names = {path.name for path in PATHS if path.device_type == "cpu"}
    assert {choice.name for choice in report("cpu")} == {f"{name} on cpu" for name in names}
    (choice,) = report("cpu", torch.float32, sizes={LOSS_CPU: 7})
    assert choice == ("compiled loss on cpu", False, "7 logits are fewer than 262,144")
    assert report("mps") == []


def test_an_unknown_device_has_the_reference():
    assert loss_kernels(torch.empty(1 << 10, 1 << 10, device="meta")) is loss_reference


@pytest.mark.parametrize("what", ["missing", "broken"])
def test_without_triton_the_reference_runs_and_the_reason_is_told(monkeypatch, what):
    monkeypatch.delitem(sys.modules, "shardwise.kernels.loss_triton", raising=False)
    if what == "missing":
        monkeypatch.setitem(sys.modules, "triton", None)
    else:
        monkeypatch.setitem(sys.modules, "triton", object())
    reason = LOSS_TRITON.why_not(Call("cuda", torch.bfloat16))
    assert reason.startswith("the triton kernels cannot be imported: ")
    assert ("import of triton halted" in reason) == (what == "missing")


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ((9, 0), torch.bfloat16, None),
        ((8, 0), torch.float64, None),
        ((7, 5), torch.float16, "Triton's kernels need compute capability 8.0, and cuda:0 has 7.5"),
        ((9, 0), torch.float8_e4m3fn, "there is no kernel for torch.float8_e4m3fn"),
    ],
)
def test_triton_runs_where_it_can(monkeypatch, capability, dtype, reason):
    pytest.importorskip("triton", reason="the kernels need Triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    trial = dispatch._module("triton_trial")
    monkeypatch.setattr(trial, "why_not", lambda device_index: None)
    monkeypatch.setattr(trial, "why_not_kernel", lambda name, dtype, device_index: None)
    assert LOSS_TRITON.why_not(Call("cuda", dtype)) == reason


@pytest.mark.parametrize("trouble", ["a failure", "wrong numbers", "none"])
def test_each_kernel_of_triton_is_tried_before_a_tensor_needs_it(monkeypatch, trouble):
    pytest.importorskip("triton", reason="the kernels need Triton")
    trial = dispatch._module("triton_trial")

    def swap(dtype, device):
        if trouble == "a failure":
            raise RuntimeError("out of resource: shared memory\nRequired: 300000")
        yield torch.ones(2, dtype=dtype), torch.full((2,), 1.0 if trouble == "none" else 2.0)

    monkeypatch.setattr(trial, "why_not", lambda device_index: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setitem(trial._TRIALS, "loss", swap)
    expected = {
        "a failure": "Triton cannot run loss of torch.bfloat16 here: RuntimeError: out of resource: shared memory",
        "wrong numbers": "the kernels of Triton that are compiled here compute wrong numbers",
        "none": None,
    }[trouble]
    assert LOSS_TRITON.why_not(Call("cuda", torch.bfloat16)) == expected


def test_what_another_rank_cannot_run_and_what_fails_after_all():
    call, refused = Call("cpu", torch.float32), "rank 1 of 2, on b, cannot run it: no C compiler"
    path = FastPath("a", "for b", "cpu", missing=lambda call: "it is out of order", trial=lambda call: None)
    assert path.why_not(call) == "it is out of order"
    assert path.try_out(call) is None
    path.is_agreed = True
    with pytest.raises(
        ConfigError, match=r"all ranks of a group agreed on it.*it is out of order; repair the compiler"
    ):
        path.runs(torch.ones(1))
    path.refusal = refused
    assert path.why_not(call) == path.try_out(call) == refused
    assert path.report(call) == ("a on cpu", False, refused)
    assert not path.runs(torch.ones(1))


@pytest.mark.slow
def test_without_a_compiler_the_reference_runs_and_the_reason_is_told(tmp_path):
    """As in slim images: Triton imports, and there is no C compiler, or no assembler."""
    pytest.importorskip("triton", reason="Triton must import")
    program = Path(__file__).with_name("without_compiler.py")
    # Triton looks for the driver's library before it looks for a compiler.
    variables = {"TRITON_LIBCUDA_PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path), "PATH": str(tmp_path)}
    unset = dict.fromkeys(("CC", "TRITON_INTERPRET", "SHARDWISE_TRITON"))
    found = json.loads(run("-W", "error", program, OMP_NUM_THREADS="1", **variables, **unset).stdout)
    cannot = "Triton cannot run a kernel here: RuntimeError: "
    assert found["no C compiler"].startswith(cannot + "Failed to find C compiler.")
    assert found["no ptxas"].startswith(cannot + "Cannot find ptxas")
    assert found["falls back"]


def test_triton_can_be_left_out(monkeypatch):
    monkeypatch.setenv("SHARDWISE_TRITON", "0")
    paths = [path for path in (*PATHS, dispatch.REDUCE_NORM) if "Triton" in path.name]
    assert len(paths) == 6
    for path in paths:
        assert path.why_not(Call("cuda", torch.bfloat16)) == "SHARDWISE_TRITON is 0"


def test_graphs_are_recorded_only_where_asked_for(monkeypatch):
    assert dispatch.CUDA_GRAPHS in PATHS
    choice = dispatch.CUDA_GRAPHS.report(Call("cuda"))
    assert choice[1:] == (False, "it has not been run on a GPU yet; SHARDWISE_CUDA_GRAPHS=1 tries it")
    monkeypatch.setenv("SHARDWISE_CUDA_GRAPHS", "1")
    assert dispatch.CUDA_GRAPHS.why_not(Call("cuda")) is None


def test_the_definition_takes_larger_blocks_on_a_gpu():
    """Each operation there takes microseconds to launch, whatever it does."""
    for device, elements in (("cpu", 1 << 18), ("meta", 1 << 24)):
        blocks = list(loss_reference.row_blocks(torch.empty(8192, 131072, device=device)))
        assert [rows.start for rows in blocks] == list(range(0, 8192, elements // 131072))


def test_the_compiler_gets_the_reference(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(LOSS_CPU, "min_size", 1)
    assert loss_kernels(torch.ones(3, 4)) is loss_reference


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float64])
def test_products_are_summed_in_the_wide_type(monkeypatch, out_dtype):
    monkeypatch.setattr(products, "_MIN_ROWS", 3)
    monkeypatch.setattr(products, "_TEMPORARY_ELEMENTS", 1)
    left, right = torch.randn(10, 4).bfloat16(), torch.randn(10, 5).bfloat16()
    before = torch.randn(4, 5, dtype=out_dtype)
    out = before.clone()
    products.add_product_(out, left, right)
    expected = before.double() + left.double().t() @ right.double()
    assert float((out.double() - expected).abs().max()) < 20 * torch.finfo(out_dtype).eps
