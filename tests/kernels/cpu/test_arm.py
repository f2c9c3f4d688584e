"""Kernels for Arm, compiled here and run in an emulator: exact products, and the bits of other levels."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from llmbox.kernels.cpu import build
from llmbox.kernels.cpu.isa import LEVELS, Level, cache_folder, cpu_flags

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
ARM = [level for level in LEVELS if level.machine in {"aarch64", None}]
FLAGS = ("-std=c++20", "-O1", "-pthread", "-ffp-contract=off", "-w", "-I", str(build.SOURCES))
FOUR_FUSED_LANES = ("-mfma",)
"""Flags under which the portable kernels of x86-64 have the vectors and the multiply-add of Arm."""
FLAGS_OF = {level.name: level.flags for level in LEVELS}
EMULATED_BF16 = (*FLAGS_OF["avx2"], "-DLLMBOX_EMULATED_AVX512_BF16")
TILES = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
EMULATED = {
    "amx": (*EMULATED_BF16, *TILES, "-DLLMBOX_EMULATED_TILES"),
    "avx512-bf16": EMULATED_BF16,
    "avx512-vnni": (*FLAGS_OF["avx2"], "-DLLMBOX_EMULATED_AVX512_VNNI"),
    "avx512": (*FLAGS_OF["avx2"], "-DLLMBOX_EMULATED_AVX512"),
    "avx-vnni": (*FLAGS_OF["avx2"], "-DLLMBOX_EMULATED_AVX_VNNI"),
}
"""Compiler flags of levels whose own instructions are in C++ then: they run where AVX2 does."""
FLOATS = " of floats ", " over floats "
"""In lines of products of float weights, or of keys and values, whose sums depend on the instruction set."""
CHUNKS = " over int8 "
"""In lines of attention whose chunks are longer with AMX."""

HOUR = 3600
"""Most seconds of a compiler, and of a whole model in the emulator."""

LIBCPP = (
    "-D_LIBCPP_ABI_NAMESPACE=__1",
    "-D_LIBCPP_ABI_VERSION=1",
    "-D_LIBCPP_ASSERTION_SEMANTIC_DEFAULT=_LIBCPP_ASSERTION_SEMANTIC_IGNORE",
    "-D_LIBCPP_HARDENING_MODE=_LIBCPP_HARDENING_MODE_NONE",
    "-D_LIBCPP_HAS_LOCALIZATION",
    "-D_LIBCPP_HAS_MONOTONIC_CLOCK",
    "-D_LIBCPP_HAS_MUSL_LIBC=0",
    "-D_LIBCPP_HAS_THREADS=1",
    "-D_LIBCPP_HAS_UNICODE",
    "-D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=0",
    "-D_LIBCPP_HAS_WIDE_CHARACTERS",
    "-D_LIBCPP_PSTL_BACKEND_SERIAL",
)
"""Settings of the C++ library's headers that Zig brings."""

PRODUCTS = """
#include "quantized/quant_panels.h"
#include <cstdio>
using namespace llmbox;
constexpr int K = 128, VECTORS = 2;
constexpr uint32_t FLIP = Bytes::FLIP;
template <int ROWS> bool is_exact() {
    using Sums = ByteSums<Bytes, ROWS, VECTORS>;
    static int8_t weights[VECTORS * LANES][K], rows[ROWS][K];
    const int8_t* x[ROWS];
    for (int i = 0; i < VECTORS * LANES * K; i++)
        weights[i / K][i % K] = int8_t(i < K ? -128 : i * 37 + i / 7);
    for (int i = 0; i < ROWS * K; i++) {
        rows[i / K][i % K] = int8_t(i < K ? -127 : i * 91 + i / 5);
        x[i / K] = rows[i / K];
    }
    Sums sums;
    for (int i = 0; i < ROWS * VECTORS; i++) {
        Ints begin = splat_int(1000 + i / VECTORS);
        begin[LANES - 1] += i % VECTORS;
        sums.begin(i / VECTORS, i % VECTORS, begin);
    }
    for (int k = 0; k < K; k += 4 * Sums::WORDS) {
        Words words[VECTORS][Sums::WORDS];
        for (int i = 0; i < VECTORS * LANES; i++)
            for (int w = 0; w < Sums::WORDS; w++)
                words[i / LANES][w][i % LANES] = load_word(weights[i] + k + 4 * w) ^ FLIP * 0x01010101u;
        sums.add(words, x, k);
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < VECTORS * LANES; i++) {
            int wanted = 1000 + r + (i % LANES == LANES - 1 ? i / LANES : 0);
            for (int k = 0; k < K; k++) wanted += (weights[i][k] + int(FLIP)) * rows[r][k];
            if (sums.total(r, i / LANES)[i % LANES] != wanted) return false;
        }
    return true;
}
template <int... ROWS> bool are_exact() { return (is_exact<ROWS>() && ...); }
int main() {
    if (!has_byte_products()) return puts("the CPU lacks the instructions"), 0;
    puts(are_exact<1, 2, 3, 4, 5, 6>() ? "exact" : "wrong");
}
"""

