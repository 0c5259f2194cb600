"""Backward passes in a benchmark, without a GPU: what is timed, compared, written and shown."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fa2gen.bench import machine, own, peers, session
from fa2gen.bench.agreement import PEER_ALLOWANCE, gradient_error, peer_gradient_error
from fa2gen.bench.cells import Cell, make_cells, make_inputs
from fa2gen.bench.passes import make_ready, results
from fa2gen.bench.rows import Refusal, Timing
from fa2gen.constraints import default_config
from fa2gen.errors import ArgumentError, UnsupportedError
from fa2gen.hardware import get_gpu
from fa2gen.problem import Problem
from fa2gen.spec import BwdConfig, FwdConfig, KernelSpec
from tests.bench_fakes import ODD, peer, right, run_session

BACKWARD = dataclasses.replace(ODD, spec=dataclasses.replace(ODD.spec, kind="bwd"))
STEP = dataclasses.replace(BACKWARD, with_forward=True)
TIMES = {"fa2gen": 1.0, "a": 2.0}


def test_cells_of_passes() -> None:
    cells = make_cells([KernelSpec(head_dim=64)], [(512, 512)], tokens=512, hidden=64, passes=("fwd", "bwd", "fwd+bwd"))
    assert [cell.direction for cell in cells] == ["fwd", "bwd", "fwd+bwd"]
    forward, backward, step = (cell.flops for cell in cells)
    assert forward == 4 * 64 * 512 * 512
    assert (backward, step) == (2.5 * forward, 3.5 * forward)
    assert [cell.label() for cell in cells[1:]] == [
        "bwd_d64_bf16_full_gqa1 at 512",
        "fwd+bwd_d64_bf16_full_gqa1 at 512",
    ]
    assert cells[1].forward_spec == cells[0].spec
    assert cells[2].specs == (cells[0].spec, cells[1].spec)
    assert cells[2].min_bytes == cells[0].min_bytes + cells[1].min_bytes
    with pytest.raises(ArgumentError, match="with_forward"):
        Cell(KernelSpec(), Problem(1, 1, 1, 1, 1), with_forward=True)


def test_passes_that_there_are_no_kernels_for() -> None:
    odd = [KernelSpec(head_dim=59, alignment=2)]
    with pytest.raises(UnsupportedError, match=r"--headdim 59 with --pass bwd.*multiples of 8"):
        make_cells(odd, [(64, 64)], tokens=64, hidden=64, passes=("bwd",))
    with pytest.raises(ArgumentError, match=r"--data repair-all .* --pass fwd\+bwd takes normal data"):
        make_cells([KernelSpec()], [(64, 64)], tokens=64, hidden=64, data=("repair-all",), passes=("fwd+bwd",))


def test_inputs_of_a_backward_have_the_output_s_gradient() -> None:
    q, k, v, do = make_inputs(BACKWARD, "cpu", 3)
    for mine, theirs in zip((q, k, v), make_inputs(ODD, "cpu", 3), strict=True):
        assert torch.equal(mine, theirs)
    assert do.shape == q.shape
    assert not torch.equal(do, q)
    assert (do.float().std() - 1).abs() < 0.05


def test_a_backward_is_timed_without_its_forward() -> None:
    forwards: list[int] = []

    def counted(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        forwards.append(1)
        return right(cell, q, k, v)

    def ready(cell: Cell, heads_first: bool) -> tuple[machine.Ready, machine.Tensors]:
        one = peer("a", lambda c, *x: swap(counted(c, *map(swap, x))), True) if heads_first else peer("a", counted)
        tensors = tuple(map(one.arrange, make_inputs(cell, "cpu", 0)))
        return make_ready(one, cell, one.prepare(cell, *tensors[:3]), [tensors]), tensors

    def swap(x: Tensor) -> Tensor:
        return x.transpose(1, 2)

    found = []
    with torch.enable_grad():
        for heads_first in (False, True):
            backward, tensors = ready(BACKWARD, heads_first)
            begun = backward.begin(*tensors)
            assert len(forwards) == 1
            assert not any(x.requires_grad for x in tensors)
            assert all(x.is_leaf and x.requires_grad for x in begun[1:4])
            assert [x.stride() for x in begun[1:4]] == [x.stride() for x in tensors[:3]]
            for _ in range(3):  # the graph that the forward left is there still
                grads = backward.call(*begun)
            assert len(forwards) == 1
            assert all(x.grad is None for x in begun[1:4])
            found.append(results(backward, tensors))
            forwards.clear()
            step, tensors = ready(STEP, heads_first)
            begun = step.begin(*tensors)
            assert not forwards
            assert step.is_step
            assert not backward.is_step
            step.call(*begun)
            step.call(*begun)
            assert len(forwards) == 2
            found.append(results(step, tensors))
            forwards.clear()
            assert len(grads) == 3
    for grads in found:
        assert [x.shape for x in grads] == [x.shape for x in make_inputs(BACKWARD, "cpu", 0)[:3]]
        assert all(torch.equal(a, b) for a, b in zip(grads, found[0], strict=True))
        assert not any(x.requires_grad for x in grads)


def test_a_forward_is_called_as_ever() -> None:
    one = peer("a", right)
    tensors = make_inputs(ODD, "cpu", 0)
    ready = make_ready(one, ODD, one.prepare(ODD, *tensors), [tensors])
    (out,) = results(ready, tensors)
    assert torch.equal(out, right(ODD, *tensors))


class _Given(torch.autograd.Function):
    """An output whose gradients are another function's."""

    @staticmethod
    def forward(ctx, out: Tensor, gradients: Callable[[Tensor], tuple[Tensor, ...]], *leaves: Tensor) -> Tensor:
        ctx.gradients = gradients
        return out.clone()

    @staticmethod
    def backward(ctx, do: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.gradients(do))


