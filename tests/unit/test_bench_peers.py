"""How fa2gen and the libraries beside it are found, prepared and called; the libraries are stand-ins."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fa2gen.bench import machine, own, peers
from fa2gen.bench.cells import Cell, make_cells, make_inputs
from fa2gen.bench.peers import PEERS, Peer, find_peers
from fa2gen.bench.rows import Refusal, Timing
from fa2gen.constraints import default_config, default_config_of
from fa2gen.errors import UnsupportedError
from fa2gen.hardware import get_gpu
from fa2gen.problem import Problem
from fa2gen.runtime import attention
from fa2gen.spec import FwdConfig, KernelSpec
from tests.bench_fakes import ODD, peer, right, run_session


def test_kernels_are_compiled_ahead_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(own, "device_gpu", lambda _: get_gpu("a100"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(own, "compile_many", lambda jobs: compiled.extend(f"{x.entry} {target}" for x, target in jobs))
    guarded = FwdConfig(block_m=64, block_n=64, num_warps=2, softmax="guarded")
    specs = [KernelSpec(head_dim=64), KernelSpec(head_dim=59, alignment=2)]
    cells = make_cells(specs, [(64, 64), (128, 128)], tokens=128, hidden=128, data=("normal", "repair-all"))
    own.compile_ahead(cells, guarded)
    assert len(compiled) == 1
    own.compile_ahead(cells, guarded, online=True)
    assert len(compiled) == 3
    assert all(line.endswith("sm_80") for line in compiled)
    described = SimpleNamespace(config=guarded)
    monkeypatch.setattr(own, "warmup_specs", lambda calls, *, gate: [described for _ in calls])
    own.compile_ahead(cells, "tuned")
    assert len(compiled) == 4


def test_configs_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    config, spec = FwdConfig(block_m=64, num_warps=2), KernelSpec(head_dim=64)
    gpus = iter([get_gpu("a100"), get_gpu("h200")])
    monkeypatch.setattr(own, "_gpu", lambda: next(gpus))
    assert own.forced_config("tuned", spec) is None
    assert own.forced_config("default", spec) == default_config(spec)
    assert own.forced_config("default", spec) == default_config_of(spec, "sm90")
    assert own.forced_config(config, spec) is config


def test_the_online_peer_takes_guarded_configs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    forced: list[FwdConfig | None] = []
    guarded = FwdConfig(block_m=64, num_warps=2, softmax="guarded")
    monkeypatch.setattr(own, "warmup", lambda *_, config, **__: forced.append(config))
    online = own.online_peer(guarded).find()
    monkeypatch.setattr(own, "describe", lambda *_, config, **__: SimpleNamespace(config=config))
    online.prepare(ODD, *make_inputs(ODD, "cpu", 0))
    assert forced == [dataclasses.replace(guarded, softmax="online")]
    with pytest.raises(UnsupportedError, match="online softmax already"):
        own.online_peer(forced[0]).find().prepare(ODD, *make_inputs(ODD, "cpu", 0))


def test_implementations_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are interleaved, each with another one first; who cannot be captured is left out with the reason."""
    replayed: list[str] = []

    def capture(ready: machine.Ready, calls: int) -> SimpleNamespace:
        name = ready.implementation.name
        if name.startswith("bad"):
            raise ValueError("not in a graph\nat all")
        return SimpleNamespace(name=name, replay=lambda: None)

    monkeypatch.setattr(machine, "_capture", capture)
    monkeypatch.setattr(machine, "_replay_ms", lambda graph: replayed.append(graph.name) or 10.0 * len(replayed))
    device = machine.CudaMachine.__new__(machine.CudaMachine)
    device._clocks = None
    monkeypatch.setattr(machine.CudaMachine, "synchronize", lambda self: None)
    ready = {name: machine.Ready(peer(name, right), lambda q, k, v: q, []) for name in ("a", "bad", "b")}
    times, clocks = device.kernel_times(ready, 10, 3)
    assert replayed == ["a", "b", "b", "a", "a", "b"]
    assert times["a"] == [1.0, 4.0, 5.0]
    assert times["bad"] == Refusal("cannot be captured into a CUDA graph: ValueError: not in a graph")
    assert clocks is None
    times, _ = device.kernel_times({"bad": ready["bad"]}, 10, 3)
    assert isinstance(times["bad"], Refusal)


def test_peers_that_are_not_here_are_named_with_the_reason() -> None:
    def absent() -> peers.Implementation:
        import no_such_module_at_all  # noqa: F401

        raise AssertionError

    def broken() -> peers.Implementation:
        raise OSError("libcudart.so.11: cannot open shared object file\nmore")

    here = peer("here", right)
    known = {"a": Peer("A", absent), "b": Peer("B", broken), "here": Peer("Here", lambda: here)}
    found, missing = find_peers(["b", "here", "a"], peers=known)
    assert found == [here]
    assert missing == {
        "a": "not installed: there is no module no_such_module_at_all",
        "b": "installed, but does not import: OSError: libcudart.so.11: cannot open shared object file",
    }