FUNCTIONS = """
#include "sampling/integer_softmax.h"
#include <cstdio>
#include <cstdlib>
using namespace llmbox;
// Digests of what functions make of every `step`-th float between -170 and 170.
template <class Of> void digest(const char* name, uint32_t step, Of of) {
    uint64_t digest = 0xcbf29ce484222325u;
    for (uint64_t n = 0; n < 2 * 0x432a0000ull; n += 16ull * step) {
        alignas(64) float x[16], y[16];
        for (int i = 0; i < 16; i++) {
            const auto at = static_cast<uint32_t>(n + i * step);
            x[i] = as_float(at >> 1 | at << 31);
        }
        for (int i = 0; i < 16; i += LANES) store(y + i, of(load(x + i)));
        for (int i = 0; i < 16; i++) digest = (digest ^ as_bits(y[i])) * 0x100000001b3u;
    }
    printf("%s %016lx\\n", name, static_cast<unsigned long>(digest));
}
int main(int, char** words) {
    const uint32_t step = atoi(words[1]);
    digest("power_of_two", step, [](Floats x) { return power_of_two(x); });
    digest("exp_negative", step, [](Floats x) { return exp_negative(x); });
    digest("exp_fine", step, [](Floats x) { return exp_fine(max(-abs(x), splat(-50.f))); });
    digest("tanh", step, [](Floats x) { return tanh(x); });
    digest("softplus", step, [](Floats x) { return softplus(x); });
    digest("multiply_add", step, [](Floats x) { return multiply_add(x, x * splat(0.7f), splat(-0.3f)); });
    digest("bfloat16", step, [](Floats x) {
        bf16 rounded[LANES];
        store(rounded, x);
        return load(rounded);
    });
}
"""


def compile_for_arm(level: Level, source: Path, program: Path) -> None:
    for tool, package in ((COMPILER, "g++-aarch64-linux-gnu"), (EMULATOR, "qemu-user-static")):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}: apt install {package}")
    run(COMPILER, *FLAGS, "-static", *level.flags, source, "-o", program)


def run(*command: object, limit: float = 300, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=limit, env=env)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("level", ARM, ids=lambda level: level.name)
def test_products_of_bytes_are_exact_and_hwcap_is_asked(level: Level, tmp_path: Path) -> None:
    source, program = tmp_path / "products.cpp", tmp_path / "products"
    source.write_text(PRODUCTS)
    compile_for_arm(level, source, program)
    lacking, exact = "the CPU lacks the instructions\n", "exact\n"
    assert run(EMULATOR, program) == exact
    assert run(EMULATOR, "-cpu", "cortex-a53", program) == (exact if level.name == "portable" else lacking)
    assert run(EMULATOR, "-cpu", "cortex-a76", program) == (lacking if level.name == "i8mm" else exact)


def test_products_of_bytes_with_avx_vnni_are_exact(tmp_path: Path) -> None:
    if "avx2" not in cpu_flags():
        pytest.skip("this machine cannot run AVX2")
    source, program = tmp_path / "products.cpp", tmp_path / "products"
    source.write_text(f'#include "{Path(__file__).parent / "emulated_vectors.h"}"\n{PRODUCTS}')
    run(*build.find_compiler(), *FLAGS, *EMULATED["avx-vnni"], source, "-o", program)
    assert run(program) == "exact\n"


@pytest.mark.nightly
@pytest.mark.slow
def test_every_operation_has_the_bits_of_the_portable_kernels(tmp_path: Path) -> None:
    driver = Path(__file__).parent / "sanitized.cpp"
    digests = {}
    for level in ARM:
        program = tmp_path / level.name
        compile_for_arm(level, driver, program)
        digests[level.name] = run(EMULATOR, program, "digests").splitlines()
    portable = digests["portable"]
    assert portable[-1] == "clean"
    assert len(portable) > 400
    assert digests["dotprod"] == digests["i8mm"] == portable
    if "fma" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this machine cannot run fused multiply-adds to compare with")
    run(*build.find_compiler(), *FLAGS, *FOUR_FUSED_LANES, driver, "-o", tmp_path / "here")
    assert run(tmp_path / "here", "digests").splitlines() == portable


