"""Finding nvcc, knowing its build without running it, and reading ptxas's report."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from fa2gen.compile import nvcc as nvcc_module
from fa2gen.compile.entry import checksum
from fa2gen.compile.invoke import run_nvcc
from fa2gen.compile.nvcc import find_nvcc, identify_nvcc, key_flags, nvcc_command, nvcc_options
from fa2gen.compile.ptxas import ResourceUsage, parse_ptxas, performance_remarks, require_asynchronous
from fa2gen.errors import CompileError, ToolchainError

VERSION = """nvcc: NVIDIA (R) Cuda compiler driver
Cuda compilation tools, release {release}, V{release}.{patch}
Build cuda_{release}.r{release}/compiler.123_0
"""


def fake_nvcc(folder: Path, release: str = "13.0", patch: int = 88) -> Path:
    """An nvcc that answers --version and --dryrun, and writes a line to ``calls`` whenever it runs."""
    binaries = folder / "bin"
    (folder / "nvvm" / "bin").mkdir(parents=True, exist_ok=True)
    binaries.mkdir(exist_ok=True)
    (folder / "nvvm" / "bin" / "cicc").write_text("cicc of " + release)
    (binaries / "ptxas").write_text("ptxas of " + release)
    script = binaries / "nvcc"
    script.write_text(
        f"""#!/bin/sh
echo "$1" >> {folder}/calls
if [ "$1" = --version ]; then
cat <<'END'
{VERSION.format(release=release, patch=patch)}END
else
cat <<'END'
#$ _HERE_={binaries}
#$ TOP={binaries}/..
#$ CICC_PATH={binaries}/../nvvm/bin
END
fi
"""
    )
    script.chmod(0o755)
    return script


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines())


@pytest.fixture(autouse=True)
def _nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No nvcc anywhere, nothing remembered; tests add what they need."""
    for name in ("FA2GEN_NVCC", "CUDA_HOME", "CUDA_PATH", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("FA2GEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(nvcc_module, "_wheel_folders", list)
    monkeypatch.setattr(nvcc_module, "_identified", {})
    real_access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: not str(path).startswith("/usr/local/cuda") and real_access(path, mode)
    )


def test_missing_nvcc_says_how_to_get_one() -> None:
    if shutil.which("nvcc"):
        pytest.skip("an nvcc lies in /usr/bin")
    with pytest.raises(ToolchainError, match=r"no nvcc found.*pip install \"fa2gen\[nvcc\]\".*FA2GEN_NVCC"):
        find_nvcc()


def test_named_nvcc_comes_first_and_must_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path, named = fake_nvcc(tmp_path / "a"), fake_nvcc(tmp_path / "b", "12.9", 86)
    monkeypatch.setenv("PATH", f"{on_path.parent}:/usr/bin:/bin")
    assert find_nvcc().path == on_path
    monkeypatch.setenv("FA2GEN_NVCC", str(named))
    assert find_nvcc().path == named
    assert find_nvcc().version == (12, 9, 86)
    monkeypatch.setenv("FA2GEN_NVCC", str(tmp_path / "nothing"))
    with pytest.raises(ToolchainError, match=r"FA2GEN_NVCC is .*nothing, which is not a program"):
        find_nvcc()


def test_order_of_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, path, wheel = (fake_nvcc(tmp_path / name) for name in ("home", "path", "wheel"))
    monkeypatch.setenv("CUDA_PATH", str(path.parents[1]))
    assert find_nvcc().path == path
    monkeypatch.setenv("CUDA_HOME", str(home.parents[1]))
    assert find_nvcc().path == home
    monkeypatch.setattr(nvcc_module, "_wheel_folders", lambda: [wheel.parents[1]])
    assert find_nvcc().path == wheel


def test_wheel_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name in ("cu13", "cu14", "cublas", "cu12extra"):
        (tmp_path / "nvidia" / name).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert nvcc_module._wheel_folders() == [tmp_path / "nvidia" / "cu14", tmp_path / "nvidia" / "cu13"]


def test_broken_nvcc_on_path_is_passed_over_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, good = fake_nvcc(tmp_path / "broken"), fake_nvcc(tmp_path / "good")
    broken.write_text("#!/bin/sh\necho hello\n")
    monkeypatch.setenv("PATH", f"{broken.parent}:/usr/bin:/bin")
    with pytest.raises(ToolchainError, match=r"broken.*does not answer --version like nvcc"):
        find_nvcc()
    monkeypatch.setenv("CUDA_HOME", str(good.parents[1]))
    assert find_nvcc().path == good


def test_wrapper_script_leads_to_the_toolkit(tmp_path: Path) -> None:
    real = fake_nvcc(tmp_path / "toolkit")
    wrapper = tmp_path / "elsewhere" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    nvcc = identify_nvcc(wrapper)
    assert nvcc.path == wrapper
    assert nvcc.root == tmp_path / "toolkit"
    assert nvcc.build_id == identify_nvcc(real).build_id


def test_build_is_asked_once_and_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = fake_nvcc(tmp_path / "a")
    first = identify_nvcc(script)
    asked = calls(tmp_path / "a")
    assert identify_nvcc(script) == first
    # As another process: the answer comes from the cache folder.
    monkeypatch.setattr(nvcc_module, "_identified", {})
    assert identify_nvcc(script) == first
    assert calls(tmp_path / "a") == asked
    # cicc comes in a package of its own: `nvcc --version` does not change when it does.
    (tmp_path / "a" / "nvvm" / "bin" / "cicc").write_text("another cicc")
    changed = identify_nvcc(script)
    assert calls(tmp_path / "a") > asked
    assert changed.build_id != first.build_id
    assert changed.version == first.version


@pytest.mark.parametrize("compilers", ["[]", '{"%s": 3}', '{"%s": {"files": []}}', '{"%s": {"files": [[1]]}}'])
def test_memo_of_no_known_shape_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilers: str) -> None:
    script = fake_nvcc(tmp_path / "a")
    expected = identify_nvcc(script)
    monkeypatch.setattr(nvcc_module, "_identified", {})
    known = json.loads(compilers.replace("%s", str(script)))
    (tmp_path / "cache" / "toolchains.json").write_text(json.dumps({"compilers": known, "checksum": checksum(known)}))
    assert identify_nvcc(script) == expected


