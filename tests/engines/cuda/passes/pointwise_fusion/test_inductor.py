"""Compiled groups: the same values, also where they are no numbers, in the same memory layout; bounded, kept, never fatal."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from msplit.engines.cuda.compile import optimize
from msplit.engines.cuda.device import device as devices
from msplit.engines.cuda.ir.windows import TO_TF32, to_tf32
from msplit.engines.cuda.kernels import toolchain
from msplit.engines.cuda.passes.pointwise_fusion import fuse as compiler
from msplit.engines.cuda.passes.pointwise_fusion.fuse import Compiler, Kernel, fuse, layout, longest_chain, observe
from msplit.engines.cuda.passes.pointwise_fusion.outline import Body, Call
from msplit.engines.cuda.passes.tracing import trace
from msplit.formats import files
from tests.engines.cuda.cases import CPU, bits, flat_of, kernels, run

FLOAT = 1
compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on the CPU")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    """One folder for all tests of this file: each new one would compile Inductor's headers anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "kernels"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(devices, "_DEVICES", {})


@pytest.fixture(scope="module", autouse=True)
def _without_special_instructions():
    """PyTorch's compiler builds and loads six programs to find instructions for whole numbers and bfloat16, which nothing here has."""
    compiler.load()
    from torch._inductor.cpu_vec_isa import VecISA

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(VecISA, "check_build", lambda self, code: False)
        yield


def call(op, *arguments, **attrs):
    return Call(op, attrs, tuple(arguments))


X, Y = (-1, 0), (-1, 1)
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3e38, 88.8, -104.0, 1e-8, 7.0, -2.5]


@compiles
def test_nan_infinity_and_signed_zeros_come_out_as_from_the_ops_themselves():
    ops = ["Maximum", "Minimum", "RealDiv", "DivNoNan", "Xlogy", "Less"]
    unary = ["Relu", "Relu6", "Sigmoid", "Softplus", "Sign", "Floor"]
    calls = [call(op, X, Y) for op in ops] + [call(op, X) for op in unary]
    calls.append(call("Select", (ops.index("Less"), 0), X, (ops.index("RealDiv"), 0)))
    either_zero = {"Relu6"}  # of -0: TensorFlow's own kernels differ in it
    body = Body(tuple(calls), 2, tuple((number, 0) for number in range(len(calls))))
    values = np.array(SPECIAL, np.float32)
    x, y = (torch.from_numpy(part.copy().reshape(-1)) for part in np.meshgrid(values, values))
    with torch.no_grad(), toolchain.kept():
        run_compiled, _, _ = compiler.compile_group(body, [x, y])
    for made, wanted, made_by in zip(run_compiled(x, y), body(x, y), calls, strict=True):
        torch.testing.assert_close(made, wanted, equal_nan=True, rtol=2e-6, atol=2e-8, msg=made_by.op)
        if made.is_floating_point() and made_by.op not in either_zero:
            zero = (wanted == 0) & (made == 0)
            assert torch.equal(torch.signbit(made[zero]), torch.signbit(wanted[zero])), made_by.op