@pytest.mark.nightly
@pytest.mark.slow
def test_without_products_of_floats_all_instruction_sets_have_the_same_bits(tmp_path: Path) -> None:
    """Those of this machine, what it lacks with the instructions in C++, and Arm in the emulator."""
    driver = Path(__file__).parent / "sanitized.cpp"
    programs = {}
    levels = [level for level in LEVELS if level.machine in {"x86_64", None} and level.needs <= cpu_flags()]
    here = {level.name: level.flags for level in levels if level.name != "amx"}
    builds = (EMULATED if "avx2" in here else {}) | here
    for name, flags in builds.items():
        program = tmp_path / name
        run(*build.find_compiler(), *FLAGS, *flags, driver, "-o", program, limit=HOUR)
        programs[name] = (program, "digests")
    if shutil.which(COMPILER) and shutil.which(EMULATOR):
        compile_for_arm(ARM[0], driver, tmp_path / "arm")
        programs["arm"] = (EMULATOR, tmp_path / "arm", "digests")
    found = {name: run(*program, limit=HOUR).splitlines() for name, program in programs.items()}
    wanted = found["portable"]
    assert wanted[-1] == "clean"
    assert len(wanted) > 6000
    for name, lines in found.items():
        left_out = (*FLOATS, CHUNKS) if name == "amx" else FLOATS
        assert without(left_out, lines) == without(left_out, wanted), name


@pytest.mark.nightly
@pytest.mark.slow
def test_functions_of_numbers_are_the_same(tmp_path: Path) -> None:
    """Every fifth float on instruction sets with fused multiply-adds; elsewhere every 997th."""
    source = tmp_path / "functions.cpp"
    source.write_text(FUNCTIONS)
    fused = [level for level in LEVELS if level.needs and level.needs <= cpu_flags() and level.name != "amx"]
    portable = next(level for level in LEVELS if not level.needs)
    digests: dict[str, set[str]] = {"5": set(), "997": set()}
    for level in (*fused, portable):
        program = tmp_path / level.name
        run(*build.find_compiler(), *FLAGS, "-O2", *level.flags, source, "-o", program)
        for step, found in digests.items():
            if step == "997" or level is not portable:
                found.add(run(program, step))
    if shutil.which(COMPILER) and shutil.which(EMULATOR):
        compile_for_arm(portable, source, tmp_path / "arm")
        digests["997"].add(run(EMULATOR, tmp_path / "arm", "997"))
    assert {step: len(found) for step, found in digests.items()} == {"5": 1, "997": 1}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_whole_models_answer_as_on_x86(tmp_path: Path, quant: str) -> None:
    """The built-in model in the emulator, with every disturbance; takes minutes."""
    root = Path(os.environ.get("LLMBOX_ARM_ROOT") or pytest.skip("needs LLMBOX_ARM_ROOT: see arm_root.py"))
    compiler = [shutil.which(COMPILER) or pytest.skip(f"needs {COMPILER}: apt install g++-aarch64-linux-gnu")]
    for level in ARM:  # the emulated process would compile what is missing, but within less time
        library = cache_folder() / build.library_name(level, compiler)
        if not build.is_intact(library):
            made = tmp_path / library.name
            build.compile_library(compiler, level, made, timeout=HOUR)
            build.seal(made)
            made.chmod(0o700)
            shutil.move(made, library)
    tree = Path(__file__).parents[3]
    asked = (tree / "tests/bench/portable.py", "--quant", quant, "--requests", 3, "--new", 16, "--seeds", 1)
    asked += ("--seconds", HOUR, "--answers", tmp_path / "answers.json")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = f"{tree / 'packaging/tree'}:{tree / 'tests'}"
    assert run(sys.executable, "-P", *asked, env=env, limit=HOUR).startswith("0 of ")
    found = run(root / "usr/bin/python", "-P", *asked, env=env | {"CXX": COMPILER}, limit=HOUR)
    assert found.startswith("0 of ")
    assert all(f"cpu {level.name} batch" in found for level in ARM)
    (kept,) = json.loads((tmp_path / "answers.json").read_text()).values()
    assert [each["machine"] for each in kept.values()] == ["x86_64"]


def without(kinds: Sequence[str], lines: list[str]) -> list[str]:
    return [line for line in lines if not any(kind in line for kind in kinds)]


@pytest.mark.parametrize("level", ARM, ids=lambda level: level.name)
def test_the_sources_are_valid_for_macos(level: Level, tmp_path: Path) -> None:
    """Parsed and checked against the system's headers. Nothing is linked or run."""
    zig = pytest.importorskip("ziglang", reason="needs headers of macOS: pip install ziglang")
    place = Path(zig.__file__).parent
    whole = tmp_path / "all.cpp"
    whole.write_text("".join(f'#include "{path}"\n' for path in sorted(build.SOURCES.rglob("*.cpp"))))
    headers = ("libcxx/include", "include", "libc/include/any-darwin-any")
    folders = [word for each in headers for word in ("-isystem", place / "lib" / each)]
    target = (
        "--no-default-config",
        "-target",
        "aarch64-apple-macosx15.0.0-unknown",
        "-nostdinc",
        "-nostdinc++",
    )
    run(
        *(place / "zig", "clang", "-fsyntax-only", whole, *target, *LIBCPP, *folders, *FLAGS[:1], *FLAGS[4:]),
        *level.flags,
    )