@pytest.mark.parametrize(
    "damage", ["", "[]", "{", "[" * 100_000, "bit", "version", "others may write", "pipe", "folder", "dead link"]
)
def test_damaged_memo_is_ignored_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    script = fake_nvcc(tmp_path / "a")
    expected = identify_nvcc(script)
    path = tmp_path / "cache" / "toolchains.json"
    good = path.read_bytes()
    if damage == "bit":
        path.write_bytes(good.replace(b"36", b"37").replace(b"88", b"89"))
    elif damage == "version":
        path.write_bytes(good.replace(b"[13, 0, 88]", b"[13, 9, 88]"))
    elif damage == "others may write":
        path.chmod(0o602)
    elif damage in ("pipe", "folder", "dead link"):
        path.unlink()
        {"pipe": os.mkfifo, "folder": os.mkdir, "dead link": lambda p: os.symlink("nowhere", p)}[damage](path)
    else:
        path.write_text(damage)
    monkeypatch.setattr(nvcc_module, "_identified", {})
    asked = calls(tmp_path / "a")
    assert identify_nvcc(script) == expected
    assert calls(tmp_path / "a") > asked
    monkeypatch.setattr(nvcc_module, "_identified", {})
    asked = calls(tmp_path / "a")
    assert identify_nvcc(script) == expected
    assert (calls(tmp_path / "a") == asked) == (damage != "folder"), "written anew, unless a folder is in the way"
    assert not list((tmp_path / "cache" / "tmp").iterdir())


def test_finding_nvcc_does_not_need_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("FA2GEN_CACHE_DIR", str(tmp_path / "open"))
    assert identify_nvcc(fake_nvcc(tmp_path / "a")).version == (13, 0, 88)
    assert not list((tmp_path / "open").iterdir())


@pytest.mark.parametrize(
    ("release", "target", "needed"),
    [("11.4", "sm_80", "11.8"), ("11.8", "sm_90a", "12.0"), ("12.0", "sm_120", "12.8"), ("12.6", "sm_100", "12.8")],
)
def test_too_old_nvcc_names_the_release_needed(tmp_path: Path, release: str, target: str, needed: str) -> None:
    nvcc = identify_nvcc(fake_nvcc(tmp_path / "a", release))
    with pytest.raises(ToolchainError, match=f"{target} needs CUDA {needed} or newer"):
        nvcc.require(target)
    identify_nvcc(fake_nvcc(tmp_path / "b", needed)).require(target)