@compiles
@pytest.mark.parametrize("shape", [(256,), (4, 8, 8)])
def test_results_that_are_rounded_to_tf32_come_from_the_same_kernel(shape):
    body = Body((call("Neg", X), call("AddV2", (0, 0), Y), call(TO_TF32, (1, 0))), 2, ((2, 0), (1, 0)))
    x = torch.tensor(np.array(SPECIAL, np.float32)).repeat(16).reshape(shape)
    y = torch.randn(shape[::-1], generator=torch.Generator().manual_seed(0)).permute(*range(len(shape))[::-1])
    with torch.no_grad(), toolchain.kept():
        run_compiled, count, _ = compiler.compile_group(body, [x, y])
    rounded, plain = run_compiled(x, y)
    assert count == 1
    assert longest_chain(body) == 2, "it is no kernel that is saved"
    torch.testing.assert_close(plain, y - x, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(rounded, to_tf32(plain), rtol=0, atol=0, equal_nan=True)


@compiles
def test_layouts_are_kept_and_another_layout_runs_op_by_op():
    body = Body((call("Neg", X), call("AddV2", (0, 0), Y), call("Tanh", (1, 0))), 2, ((0, 0), (2, 0)))
    x, y = (torch.randn(2, 3, 5, 4).permute(0, 2, 3, 1) for _ in range(2))
    kernel = Compiler(CPU).kernel(body, (layout(x), layout(y)))
    assert isinstance(kernel, Kernel), kernel
    for inputs in ((x, y), (x.contiguous(), y)):
        for made, wanted in zip(kernel(*inputs), body(*inputs), strict=True):
            assert made.stride() == wanted.stride()
            torch.testing.assert_close(made, wanted)


@compiles
def test_a_kernel_for_aligned_tensors_is_not_started_on_others(monkeypatch):
    """On a GPU, where a kernel loads 16 bytes at once, that would be an error of CUDA's: rows of a sum begin one element behind."""
    monkeypatch.setattr(compiler, "_begins_between", lambda tensor: bool(tensor.data_ptr() % 16))
    body = Body((call("Neg", X), call("Exp", (0, 0))), 1, ((1, 0),))
    aligned, between = torch.randn(16), torch.randn(17)[1:]
    assert [layout(one)[3] for one in (aligned, between)] == [True, False]
    runs = {}
    for lies in (layout(aligned), layout(between)):
        (example,) = compiler.examples([lies], CPU)
        assert layout(example) == lies
        kernel = Compiler(CPU).kernel(body, (lies,))
        assert isinstance(kernel, Kernel), kernel
        for given in (aligned, between):
            called: list[int] = []
            counted = Kernel(kernel.body, kernel.layouts, lambda *x, run=kernel.run, at=called: at.append(1) or run(*x))
            torch.testing.assert_close(counted(given)[0], torch.exp(-given))
            runs[lies[3], given is aligned] = bool(called)
    assert runs == {(True, True): True, (True, False): False, (False, True): True, (False, False): True}
    assert compiler.unpacked_layouts(compiler.packed_layouts((lies,))) == (lies,)


@compiles
def test_what_was_compiled_is_found_on_the_disk_and_in_memory(monkeypatch):
    body = Body((call("Exp", X), call("Neg", (0, 0)), call("Softplus", (1, 0))), 1, ((2, 0),))
    lies = (layout(torch.zeros(7, 9)),)
    first = Compiler(CPU)
    kernel = first.kernel(body, lies)
    assert first.kernel(Body(body.calls, 1, body.outputs), lies) is kernel
    assert (first.report.compiled, first.report.cached) == (1, 0)
    monkeypatch.setattr(devices, "_DEVICES", {})
    second = Compiler(CPU)
    assert isinstance(second.kernel(body, lies), Kernel)
    assert (second.report.compiled, second.report.cached) == (1, 1)
    assert second.report.seconds < first.report.seconds
    assert list(Path(os.environ["XDG_CACHE_HOME"], "msplit", "kernels").iterdir())
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def cell():
    """A GraphDef of an LSTM cell's gates behind a product, and what is fed."""
    from tests.engines.cuda.random_graphs import _Graph

    g = _Graph(lambda strategy: 0)
    x = g.placeholder("x", (3, 4))
    product = g.node("MatMul", [x, g.normal(4, 8)], T=FLOAT, transpose_a=False, transpose_b=False)
    parts = g.node("Split", [g.constant(np.int32(1)), product], T=FLOAT, num_split=2)
    gate = g.node("Sigmoid", [parts], T=FLOAT)
    value = g.node("Tanh", [f"{parts}:1"], T=FLOAT)
    state = g.node("Mul", [gate, value], T=FLOAT)
    total = g.node("Sum", [state, g.constant(np.array([1], np.int32))], T=FLOAT, Tidx=3, keep_dims=True)
    g.node("Neg", [total], T=FLOAT)
    return flat_of(g.graph_def), {"x": np.ones((3, 4), np.float32)}


def fused(flat, feeds, **options):
    graph = optimize(flat, feeds, CPU).graph
    done = fuse(graph, observe(graph, feeds, CPU, trace, nchw=False), CPU, **options)
    return done, trace(graph, feeds, CPU)


@compiles
def test_nothing_is_timed_while_a_kernel_is_compiled(monkeypatch):
    """It was, by the host's clock, and then once more by the device's, which chooses."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.utils import fresh_cache

    timed = []
    monkeypatch.setattr(PythonWrapperCodegen, "generate_and_run_autotune_block", lambda self: timed.append(self))
    own = PythonWrapperCodegen.generate_and_run_autotune_block
    body = Body((Call("Exp", {}, ((-1, 0),)), Call("Tan", {}, ((0, 0),))), 1, ((1, 0),))
    with fresh_cache():
        _, count, cached = compiler.compile_group(body, [torch.rand(3, 17)])
    assert (count, cached) == (1, False)
    assert timed == []
    assert PythonWrapperCodegen.generate_and_run_autotune_block is own


def test_threads_compile_one_after_the_other_and_waiting_is_not_compiling(monkeypatch):
    """What one sets for the compiler and sets back would be left set by two. Who waited for long ran op by op, had it counted."""
    inside, most = [], []

    def compile_group(body, inputs):
        inside.append(body)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        return body, 1, False

    monkeypatch.setattr(compiler, "compile_group", compile_group)
    compilers = [Compiler(CPU) for _ in range(4)]
    bodies = [Body((call("Exp", X), call("Neg", (0, 0))), 1, ((number % 2, 0),)) for number in range(4)]
    lies = (layout(torch.zeros(7, 9)),)
    began = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda one, body: one.kernel(body, lies), compilers, bodies))
    assert all(isinstance(one, Kernel) for one in made)
    assert most == [1] * len(most)
    assert sum(one.report.seconds for one in compilers) < time.perf_counter() - began


@compiles
def test_a_model_runs_on_its_compiled_kernels():
    flat, feeds = cell()
    wanted = run(flat, feeds)
    found = run(flat, feeds, 3, fuse=True, compile=True)
    assert all(np.allclose(found[name], value, rtol=1e-6) for name, value in wanted.items())
    done, program = fused(flat, feeds)
    assert kernels(program) == ["MatMul", "_FusedPointwise"]
    facts = done.facts()
    assert (facts["fused_groups"], facts["fused_ops"], facts["fused_kernels"]) == (1, 5, 1)
    assert facts["compile_seconds"] >= 0


def test_no_time_to_compile_leaves_the_graph_as_it_is():
    flat, feeds = cell()
    done, program = fused(flat, feeds, seconds=0)
    assert kernels(program) == ["MatMul", "Mul", "Neg", "Sigmoid", "Sum", "Tanh"]
    assert done.facts()["not_fused"] == {"compiling took more than 0 s": 1}


def test_a_compiler_that_fails_is_no_error(monkeypatch):
    def broken(body, examples):
        raise RuntimeError("no Triton here")

    monkeypatch.setattr(compiler, "compile_group", broken)
    flat, feeds = cell()
    done, program = fused(flat, feeds)
    assert "_FusedPointwise" not in kernels(program)
    assert done.facts()["not_fused"] == {"the compiler failed: RuntimeError: no Triton here": 1}
    assert bits(run(flat, feeds, fuse=True, compile=True)) == bits(run(flat, feeds))


def test_a_group_of_several_kernels_is_tried_again_without_its_reduction(monkeypatch):
    def inductor(body, examples):
        return body, 9 if any(call.op == "Sum" for call in body.calls) else 1, False

    monkeypatch.setattr(compiler, "compile_group", inductor)
    flat, feeds = cell()
    done, program = fused(flat, feeds)
    assert kernels(program) == ["MatMul", "Neg", "Sum", "_FusedPointwise"]
    assert done.facts()["not_fused"] == {"they would be 9 kernels": 1}


def test_several_kernels_are_taken_where_the_ops_one_after_the_other_are_more():
    body = Body(
        (call("Exp", X), call("Reshape", (0, 0), np.array([4])), call("Neg", (1, 0)), call("Abs", X)),
        1,
        ((2, 0), (3, 0)),
    )
    assert longest_chain(body) == 2


def test_where_no_folder_can_be_written_one_is_made_and_taken_away(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert toolchain.folder() is None
    with toolchain.kept():
        used = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert used.is_dir()
    assert not used.exists()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_a_folder_that_the_user_chose_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with toolchain.kept():
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/var/tmp/torchinductor_somebody")
    with toolchain.kept():
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(toolchain.folder())
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/var/tmp/torchinductor_somebody"


@pytest.fixture
def shared(tmp_path):
    """A folder that anybody may write to."""
    made = tmp_path / "shared"
    made.mkdir()
    made.chmod(0o777)
    return made


@pytest.mark.parametrize("below", [False, True])
def test_a_folder_that_others_may_write_to_is_not_used(shared, monkeypatch, below):
    chosen = shared / "mine" if below else shared
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(chosen))
    with toolchain.kept():
        assert not Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(shared)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(chosen)
    (said,) = toolchain.refused_folders()
    assert str(chosen) in said
    assert f"anybody may write to {shared}" in said
    assert "TORCHINDUCTOR_CACHE_DIR" in said


def test_the_default_folder_is_not_used_where_others_may_write_to_it(shared, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared))
    assert toolchain.folder() is None
    with toolchain.kept():
        assert not Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(shared)
    shared.chmod(0o755)
    assert toolchain.folder() == shared / "msplit" / "kernels"
    assert toolchain.folder().stat().st_mode & 0o077 == 0
    assert toolchain.refused_folders() == []


def test_triton_gets_a_folder_of_its_own_where_others_may_write_to_its_folder(shared, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(shared))
    assert any("TRITON_CACHE_DIR" in said for said in toolchain.refused_folders())
    toolchain.guard_triton()
    used = Path(os.environ["TRITON_CACHE_DIR"])
    assert used != shared
    assert toolchain.writers(used) is None
    toolchain.guard_triton()
    assert os.environ["TRITON_CACHE_DIR"] == str(used)


@pytest.mark.parametrize(
    ("mode", "owner", "said"), [(0o755, 12345, "another user"), (0o775, None, "a group"), (0o1777, None, "anybody")]
)
def test_who_else_may_write_to_a_folder(tmp_path, monkeypatch, mode, owner, said):
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(mode)
    assert toolchain.writers(tmp_path) is None
    monkeypatch.setattr(files, "_is_own_group", lambda group: False)
    if owner is not None and os.getuid():
        monkeypatch.setattr(toolchain.os, "getuid", lambda: owner)
    elif owner is not None:
        os.chown(folder, owner, -1)
    assert said in toolchain.writers(folder)


def test_a_link_into_a_shared_folder_is_found_out(shared, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(shared)
    assert f"anybody may write to {shared}" in toolchain.writers(link / "kernels")


def test_doctor_and_bench_say_that_a_folder_is_not_used(shared, monkeypatch):
    from msplit.cli.doctor import _kernels
    from msplit.engines.cuda import coverage

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared))
    (found,) = _kernels()
    assert "not used" in found.text
    assert "anybody may write" in found.text
    assert found.text in coverage.toolchain().refused[0]
