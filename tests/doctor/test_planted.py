"""The planted cases are correct: sound programs equal one rank, faults show, and they can be planted."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from doctor.planted import KINDS, OUR_FAULTS, SCRIPTS, SOUND, OurFault, Script
from doctor.programs import Outcome
from harness.faults import Fault, planted
from harness.groups import alone
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.core.topology import Groups
from shardwise.run.build import build_model
from shardwise.run.settings import ModelSettings, Settings

# Relative differences between a sound run and one rank: of loss and norm in the first step, and of all else. AdamW
# amplifies the rounding of small gradients; in bf16, a small gradient is the difference of large rounded numbers.
_ROUNDING = {torch.float64: (1e-12, 1e-9), torch.float32: (2e-6, 1e-3), torch.bfloat16: (2e-2, 2e-1)}


class Counter:
    """A watcher that keeps the model, and counts the calls."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.num_gradients = self.num_inputs = 0

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        assert self.model is None
        assert optimizer.param_groups
        self.model = model

    def gradients(self) -> None:
        assert self.model is not None
        assert all(param.grad is not None for param in self.model.parameters())
        self.num_gradients += 1

    def inputs(self, **tensors: Tensor) -> None:
        assert {"ids", "labels"} <= tensors.keys()
        self.num_inputs += 1


def run(script: Script, group: ProcessGroup, *, is_planted: bool) -> tuple[Outcome, nn.Module]:
    watcher = Counter()
    outcome = script.run(group, watcher, is_planted)
    assert (watcher.num_gradients, watcher.num_inputs) == (2, 4)
    assert watcher.model is not None
    return outcome, watcher.model


def apart(one: Tensor, other: Tensor) -> float:
    """Norm of the difference relative to that of ``other``."""
    one, other = one.double(), other.double()
    return float((one - other).norm() / (other.norm() + 1e-12))


def differences(one: Outcome, other: Outcome) -> dict[str, float]:
    """Relative differences of losses, norms, gradients and parameters, by what they are of."""
    found = {}
    for what, some, others in (("loss", one.losses, other.losses), ("norm", one.norms, other.norms)):
        found |= {f"{what} {step}": abs(a / b - 1) for step, (a, b) in enumerate(zip(some, others, strict=True))}
    sets = zip([*one.gradients, one.weights], [*other.gradients, other.weights], strict=True)
    for number, (tensors, expected) in enumerate(sets):
        assert tensors.keys() == expected.keys()
        # The gradient of a key's bias is 0 but for rounding.
        names = [name for name in tensors if not name.endswith("key.bias")]
        found |= {f"{number} {name}": apart(tensors[name], expected[name]) for name in names}
    return found


def most_apart(one: Outcome, other: Outcome) -> float:
    return max(differences(one, other).values())


def check_equal(one: Outcome, other: Outcome, dtype: torch.dtype, group: ProcessGroup) -> None:
    """Check on every rank that the differences are due to rounding."""
    found = differences(one, other)
    first, all_else = _ROUNDING[dtype]
    assert largest_of_ranks(max(found["loss 0"], found["norm 0"]), group) < first, found
    assert largest_of_ranks(max(found.values()), group) < all_else, sorted((v, k) for k, v in found.items())[-3:]


def largest_of_ranks(number: float, group: ProcessGroup) -> float:
    found = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return float(found)


def check_sound(script: Script, group: ProcessGroup) -> None:
    outcome, model = run(script, group, is_planted=False)
    expected, dense = run(script, alone(group), is_planted=False)
    check_equal(outcome, expected, script.dtype, group)
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in dense.named_parameters()}


def check_planted(script: Script, group: ProcessGroup) -> None:
    """The run without the fault is right, with it it is not, and afterwards it is right again; one rank has none."""
    one = alone(group)
    dense, model = run(script, one, is_planted=False)
    names = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    assert set(script.modules) <= names
    assert most_apart(run(script, one, is_planted=True)[0], dense) == 0
    sound = run(script, group, is_planted=False)[0]
    check_equal(sound, dense, script.dtype, group)
    wrong = run(script, group, is_planted=True)[0]
    found = {what: largest_of_ranks(number, group) for what, number in differences(wrong, sound).items()}
    assert max(found.values()) > 1e-2, found
    gradients = max(number for what, number in found.items() if what.startswith("0 "))
    if script.passes == "forward":
        assert found["loss 0"] > 1e-3
    elif script.passes == "backward":
        # The other programs compute the loss outside of the model, so wrong labels show first in its gradient.
        assert found["loss 0"] == 0 or script.kind == "labels"
        assert gradients > 1e-3
    else:
        assert found["loss 0"] == gradients == 0
    assert all(map(torch.isfinite, map(torch.tensor, wrong.losses + wrong.norms)))
    assert largest_of_ranks(most_apart(run(script, group, is_planted=False)[0], sound), group) == 0


def of_ranks(scripts: tuple[Script, ...], ranks: int) -> list[object]:
    chosen = [script for script in scripts if script.ranks == ranks]
    # One of each kind in `make test`, in `make test-slow` also of each family and dtype, all in `make test-all`.
    seen: set[object] = set()
    params: list[object] = []
    for script in chosen:
        marks = [] if script.kind not in seen and script.family != "transformers" else [pytest.mark.slow]
        marks += [pytest.mark.matrix] if {script.kind, script.family, script.dtype} <= seen else []
        seen |= {script.kind, script.family, script.dtype}
        params.append(pytest.param(script, id=script.name, marks=marks))
    return params


@pytest.mark.ranks(2)
@pytest.mark.parametrize("script", of_ranks(SOUND, 2))
def test_a_sound_program_equals_one_rank(script, group):
    check_sound(script, group)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("script", of_ranks(SOUND, 4))
def test_a_sound_program_of_four_ranks_equals_one_rank(script, group):
    check_sound(script, group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("script", of_ranks(SCRIPTS, 2))
def test_a_planted_fault_shows(script, group):
    check_planted(script, group)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("script", of_ranks(SCRIPTS, 4))
def test_a_planted_fault_of_four_ranks_shows(script, group):
    check_planted(script, group)


@pytest.mark.parametrize("fault", OUR_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_ours_can_be_planted(fault: OurFault):
    """That each shows on several ranks and not on one was seen when it was written."""
    path, text = planted(Fault(fault.name, fault.function, fault.old, fault.new, ""))
    assert text != path.read_text()


@pytest.mark.ranks(1)
def test_answers_of_our_faults_are_names_of_the_model(group):
    groups = Groups(tp=group, dp=group)
    for fault in OUR_FAULTS:
        architecture = "gpt" if "gpt" in fault.arguments else "llama"
        settings = Settings(
            data=("stdlib",), model=ModelSettings(architecture, num_layers=2, hidden_size=64, num_heads=4)
        )
        model = build_model(settings, 301, groups=groups, device=torch.device("meta"))
        names = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
        assert set(fault.modules) <= names, fault.name


def test_the_tables_are_complete():
    cases = [*SCRIPTS, *OUR_FAULTS]
    assert len({case.name for case in [*cases, *SOUND]}) == len(cases) + len(SOUND)
    assert {script.kind for script in SCRIPTS} == set(KINDS)
    assert {fault.kind for fault in OUR_FAULTS} == set(KINDS)
    assert all(1 <= len(case.modules) <= 3 for case in cases)
    assert {script.kind for script in SOUND} == {""}
    for scripts in (SCRIPTS, SOUND):
        assert {script.family for script in scripts} == {"by hand", "dtensor", "transformers"}
