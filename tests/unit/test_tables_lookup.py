"""Each step of the lookup, its name, its legality on the GPU at hand, and staleness."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa2gen.constraints import default_config, default_config_on, infeasible_reason
from fa2gen.errors import TableError, UnsupportedError
from fa2gen.hardware import get_gpu, list_gpus
from fa2gen.problem import Problem
from fa2gen.spec import KernelSpec
from fa2gen.tables import Regate, lookup, save_entries
from tests.tuning_fakes import PROBLEM, entry

GPU = get_gpu("a100")
BUCKET = PROBLEM.bucket(GPU.num_sms)
NEAR, FAR = Problem(4, 8192, 8192, 16, 16), Problem(16, 512, 512, 16, 16)
SPEC = KernelSpec()


@pytest.fixture
def find(tmp_path):
    def find(rows, spec=SPEC, gpu=GPU, owner=GPU, **options):
        if rows:
            save_entries(owner, rows, root=tmp_path)
        return lookup(spec, BUCKET, gpu, roots=[tmp_path], **options)

    return find


def test_exact(find):
    row = entry(block_n=128)
    match = find([row, entry(problem=NEAR), entry(KernelSpec(dtype="fp16"))])
    assert (match.source, match.config, match.entry) == ("exact", row.config, row)
    assert (match.distance, match.stale, match.gpu) == (0, False, "a100")
    assert match.describe() == f"{row.config.slug()}: exact, predicted, from a100 fwd_d128_bf16_full_gqa1 q12_k12_w4"


def test_alignment_2_borrows_the_alignment_16_entry(find):
    match = find([entry(block_n=128), entry(KernelSpec(alignment=2), problem=NEAR)], KernelSpec(alignment=2))
    assert (match.source, match.config.block_n) == ("alignment", 128)


def test_alignment_16_never_borrows_from_alignment_2(find):
    assert find([entry(KernelSpec(alignment=2))]).source == "default"


def test_nearest_bucket(find):
    match = find([entry(problem=FAR, block_n=32, step_n=32), entry(problem=NEAR, block_n=128)])
    assert (match.source, match.config.block_n) == ("nearest bucket", 128)
    assert match.distance == 2


def test_native_head_dim_above(find):
    rows = [entry(block_n=128), entry(KernelSpec(head_dim=64), block_n=32, step_n=32)]
    match = find(rows, KernelSpec(head_dim=104))
    assert (match.source, match.config.block_n) == ("native head dim", 128)
    # 80 columns have tiles of 96, for which nobody tuned.
    assert find(rows, KernelSpec(head_dim=80)).source == "default"
    match = find([], KernelSpec(head_dim=59, alignment=2))
    assert (match.source, match.config.block_n) == ("native head dim", 32)


def test_other_dtype(find):
    match = find([entry(KernelSpec(dtype="fp16"), block_n=128), entry(KernelSpec(gqa_ratio=2))])
    assert (match.source, match.config.block_n) == ("other dtype", 128)


def test_fp16_borrows_a_proof_of_blocks_as_one_of_steps(find):
    """Whole blocks cannot be proved in fp16's range; the tiles are as good for it as for bf16."""
    row = entry(block_n=128, softmax="guarded", proof="block")
    match = find([row], KernelSpec(dtype="fp16"))
    assert (match.source, match.config) == ("other dtype", replace(row.config, proof="step"))
    assert infeasible_reason(KernelSpec(dtype="fp16"), match.config, GPU.arch) is None
    assert match.describe().startswith(f"{match.config.slug()}: other dtype with proof step instead of block, ")
    assert match.entry == row


def test_bf16_borrows_a_proof_of_steps_as_it_is(find):
    match = find([entry(KernelSpec(dtype="fp16"), softmax="guarded")])
    assert (match.source, match.config.proof, match.changes) == ("other dtype", "step", "")


def test_packed_heads_come_apart_where_there_is_one(find):
    row = entry(KernelSpec(gqa_ratio=8), block_n=128, pack_gqa=True)
    single = find([row])
    assert (single.source, single.config) == ("nearest gqa ratio", replace(row.config, pack_gqa=False))
    assert ": nearest gqa ratio with heads not packed, predicted" in single.describe()
    two = find([], KernelSpec(gqa_ratio=2))
    assert (two.config, two.changes) == (row.config, "")
    fp16 = find(
        [entry(KernelSpec(gqa_ratio=8), softmax="guarded", proof="block", pack_gqa=True)], KernelSpec(dtype="fp16")
    )
    assert fp16.changes == "proof step instead of block, heads not packed"


