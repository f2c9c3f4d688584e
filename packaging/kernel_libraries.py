"""Compiles the CPU kernels for a wheel: one library for each instruction set (kernels/cpu/isa.py).

LLMBOX_WHEEL_KERNELS says which: all (the default), none, or names such as "avx2 portable". What cannot be
compiled is left out, and then compiled at the first start where a compiler is. LLMBOX_WHEEL_MACHINE names
another machine, such as aarch64, whose compiler CXX names. LLMBOX_WHEEL_TIMEOUT is the seconds that one
compiler may take (an hour by default: a loaded machine is slow).
"""

import importlib
import os
import platform
import re
import sys
import sysconfig
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

KERNELS = Path(__file__).parent.parent / "kernels" / "cpu"
CHOICE, MACHINE, TIMEOUT = "LLMBOX_WHEEL_KERNELS", "LLMBOX_WHEEL_MACHINE", "LLMBOX_WHEEL_TIMEOUT"
TIMEOUT_S = 3600
LINK = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-Wl,-Bsymbolic", "-Wl,--strip-all")
"""The library then needs the C library alone, and shows nothing of the others to torch's."""
WITHOUT = """\
The wheel carries no CPU kernels for {names} ({why}).
They are compiled at the first start of llmbox, on the machine it runs on, where a C++ compiler is there."""


def build_libraries(folder: Path) -> tuple[list[Path], list[str]]:
    """(the libraries, what to tell of those that could not be made)."""
    build = module("build")
    levels, timeout = wanted_levels(), compile_timeout()
    try:
        compiler = build.find_compiler()
    except build.NativeUnavailable as error:
        names = ", ".join(level.name for level in levels)
        return [], [WITHOUT.format(names=names, why=error)] if levels else []
    made, problems = [], []
    for level in levels:
        path = folder / build.prebuilt_path(level).name
        try:
            with tempfile.TemporaryDirectory(dir=folder) as room:
                library = Path(room) / path.name
                build.compile_library(compiler, level, library, LINK, timeout=timeout)
                build.seal(library)
                library.chmod(0o755)
                library.replace(path)
        except build.NativeUnavailable as error:
            problems.append(WITHOUT.format(names=level.name, why=error))
        else:
            made.append(path)
    return made, problems


def wanted_levels(machine: str = "") -> list[Any]:
    """Return the instruction sets to compile for `machine`; empty: LLMBOX_WHEEL_MACHINE, or this one."""
    choice = os.environ.get(CHOICE, "all").split()
    machine = machine or os.environ.get(MACHINE) or platform.machine()
    levels = [level for level in module("isa").LEVELS if level.machine in {None, machine}]
    if choice == ["none"] or sys.platform != "linux":
        return []
    names = [level.name for level in levels]
    if unknown := set(choice) - {*names, "all"}:
        sys.exit(
            f"{CHOICE}: unknown {' '.join(sorted(unknown))}; use all, none, or some of {' '.join(names)}"
        )
    return [level for level in levels if choice == ["all"] or level.name in choice]


def compile_timeout() -> float:
    text = os.environ.get(TIMEOUT, str(TIMEOUT_S))
    if not text.isdecimal() or int(text) == 0:
        sys.exit(f"{TIMEOUT}: {text!r} is no number of seconds")
    return float(text)


def wheel_tag(libraries: list[Path]) -> str:
    """Any Python 3 on this kind of machine, with a C library at least as new as these ask for."""
    machine = os.environ.get(MACHINE) or sysconfig.get_platform().partition("-")[2].replace("-", "_")
    asked = [int(minor) for path in libraries for minor in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())]
    system = f"manylinux_2_{max(asked)}" if asked else "linux"
    return f"py3-none-{system}_{machine}"


def module(name: str) -> ModuleType:
    """Of kernels/cpu: `llmbox` itself is not installed yet."""
    package = "llmbox_cpu_kernels"
    if package not in sys.modules:
        spec = spec_from_file_location(
            package, KERNELS / "__init__.py", submodule_search_locations=[str(KERNELS)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[package] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[package])
    return importlib.import_module(f"{package}.{name}")
