"""Attention as torch operators: traced, exported and compiled programs, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fa2gen.errors import ArgumentError, UnsupportedError
from fa2gen.runtime import attention, operators
from fa2gen.spec import BwdConfig, FwdConfig
from tests.gradients import call_inputs

Q, K, V = (x.detach() for x in call_inputs())
FWD, BWD = torch.ops.fa2gen.attention_fwd.default, torch.ops.fa2gen.attention_bwd.default


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_a_loop() -> None:
    stacked = torch.vmap(lambda x: attention(x, K, V))(torch.stack([Q, 2 * Q]))
    assert torch.equal(stacked, torch.stack([attention(Q, K, V), attention(2 * Q, K, V)]))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_traced_graphs_hold_the_operator(mode: str) -> None:
    """A graph that held the result of this one call would be right for its inputs only."""
    graph = make_fx(lambda q, k, v: attention(q, k, v, causal=True), tracing_mode=mode)(Q, K, V)
    assert "fa2gen.attention_fwd" in graph.code
    assert torch.equal(graph(Q + 1, K, V), attention(Q + 1, K, V, causal=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace_holds_the_operator() -> None:
    traced = torch.jit.trace(lambda q, k, v: attention(q, k, v), (Q, K, V))
    assert torch.equal(traced(Q + 1, K, V), attention(Q + 1, K, V))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = attention(q, k, v, causal=True)
            assert isinstance(out, Tensor)
            return out

    program = torch.export.export(Layer(), (Q, K, V), strict=strict)
    assert torch.equal(program.module()(Q + 1, K, V), attention(Q + 1, K, V, causal=True))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_into_one_graph(backend: str, return_lse: bool) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Any:
        result = attention(q * 2, k, v, causal=True, softmax_scale=0.25, return_lse=return_lse)
        return (result[0] + 1, result[1]) if return_lse else result + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for seqlen in (7, 8, 9):
        q, k, v = call_inputs(2, seqlen, 2 * seqlen)
        torch.testing.assert_close(compiled(q, k, v), step(q, k, v), rtol=0, atol=0)


def test_compiled_arguments_are_checked() -> None:
    compiled = torch.compile(lambda q: attention(q, q, q), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="q has dtype"):
        compiled(torch.ones(1, 2, 1, 8))
    forced = torch.compile(lambda q: attention(q, q, q, config=FwdConfig()), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="config cannot be forced"):
        forced(torch.ones(1, 2, 1, 8).half())
    bad_arguments: list[dict[str, Any]] = [{"causal": "yes"}, {"softmax_scale": "1"}, {"return_lse": 2}]
    for arguments in bad_arguments:
        bad = torch.compile(lambda q, a=arguments: attention(q, q, q, **a), backend="aot_eager")  # type: ignore[misc]
        with pytest.raises(ArgumentError, match=f"{next(iter(arguments))} must be"):
            bad(torch.ones(1, 2, 1, 8).half())


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_fake_tensors_give_fake_results() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        q, k = torch.empty(2, 5, 4, 64, dtype=torch.float16), torch.empty(2, 7, 2, 64, dtype=torch.float16)
        out, lse = attention(q, k, k, return_lse=True)
    assert isinstance(out, FakeTensor)
    assert out.shape == q.shape
    assert out.stride() == q.stride()
    assert lse.shape == (2, 4, 5)


def _backward_arguments(causal: bool = True) -> tuple[Any, ...]:
    out, lse = attention(Q, K, V, causal=causal, return_lse=True)
    return torch.ones_like(out), torch.ones_like(lse), Q, K, V, out, lse, causal, 0.3, False, "auto"


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_bl_121_operators_keep_their_promises(strided: bool, requires_grad: bool) -> None:
    q, k, v = (x.clone().requires_grad_(requires_grad) for x in (Q, K, V))
    if strided:
        q = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(requires_grad)
    torch.library.opcheck(FWD, (q, k, v, True, 0.3, None if strided else True, "auto"))
    torch.library.opcheck(FWD, (q[:, :0], k, v, False, None, False, "reference"))


def test_bl_121_the_backward_operator_keeps_its_promises() -> None:
    dout, dlse, *rest = _backward_arguments()
    torch.library.opcheck(BWD, (dout, dlse, *rest))
    expanded = torch.ones((), dtype=dout.dtype).expand(dout.shape)
    torch.library.opcheck(BWD, (expanded, None, *rest))


def test_gradients_of_the_operators() -> None:
    eager, traced = call_inputs(), call_inputs()
    attention(*eager, causal=True).sum().backward()
    out, lse = torch.ops.fa2gen.attention_fwd(*traced, True, None, None, "auto")
    out.sum().backward(retain_graph=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(eager, traced, strict=True))
    (dv,) = torch.autograd.grad(lse.sum(), traced[2], retain_graph=True)
    assert (dv == 0).all()
    (gradient,) = torch.autograd.grad(out.sum(), traced[0], create_graph=True)
    with pytest.raises(UnsupportedError, match="attention can be differentiated once"):
        gradient.sum().backward()


_BAD: dict[str, tuple[int, Tensor | None, str]] = {
    "dout too short": (0, torch.ones(2, 4, 4, 64).bfloat16(), r"dout must have shape \(2, 5, 4, 64\), got"),
    "dout of another dtype": (0, torch.ones(2, 5, 4, 64).half(), r"dout must have dtype torch.bfloat16, got torch.f"),
    "dout sparse": (
        0,
        torch.ones(2, 5, 4, 64).bfloat16().to_sparse(),
        "dout must be a dense tensor, got layout torch.sparse_coo",
    ),
    "dout on another device": (
        0,
        torch.ones(2, 5, 4, 64, device="meta").bfloat16(),
        "dout is on device meta and q on cpu",
    ),
    "dlse of another shape": (1, torch.ones(2, 5, 4), r"dlse must have shape \(2, 4, 5\), got \(2, 5, 4\)"),
    "dlse in 16 bits": (1, torch.ones(2, 4, 5).half(), r"dlse must have dtype torch.float32"),
    "dlse in 64 bits": (1, torch.ones(2, 4, 5).double(), r"dlse must have dtype torch.float32"),
    "out of other heads": (5, torch.ones(2, 5, 2, 64).bfloat16(), "out must have shape"),
    "lse in 16 bits": (6, torch.ones(2, 4, 5).half(), "lse must have dtype"),
    "k of another head dim": (3, torch.ones(2, 7, 2, 32).bfloat16(), "k has head_dim 32 and q 64"),
    "q in 32 bits": (2, Q.float(), "q has dtype torch.float32"),
}


@pytest.mark.parametrize("name", _BAD)
def test_bad_gradients_are_named(name: str) -> None:
    index, bad, message = _BAD[name]
    arguments = list(_backward_arguments())
    arguments[index] = bad
    with pytest.raises(ArgumentError, match=message):
        torch.ops.fa2gen.attention_bwd(*arguments)


def test_an_input_on_another_device_is_named() -> None:
    with pytest.raises(ArgumentError, match="k is on device meta and q on cpu"):
        torch.ops.fa2gen.attention_fwd(Q, K.to("meta"), V, True, None, None, "auto")


def test_flops_are_counted() -> None:
    q, k, v = call_inputs()
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, causal=True).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    product = 2 * q[..., 0].numel() * k.shape[1] * q.shape[3]
    assert counts == {torch.ops.fa2gen.attention_fwd: 2 * product, torch.ops.fa2gen.attention_bwd: 5 * product}


def _step(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out, lse = attention(2 * q, k, v, causal=True, return_lse=True, **options)
    return out.float().square().sum() + lse.square().mean()


def _gradients_of(step: Any, tensors: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(step(*tensors, **options), tensors)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_training_serves_every_length(backend: str) -> None:
    """One graph, whatever the lengths: compiled once for the first call and once more, for all lengths."""
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(_step, fullgraph=True, backend=counter)
    for number, (seqlen_q, seqlen_k) in enumerate(((7, 9), (11, 8), (12, 31), (45, 19), (50, 64), (33, 33))):
        tensors = call_inputs(2, seqlen_q, seqlen_k)
        found, expected = _gradients_of(compiled, tensors), _gradients_of(_step, tensors)
        # Inductor sums the loss in an order of its own.
        torch.testing.assert_close(found, expected, rtol=2.0**-7 if backend == "inductor" else 0, atol=0)
        assert counter.frame_count <= 1 + min(number, 1), (seqlen_q, seqlen_k)


def test_bl_122_compiled_checkpoint_of_one_gradient() -> None:
    q, k, v = (x.detach() for x in call_inputs())
    v.requires_grad_()

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(_step, q, k, v, use_reentrant=False)  # type: ignore[no-any-return]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(q, k, v), v)
    (expected,) = torch.autograd.grad(_step(q, k, v), v)
    assert torch.equal(found, expected)


def test_compiled_autocast() -> None:
    tensors = [x.detach().float().requires_grad_() for x in call_inputs()]

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return _step(q, k, v)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for a, b in zip(_gradients_of(compiled, tensors), _gradients_of(step, tensors), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)
    with pytest.raises(Exception, match=r"q has dtype torch.float32"):
        torch.compile(_step, fullgraph=True, backend="aot_eager")(*tensors)


def _nodes(step: Any, tensors: list[Tensor]) -> dict[str, tuple[Any, ...]]:
    """Arguments of the attention operators in a traced step."""
    graph = make_fx(step, tracing_mode="real")(*tensors).graph
    return {str(node.target): node.args for node in graph.nodes if "fa2gen" in str(node.target)}


def test_traced_gradients_hold_the_operator() -> None:
    tensors = call_inputs()

    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))

    nodes = _nodes(step, tensors)
    assert set(nodes) == {"fa2gen.attention_fwd.default", "fa2gen.attention_bwd.default"}
    # No gradient of an LSE that nobody used; not deterministic.
    assert nodes["fa2gen.attention_bwd.default"][1] is None
    assert nodes["fa2gen.attention_bwd.default"][9] is False
    graph = make_fx(step, tracing_mode="real")(*tensors)
    others = [x.detach().add(1).requires_grad_() for x in tensors]
    assert all(torch.equal(a, b) for a, b in zip(graph(*others), step(*others), strict=True))


def test_who_asks_for_deterministic_gradients() -> None:
    """The keyword, else torch's switch as it was when the forward ran, not when the backward does."""
    tensors = call_inputs()

    def step(deterministic: bool | None, switch: bool) -> Any:
        def traced(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            torch.use_deterministic_algorithms(switch)
            out = attention(q, k, v, deterministic=deterministic)
            torch.use_deterministic_algorithms(not switch)
            return torch.autograd.grad(out.sum(), (q, k, v))

        return traced

    try:
        for deterministic, switch in ((None, True), (None, False), (True, False), (False, True)):
            nodes = _nodes(step(deterministic, switch), tensors)
            expected = switch if deterministic is None else deterministic
            assert nodes["fa2gen.attention_bwd.default"][9] is expected
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_compiled_program_follows_torch_s_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    gradients = operators.gradients

    def spy(options: Any, *tensors: Any) -> Any:
        asked.append(options.deterministic)
        return gradients(options, *tensors)

    monkeypatch.setattr(operators, "gradients", spy)
    compiled = torch.compile(_step, fullgraph=True, backend="aot_eager")
    try:
        for switch in (False, True, False):
            torch.use_deterministic_algorithms(switch)
            _gradients_of(compiled, call_inputs())
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [False, True, False]


def test_a_backward_under_a_mode_is_an_operator() -> None:
    """The forward was not observed, the backward is."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Observer(TorchDispatchMode):
        seen: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    tensors = call_inputs()
    out = attention(*tensors)
    expected = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    with Observer() as observer:
        found = torch.autograd.grad(out.sum(), tensors)
    assert "fa2gen.attention_bwd.default" in observer.seen
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_backward_config_in_a_traced_program() -> None:
    config = BwdConfig()
    with pytest.raises(UnsupportedError, match="backward_config cannot be forced"):
        make_fx(lambda q, k, v: attention(q, k, v, backward_config=config), tracing_mode="real")(Q, K, V)