def test_nearest_gqa_ratio(find):
    rows = [entry(KernelSpec(gqa_ratio=16), block_n=32, step_n=32), entry(KernelSpec(gqa_ratio=2), block_n=128)]
    match = find(rows, KernelSpec(gqa_ratio=4))
    assert (match.source, match.config.block_n, match.distance) == ("nearest gqa ratio", 128, 1)


def test_relaxations_add_up(find):
    match = find([entry(KernelSpec(dtype="fp16", gqa_ratio=8), problem=FAR, block_n=128)], KernelSpec(head_dim=104))
    assert (match.source, match.config.block_n) == ("nearest gqa ratio", 128)
    assert match.relaxed == ("nearest gqa ratio", "other dtype", "native head dim", "nearest bucket")
    names = "nearest gqa ratio + other dtype + native head dim + nearest bucket"
    assert match.describe().startswith(f"{match.config.slug()}: {names}, predicted, from a100 fwd_d128_fp16_full_gqa8 ")


def test_another_gpu_of_the_same_target(find):
    match = find([entry(block_n=128)], owner=get_gpu("a30"))
    assert (match.source, match.config.block_n, match.gpu) == ("other gpu", 128, "a30")


def test_own_gpu_comes_before_another(find, tmp_path):
    save_entries(get_gpu("a30"), [entry(block_n=128)], root=tmp_path)
    match = find([entry(KernelSpec(dtype="fp16", gqa_ratio=8), problem=FAR, block_n=32, step_n=32)])
    assert (match.source, match.config.block_n) == ("nearest gqa ratio", 32)


def test_another_target_is_never_used(find):
    assert find([entry(block_n=128)], owner=get_gpu("h100")).source == "default"


def test_causal_never_relaxes(find):
    assert find([entry(KernelSpec(causal=True))]).source == "default"


def test_a_config_that_is_illegal_here_is_passed_over(find):
    # 160 KB of shared memory: legal on an A100, not on a chip that grants 99 KB.
    rows = [entry(block_n=128, num_stages=2)]
    gpu = get_gpu("rtx-3090")
    assert infeasible_reason(SPEC, rows[0].config, gpu.arch)
    assert find(rows, gpu=gpu, owner=gpu).source == "default"


def test_the_default_is_legal_on_every_gpu_for_every_head_dim(tmp_path):
    for gpu in list_gpus():
        for head_dim in range(1, 129):
            spec = KernelSpec(head_dim=head_dim, alignment=16 if head_dim % 8 == 0 else 2)
            match = lookup(spec, BUCKET, gpu, roots=[tmp_path])
            assert match.source == "default"
            assert match.config == default_config_on(spec, gpu.arch)
            assert infeasible_reason(spec, match.config, gpu.arch) is None


def test_stale_entries_are_passed_over_and_said_so(find):
    rows = [entry(template="old", block_n=128), entry(problem=NEAR, template="new", block_n=32, step_n=32)]
    match = find(rows, template_hash=lambda kind, family: "new")
    assert (match.source, match.config.block_n, match.stale) == ("nearest bucket", 32, True)
    assert "stale" in match.describe()
    match = find([], template_hash=lambda kind, family: "newest")
    assert (match.source, match.stale) == ("default", True)