def _with_gradients(change: Callable[..., tuple[Tensor, ...]]) -> Callable[[Cell, Tensor, Tensor, Tensor], Tensor]:
    """An implementation that is right forward; ``change`` makes its gradients, of those that are right and more."""

    def compute(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def gradients(do: Tensor) -> tuple[Tensor, ...]:
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                grads = torch.autograd.grad(right(cell, *leaves), leaves, do)
            return change(cell, q, k, v, do, *grads)

        return _Given.apply(right(cell, q.detach(), k.detach(), v.detach()), gradients, q, k, v)

    return compute


def _no_d(cell, q, k, v, do, dq, dk, dv):
    """dS = P dP, without - D."""
    group, scale = cell.spec.gqa_ratio, q.shape[-1] ** -0.5
    keys, values = (x.double().repeat_interleave(group, 2) for x in (k, v))
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), keys) * scale
    ds = scores.masked_fill(~mask, -math.inf).softmax(-1) * torch.einsum("bqhd,bkhd->bhqk", do.double(), values)
    grad_k = torch.einsum("bhqk,bqhd->bkhd", ds, q.double()).unflatten(2, (-1, group)).sum(3)
    return (
        (scale * torch.einsum("bhqk,bkhd->bqhd", ds, keys)).to(q.dtype),
        (scale * grad_k).to(q.dtype),
        dv,
    )


def _last_query_short(cell, q, k, v, do, dq, dk, dv):
    do = do.clone()
    do[:, -1] = 0
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(right(cell, *leaves), leaves, do)


def _nan_in_the_middle(cell, q, k, v, do, dq, dk, dv):
    dk = dk.clone()
    dk[-1, 100, -1, 3] = math.nan
    return dq, dk, dv