@pytest.mark.parametrize(
    ("name", "module"), [("flash_attn", "flash_attn"), ("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute")]
)
@pytest.mark.parametrize("with_lse", [False, True])
def test_flash_attention_s_own_functions(
    name: str, module: str, with_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> object:
        return attention(q, k, v, causal=causal, return_lse=with_lse)

    fake = SimpleNamespace(flash_attn_func=flash_attn_func, __version__="9.9")
    monkeypatch.setattr(peers.importlib, "import_module", {module: fake}.__getitem__)
    found, missing = find_peers([name])
    assert not missing
    assert found[0].version == "9.9"
    outcome = run_session({"fa2gen": 1.0, name: 2.0}, found, host=False).rows[0].outcomes[name]
    assert isinstance(outcome, Timing)


def test_flashinfer_plans_once_for_ragged_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper:
        def __init__(self, workspace: Tensor, layout: str) -> None:
            assert (workspace.dtype, layout) == (torch.uint8, "NHD")

        def plan(self, q_ends: Tensor, k_ends: Tensor, heads_q: int, heads_k: int, d: int, **options: object) -> None:
            assert q_ends.tolist() == [0, 113, 226]
            assert k_ends.tolist() == [0, 203, 406]
            assert (heads_q, heads_k, d) == (6, 2, 32)
            assert options == {"causal": True, "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}

        def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.unflatten(0, (2, -1)) for x in (q, k, v))
            return right(ODD, q, k, v).flatten(0, 1)

    fake = SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=Wrapper)
    monkeypatch.setattr(peers.importlib, "import_module", {"flashinfer": fake}.__getitem__)
    found, _ = find_peers(["flashinfer"])
    assert found[0].version == "unknown"
    assert isinstance(
        run_session({"fa2gen": 1.0, "flashinfer": 2.0}, found, host=False).rows[0].outcomes["flashinfer"], Timing
    )


@pytest.mark.parametrize("cell", [ODD, Cell(KernelSpec(head_dim=32), Problem(2, 64, 64, 2, 2))])
def test_xformers_masks_and_groups(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, attn_bias: object) -> Tensor:
        causal = attn_bias == "bottom-right"
        assert causal or attn_bias is None
        if q.dim() == 4:
            return right(cell, q, k, v)
        assert q.shape[2:4] == k.shape[2:4] == (2, 3)  # (batch, seqlen, kv heads, group, head_dim)
        return right(cell, q.flatten(2, 3), k[:, :, :, 0], v[:, :, :, 0]).unflatten(2, (2, 3))

    modules = {
        "xformers": SimpleNamespace(__version__="0.0"),
        "xformers.ops": SimpleNamespace(memory_efficient_attention=attend),
        "xformers.ops.fmha.attn_bias": SimpleNamespace(LowerTriangularFromBottomRightMask=lambda: "bottom-right"),
    }
    monkeypatch.setattr(peers.importlib, "import_module", modules.__getitem__)
    found, _ = find_peers(["xformers"])
    assert isinstance(
        run_session({"fa2gen": 1.0, "xformers": 2.0}, found, [cell], host=False).rows[0].outcomes["xformers"], Timing
    )


def test_sdpa_s_alignment_is_not_mixed_with_ours() -> None:
    """torch's CPU FlashAttention and its MATH formula stand in for the GPU's kernels."""
    flash, math_peer = peers._sdpa("fa2", "FLASH_ATTENTION"), peers._sdpa("cudnn", "MATH")
    square = Cell(KernelSpec(head_dim=32, causal=True), Problem(2, 65, 65, 2, 2))
    one_query = Cell(KernelSpec(head_dim=32, causal=True), Problem(2, 1, 65, 2, 2))
    rows = run_session(
        {"fa2gen": 1.0, "fa2": 2.0, "cudnn": 3.0}, [flash, math_peer], [square, one_query, ODD], host=False
    ).rows
    assert all(isinstance(one.outcomes[name], Timing) for one in rows[:2] for name in ("fa2", "cudnn"))
    outcome = rows[2].outcomes["cudnn"]
    assert outcome == Refusal("UnsupportedError: its causal mask is aligned top-left, for as many queries as keys")
    assert not any(isinstance(o, Refusal) and o.wrong for o in rows[2].outcomes.values())


def test_registry_finds_what_torch_ships() -> None:
    found, missing = find_peers(list(PEERS))
    assert [one.name for one in found][:3] == ["fa2", "cudnn", "efficient"]
    assert {one.name for one in found} | set(missing) == set(PEERS)


def test_builds_under_other_names_tell_their_version() -> None:
    assert peers._version("no-such-distribution", module=pytest) == f"{pytest.__version__} (pytest)"
    assert peers._version("no-such-distribution", module=SimpleNamespace(__version__="7")) == "7"
    assert peers._version("no-such-distribution") == "unknown"