def test_measured_wins_at_equal_distance_then_the_user_s(tmp_path):
    user, package = tmp_path / "user", tmp_path / "package"
    new, old = "2026-03-01T00:00:00Z", "2026-01-01T00:00:00Z"
    save_entries(GPU, [entry(utc=new, block_n=32, step_n=32)], root=user)
    save_entries(GPU, [entry(kind="measured", utc=old, block_n=128)], root=package)
    assert lookup(SPEC, BUCKET, GPU, roots=[user, package]).config.block_n == 128
    save_entries(GPU, [entry(kind="measured", utc=new, block_n=64)], root=user)
    # The user's own comes first, also where the package's is newer.
    assert lookup(SPEC, BUCKET, GPU, roots=[user, package]).config.block_n == 64
    assert lookup(SPEC, BUCKET, GPU, roots=[package, user]).config.block_n == 128
    # A fresh prediction serves while the measured entry is stale.
    save_entries(GPU, [entry(kind="measured", utc=new, template="gone")], root=tmp_path / "third")
    save_entries(GPU, [entry(utc=old, block_n=128)], root=tmp_path / "fourth")
    match = lookup(
        SPEC, BUCKET, GPU, roots=[tmp_path / "third", tmp_path / "fourth"], template_hash=lambda kind, family: "t"
    )
    assert (match.source, match.config.block_n, match.stale) == ("exact", 128, True)


@pytest.mark.parametrize("value", ["1", "true"])
def test_strict_refuses_anything_but_exact(find, monkeypatch, value):
    monkeypatch.setenv("FA2GEN_STRICT", value)
    assert find([entry()]).source == "exact"
    with pytest.raises(TableError, match=r"FA2GEN_STRICT.*other dtype.*fa2gen tune --headdim 128 --gpu a100"):
        find([], KernelSpec(dtype="fp16"))
    with pytest.raises(TableError, match="default"):
        find([], KernelSpec(causal=True))
    monkeypatch.setenv("FA2GEN_STRICT", "0")
    assert find([], KernelSpec(dtype="fp16")).source == "other dtype"
    with pytest.raises(TableError):
        find([], KernelSpec(dtype="fp16"), strict=True)


def test_a_damaged_table_does_not_stop_a_lookup(tmp_path):
    (tmp_path / "a100").mkdir()
    (tmp_path / "a100" / "fwd.json").write_text("{")
    with pytest.warns(RuntimeWarning, match="ignoring"):
        assert lookup(SPEC, BUCKET, GPU, roots=[tmp_path]).source == "default"


# ---- Families

H200 = get_gpu("h200")


def both(spec=SPEC, problem=PROBLEM, *, sm80=2.0, sm90=1.0, kind="measured", **options):
    """An H200's entries of both families for the same calls; the times say which is faster."""
    options = {"sms": H200.num_sms, "kind": kind, **options}
    return [
        entry(spec, problem, ms=sm80, **options),
        entry(spec, problem, ms=sm90, family="sm90", scheduler="dynamic", **options),
    ]


@pytest.fixture
def find_hopper(tmp_path):
    def find_hopper(rows, spec=SPEC, problem=PROBLEM, **options):
        if rows:
            save_entries(H200, rows, root=tmp_path)
        return lookup(spec, problem.bucket(H200.num_sms), H200, roots=[tmp_path], **options)

    return find_hopper


def test_the_faster_family_wins(find_hopper):
    rows = both()
    match = find_hopper(rows)
    assert (match.source, match.entry, match.stale) == ("exact", rows[1], False)
    slower = both(sm80=0.5, utc="2026-02-01T00:00:00Z")
    assert find_hopper(slower).entry == slower[0]


@pytest.mark.parametrize("wanted", ["sm80", "sm90"])
def test_only_the_families_asked_for(find_hopper, wanted):
    assert find_hopper(both(), families=(wanted,)).config.family == wanted
    assert find_hopper([], KernelSpec(causal=True), families=(wanted,)).config.family == wanted
    assert find_hopper([], families=["sm80", "sm90"]).config.family == "sm90"


def test_a_family_that_cannot_serve_the_call_makes_way(find_hopper):
    unaligned = find_hopper(both(), KernelSpec(alignment=2))
    assert (unaligned.source, unaligned.config.family) == ("alignment", "sm80")
    with pytest.raises(UnsupportedError, match=r"sm90 does not serve .* sm80 does"):
        find_hopper([], KernelSpec(alignment=2), families=("sm90",))