WRONG = {
    "no D": _no_d,
    "last query short": _last_query_short,
    "NaN": _nan_in_the_middle,
    "dK and dV swapped": lambda cell, q, k, v, do, dq, dk, dv: (dq, dv, dk),
    "dQ without the scale": lambda cell, q, k, v, do, dq, dk, dv: (dq * q.shape[-1] ** 0.5, dk, dv),
    "heads of dV in another order": lambda cell, q, k, v, do, dq, dk, dv: (dq, dk, dv.flip(2)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_gradients_are_told_apart(name: str) -> None:
    found = run_session(TIMES, [peer("bad", _with_gradients(WRONG[name])), peer("a", right)], [BACKWARD], host=False)
    outcome = found.rows[0].outcomes["bad"]
    assert isinstance(outcome, Refusal)
    assert outcome.wrong
    assert outcome.reason.startswith("wrong gradients: they are not attention's gradients: off by")
    assert found.rows[0].ratio("a") == pytest.approx(2.0)
    (line,) = found.wrong()
    assert line.startswith("bad in bwd_d32_bf16_causal_gqa3 at 113x203: wrong gradients: ")


def _gradients(compute: Callable[[Cell, Tensor, Tensor, Tensor], Tensor], cell: Cell) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        q, k, v, do = (x.requires_grad_() for x in make_inputs(cell, "cpu", 0))
        return torch.autograd.grad(compute(cell, q, k, v), (q, k, v), do)


@pytest.mark.parametrize("name", ["NaN", "dK and dV swapped", "dQ without the scale", "heads of dV in another order"])
def test_all_rows_are_compared_with_ours(name: str) -> None:
    """Also in heads that the reference does not compute."""
    mine = _gradients(right, BACKWARD)
    assert peer_gradient_error(_gradients(_with_gradients(WRONG[name]), BACKWARD), mine)
    assert peer_gradient_error(mine, mine) == ""
    assert "it is (" in peer_gradient_error([x.transpose(1, 2) for x in mine], mine)
    inputs = make_inputs(BACKWARD, "cpu", 0)
    assert "its dq is" in gradient_error([x.transpose(1, 2) for x in mine], inputs, BACKWARD)


def _in_float32(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A right peer that rounds in places of its own."""
    group = cell.spec.gqa_ratio
    keys, values = (x.float().repeat_interleave(group, 2) for x in (k, v))
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), keys) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1).to(q.dtype) if cell.spec.causal else scores.softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights.float(), values).to(q.dtype)


@pytest.mark.parametrize("seqlen", [65, 384])
@pytest.mark.parametrize("causal", [False, True])
def test_right_gradients_agree(causal: bool, seqlen: int) -> None:
    cell = Cell(KernelSpec("bwd", 32, "bf16", causal, 2), Problem(2, seqlen, seqlen, 4, 2))
    mine, theirs = _gradients(right, cell), _gradients(_in_float32, cell)
    assert gradient_error(mine, make_inputs(cell, "cpu", 0), cell) == ""
    assert gradient_error(theirs, make_inputs(cell, "cpu", 0), cell, PEER_ALLOWANCE) == ""
    assert peer_gradient_error(theirs, mine) == ""


@pytest.mark.parametrize("cell", [BACKWARD, STEP], ids=["bwd", "fwd+bwd"])
def test_a_session_times_gradients(cell: Cell) -> None:
    found = run_session(TIMES, [peer("a", right)], [cell])
    (only,) = found.rows
    assert isinstance(only.outcomes["fa2gen"], Timing)
    assert only.ratio("a") == pytest.approx(2.0)
    assert only.tflops("fa2gen") == pytest.approx(cell.flops / only.outcomes["fa2gen"].median / 1e9)
    assert (only.source, only.repairs) == ("the definition, in float64", None)
    assert [(host.cell.direction, host.stream, host.ratio("a")) for host in found.host] == [
        ("fwd+bwd", "default", 2.0),
        ("fwd+bwd", "side", 2.0),
    ]
    assert found.wrong() == []
    assert torch.is_grad_enabled()


def test_host_rows_are_of_calls_and_of_steps() -> None:
    cells = session.host_cells([BACKWARD, ODD, STEP])
    assert [(cell.direction, cell.problem) for cell in cells] == [
        ("fwd", Problem(1, 64, 64, 3, 1)),
        ("fwd+bwd", Problem(1, 64, 64, 3, 1)),
    ]
    assert session.host_cells([]) == []
    assert [cell.direction for cell in session.host_cells([ODD])] == ["fwd"]


def test_a_library_without_a_backward_says_so() -> None:
    def forward_only(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return right(cell, q.detach(), k.detach(), v.detach())

    found = run_session(TIMES, [peer("bad", forward_only)], [BACKWARD], host=False)
    assert found.rows[0].outcomes["bad"] == Refusal("UnsupportedError: it is forward only: its output has no gradient")


def test_sdpa_s_gradients_on_the_cpu_stand_in_for_the_gpu_s() -> None:
    flash, formula = peers._sdpa("fa2", "FLASH_ATTENTION"), peers._sdpa("cudnn", "MATH")
    square = Cell(KernelSpec("bwd", 32, causal=True), Problem(2, 65, 65, 2, 2))
    cells = [square, dataclasses.replace(square, with_forward=True)]
    rows = run_session({"fa2gen": 1.0, "fa2": 2.0, "cudnn": 3.0}, [flash, formula], cells, host=False).rows
    assert all(isinstance(one.outcomes[name], Timing) for one in rows for name in ("fa2", "cudnn"))


def test_configs_are_forced_on_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "_gpu", lambda: get_gpu("h200"))
    forward, backward = KernelSpec(head_dim=64), KernelSpec("bwd", head_dim=64)
    config = BwdConfig(block_m=32)
    assert own.forced_config("tuned", backward) is None
    assert own.forced_config("default", backward) == default_config(backward)
    assert own.forced_config(config, backward) is config
    assert own.forced_config(config, forward) is None
    assert own.forced_config(FwdConfig(), backward) is None


def test_what_fa2gen_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(own, "warmup", lambda *_, **options: asked.append(options))
    monkeypatch.setattr(own, "attention", lambda q, *_, **options: asked.append(options) or q)
    config = BwdConfig(block_m=32)
    inputs = make_inputs(BACKWARD, "cpu", 0)[:3]
    own.own_implementation(config).prepare(BACKWARD, *inputs)(*inputs)
    own.deterministic_peer("tuned").find().prepare(STEP, *inputs)(*inputs)
    assert [options["deterministic"] for options in asked] == [False, False, True, True]
    assert [options["backward_config"] for options in asked] == [config, config, None, None]
    assert [options.get("backward") for options in asked] == [True, None, True, None]
    assert all(options["config"] is None for options in asked)


def test_pseudo_peers_take_the_passes_that_they_are_about() -> None:
    inputs = make_inputs(ODD, "cpu", 0)
    with pytest.raises(UnsupportedError, match="deterministic as it is"):
        own.deterministic_peer("tuned").find().prepare(ODD, *inputs)
    with pytest.raises(UnsupportedError, match="no softmax of its own"):
        own.online_peer("tuned").find().prepare(BACKWARD, *inputs)


def test_all_kernels_of_a_backward_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(own, "device_gpu", lambda _: get_gpu("a100"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(own, "compile_many", lambda jobs: compiled.extend(source.entry for source, _ in jobs))
    cell = Cell(KernelSpec("bwd", 64), Problem(1, 128, 128, 2, 2))
    own.compile_ahead([cell, dataclasses.replace(cell, with_forward=True)], "default")
    assert len(compiled) == 4
    assert sum("preprocess" in name for name in compiled) == 1
    compiled.clear()
    own.compile_ahead([cell], "default", deterministic=True)
    assert len(compiled) == 7
    compiled.clear()
    described = {"fwd": FwdConfig(block_m=64, num_warps=2, softmax="guarded"), "bwd": default_config(cell.spec)}
    monkeypatch.setattr(
        own,
        "warmup_specs",
        lambda calls, *, gate: [SimpleNamespace(config=described[spec.kind]) for spec, _ in calls],
    )
    own.compile_ahead([cell], "tuned", online=True)
    assert len(compiled) == 5