def test_one_list_of_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = identify_nvcc(fake_nvcc(tmp_path / "a"))
    options = nvcc_options("sm_90")
    assert nvcc_command(nvcc, "sm_90") == [str(nvcc.path), "--cubin", *options, "kernel.cu"]
    assert options[-2:] == ["-arch", "sm_90"]
    assert not [option for option in options if option.startswith("-I")]
    assert key_flags("sm_90") == options
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-g")
    assert key_flags("sm_90") != options, "nvcc obeys this variable, so the key must know it"


# ---- ptxas

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'other' for 'sm_80'
ptxas info    : Function properties for other
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 360 bytes cmem[0]
ptxas info    : Compile time = 3.651 ms
ptxas info    : Compiling entry function 'fwd' for 'sm_80'
ptxas info    : Function properties for fwd
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 3 barriers, 16 bytes cumulative stack size, 512 bytes smem, 528 bytes cmem[0]
ptxas info    : Compile time = 377.819 ms
"""


def test_no_room_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = nvcc_module.Nvcc(tmp_path / "nvcc", (13, 0, 88), "13.0.88")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(ToolchainError, match=r"temporary files for nvcc.*TMPDIR"):
        run_nvcc("", "sm_80", nvcc)


def test_report_of_one_kernel_among_several() -> None:
    assert parse_ptxas(LOG, "fwd") == ResourceUsage(255, 12, 8, 16, 512, 3)
    assert parse_ptxas(LOG, "other") == ResourceUsage(8, 0, 0, 0, 0, 0)
    assert parse_ptxas(LOG, "fwd").spills
    assert not parse_ptxas(LOG, "other").spills


def test_report_of_an_older_toolkit() -> None:
    log = LOG.replace(", used 3 barriers", "").replace("512 bytes smem", "512+16 bytes smem")
    assert parse_ptxas(log, "fwd") == ResourceUsage(255, 12, 8, 16, 512, 0)


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("", r"no resource usage for kernel fwd \(kernels in its output: none\)"),
        (LOG.replace("'fwd'", "'fwd2'"), r"kernels in its output: other, fwd2"),
        (LOG[: LOG.rindex("ptxas info    : Used")], "the register line for kernel fwd is missing"),
        (LOG[: LOG.rindex("    16 bytes")], "the stack frame line for kernel fwd is missing"),
        (LOG.replace("16 bytes stack frame", "sixteen bytes stack frame"), "the stack frame line"),
    ],
)
def test_incomplete_report_is_an_error(log: str, message: str) -> None:
    with pytest.raises(CompileError, match=message) as raised:
        parse_ptxas(log, "fwd")
    assert raised.value.log == log


def test_remarks_about_lost_speed() -> None:
    serialized = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources for the wgmma pipeline in the function 'fwd'"
    )
    assert performance_remarks(LOG) == ()
    assert performance_remarks(f"{LOG}{serialized}\n{serialized}\n") == (serialized,)


@pytest.mark.parametrize(
    "line",
    [
        "ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources for the function 'kernel_a'",
        "ptxas warning : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register "
        "requirements.",
        "ptxas info    : setmaxnreg ignored; unable to determine register count at entry",
    ],
)
def test_a_kernel_that_ptxas_gave_up_on_is_refused(line: str) -> None:
    with pytest.raises(CompileError, match="gave up on kernel_a as it is written: ptxas") as caught:
        require_asynchronous(f"{LOG}{line}\n", "kernel_a")
    assert line in str(caught.value)
    assert line in caught.value.full_text


def test_a_fence_that_ptxas_put_in_is_fine() -> None:
    line = (
        "ptxas info    : (C7519) warpgroup.arrive is injected in around line 1696 by compiler to allow use of "
        "registers in GMMA in function 'kernel_a'"
    )
    require_asynchronous(f"{LOG}{line}\n", "kernel_a")


def test_the_suffix_of_a_target_is_nvcc_s() -> None:
    assert nvcc_options("sm_90a")[-2:] == ["-arch", "sm_90a"]