@pytest.mark.parametrize("is_faster", [True, False])
@pytest.mark.parametrize("relaxed", ["bucket", "dtype", "gqa_ratio"])
def test_families_are_compared_by_their_nearest_entries(find_hopper, relaxed, is_faster):
    """One that is tuned for a neighbouring size, another dtype or head ratio may be faster than an exact one."""
    spec = {"bucket": SPEC, "dtype": KernelSpec(dtype="fp16"), "gqa_ratio": KernelSpec(gqa_ratio=8)}[relaxed]
    problem = {"bucket": NEAR, "gqa_ratio": Problem(4, 4096, 4096, 16, 2)}.get(relaxed, PROBLEM)
    exact, near = both()[0], both(spec, problem, sm90=0.5 if is_faster else 90.0)[1]
    match = find_hopper([exact, near])
    assert match.entry == (near if is_faster else exact)
    assert (match.source == "exact") != is_faster
    # Strictly, what is exact is wanted.
    assert find_hopper([], strict=True).entry == exact


@pytest.mark.parametrize("stale", [False, True])
def test_families_are_compared_at_one_size_where_they_have_one(find_hopper, stale):
    """The longer of two lengths gives more operations a second, whichever family it is measured of."""
    longer = Problem(4, 8192, 8192, 16, 16)
    exact = both(problem=longer, sm80=4.0)[0]  # at twice its rate of half the length, and at that of the other family
    slow, fast = both(sm80=2.0, sm90=1.1, **({"template": "old"} if stale else {}))
    fast = replace(fast, provenance=exact.provenance)
    options = {"template_hash": lambda kind, family: exact.provenance.template_hash}
    # What is stale decides nothing.
    wanted = exact if stale else fast
    assert find_hopper([exact, slow, fast], problem=longer, **options).entry == wanted


def test_far_sizes_tell_nothing_of_a_family(find_hopper):
    """Operations a second of long sequences say nothing of single queries."""
    one = Problem(8, 1, 4096, 16, 16)
    exact, far = both(problem=one, sm80=1.0)[0], both()[1]
    assert find_hopper([exact, far], problem=one).entry == exact


def test_a_measured_family_comes_before_a_predicted_one(find_hopper):
    rows = [both()[0], both(kind="predicted")[1]]
    assert find_hopper(rows).entry == rows[0]


def test_a_stale_family_leaves_its_calls_to_the_other(find_hopper):
    today = {"sm80": "t", "sm90": "edited"}
    match = find_hopper(both(), template_hash=lambda kind, family: today[family])
    assert (match.config.family, match.stale, match.gated) == ("sm80", True, False)
    assert match.lost_family == "sm90"
    # The slower one's staleness is nobody's business.
    today = {"sm80": "edited", "sm90": "t"}
    match = find_hopper([], template_hash=lambda kind, family: today[family])
    assert (match.config.family, match.stale, match.lost_family) == ("sm90", False, None)


def test_a_gated_entry_of_the_faster_family_is_used(find_hopper):
    slow, fast = both()
    gated = replace(fast, provenance=replace(fast.provenance, regate=Regate("new", "passed", "2026-02-01T00:00:00Z")))
    match = find_hopper([slow, gated], template_hash=lambda kind, family: {"sm80": "t", "sm90": "new"}[family])
    assert (match.config.family, match.stale, match.gated) == ("sm90", True, True)


def test_the_user_s_families_come_before_the_package_s(tmp_path):
    """Times of two tables are of two machines: only those of one decide between families."""
    user, package, bucket = tmp_path / "user", tmp_path / "package", PROBLEM.bucket(H200.num_sms)
    save_entries(H200, both(sm80=3.0, sm90=2.5), root=user)
    save_entries(H200, both(sm80=1.0, sm90=2.0), root=package)
    assert lookup(SPEC, bucket, H200, roots=[user, package]).config.family == "sm90"
    assert lookup(SPEC, bucket, H200, roots=[package, user]).config.family == "sm80"


def test_every_entry_is_reachable_by_its_family(find_hopper):
    rows = both() + both(KernelSpec(causal=True), sm80=1.0, sm90=1.5)
    find_hopper(rows)
    for row in rows:
        match = find_hopper([], row.spec, families=(row.config.family,), strict=True)
        assert (match.source, match.entry) == ("exact", row)


def test_the_last_resort_on_hopper_is_its_own_family(find_hopper):
    assert find_hopper([]).config == default_config_on(SPEC, H200.arch)
    assert find_hopper([]).config.family == "sm90"
    assert find_hopper([], KernelSpec(head_dim=59, alignment=2)).config == default_config(
        KernelSpec(head_dim=59, alignment=2)
    )
