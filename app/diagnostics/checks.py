"""The checks of `llmbox doctor`: small functions, each yields findings."""

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from llmbox.engine.checkpoint.safetensors import read_header
from llmbox.engine.errors import EngineError, UnsupportedArchitecture
from llmbox.engine.hardware.machine import read_machine
from llmbox.engine.kv_store.folder import KVFolderUnusable
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.planning.placement import describe_interconnect
from llmbox.kernels.cpu.build import (
    NativeUnavailable,
    find_compiled,
    find_compiler,
    find_prebuilt,
    temporary_folder,
)
from llmbox.kernels.cpu.isa import KERNEL_CACHE, Level, usable_levels
from llmbox.kernels.support import known_kernels

from ..control.kv_cache import limit_bytes, open_kv_cache
from ..daemon.run import check_bind, holder_of
from ..errors import CliError
from ..lifecycle.instance import find_running
from ..lifecycle.program import Program
from ..models.catalog import hub_cache, on_disk
from ..security.key_store import KeyStore
from ..store.database_file import newest_schema, open_file, schema_of
from ..util.formatting import runs_on, size

OLDEST_TORCH = (2, 11)
LEAST_MEMORY = 1_000_000_000
LEAST_DISK = 1_000_000_000
LEAST_FILES = 1024


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check. `note` is worth knowing; only `failed` makes the exit code 10."""

    name: str
    status: Literal["ok", "note", "failed"]
    message: str
    fix: str = ""


def run_checks(program: Program) -> list[Finding]:
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += check(program)
        except OSError as error:
            name = check.__name__.removeprefix("check_")
            findings.append(Finding(name, "failed", str(error), "check that file's owner and mode"))
    return findings


def check_python(_: Program) -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def check_torch(_: Program) -> Iterator[Finding]:
    fix = f"{sys.executable} -m pip install 'torch>=2.11'"
    try:
        text = version("torch")
    except PackageNotFoundError:
        yield Finding("torch", "failed", "not installed: no engine can start", fix)
        return
    numbers = tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < OLDEST_TORCH:
        yield Finding("torch", "failed", f"{text} is older than 2.11", fix)
    else:
        yield Finding("torch", "ok", text)


def check_machine(_: Program) -> Iterator[Finding]:
    machine = read_machine()
    cpu, memory = machine.cpu, machine.memory
    named = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
    wide = [name for name in named if name in cpu.features]
    yield Finding(
        "cpu", "ok", f"{cpu.model}, {cpu.cores} cores, {' '.join(wide) or 'no vector extensions known'}"
    )
    limited = ", limited by a control group" if memory.limited_by_cgroup else ""
    text = f"{size(memory.available)} of {size(memory.total)} available{limited}"
    if memory.available < LEAST_MEMORY:
        yield Finding("memory", "failed", text, "close other programs, or unload models: llmbox unload --all")
    else:
        yield Finding("memory", "ok", text)
    for gpu in machine.gpus:
        yield Finding("gpu", "ok", f"{gpu.name}, {size(gpu.free)} of {size(gpu.total)} free")
    if len(machine.gpus) > 1:
        yield Finding("links", "ok", describe_interconnect(machine.nvlink, len(machine.gpus)))
    if not machine.gpus:
        yield Finding("gpu", "note", f"{machine.no_gpu_reason or 'none'}; models run on the CPU")


def check_kernels(program: Program) -> Iterator[Finding]:
    """Report which library the CPU kernels run from: a bundled one, or one compiled here."""
    if asked := os.environ.get("LLMBOX_KERNELS"):
        if asked in known_kernels():
            yield Finding("kernels", "note", f"LLMBOX_KERNELS asks for {asked!r}")
        else:
            fix = f"unset LLMBOX_KERNELS, or set it to one of: {', '.join(known_kernels())}"
            yield Finding("kernels", "failed", f"LLMBOX_KERNELS asks for {asked!r}: not known here", fix)
        return
    best, *others = usable_levels()
    path, problem = find_prebuilt(best)
    if problem:
        yield Finding("kernels", "note", problem, "install llmbox again")
    if path:
        yield Finding("kernels", "ok", f"C++ for {best.name}, prebuilt: {path}")
        return
    try:
        find_compiler()
    except NativeUnavailable as error:
        what, _colon, fix = str(error).partition(": ")
        yield Finding("kernels", "note", f"{what}: {_without_compiler(others)}", fix)
        return
    folder = Path(os.environ.get(KERNEL_CACHE) or program.paths.kernel_cache)
    made = find_compiled(best, folder) or find_compiled(best, temporary_folder())
    when = f"compiled in {made.parent}" if made else "to be compiled when a model is first loaded"
    yield Finding("kernels", "ok", f"C++ for {best.name}, {when}")


def _without_compiler(levels: Sequence[Level]) -> str:
    """Describe the fallback where no bundled library matches the best instruction set."""
    for level in levels:
        if find_prebuilt(level)[0]:
            return f"the prebuilt C++ kernels for {level.name} run on the CPU"
    return "PyTorch's slower kernels run on the CPU"


def check_files(_: Program) -> Iterator[Finding]:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < LEAST_FILES:
        fix = f"raise the hard limit to {LEAST_FILES}: as root, in /etc/security/limits.conf, or LimitNOFILE="
        yield Finding("open files", "failed", f"at most {hard}", fix)
    else:
        yield Finding(
            "open files", "ok", "unlimited" if hard == resource.RLIM_INFINITY else f"at most {hard}"
        )


def check_folders(program: Program) -> Iterator[Finding]:
    paths = program.paths
    for name, folder in (
        ("state", paths.state_dir),
        ("runtime", paths.runtime_dir),
        ("cache", paths.cache_dir),
    ):
        if not folder.exists():
            yield Finding(f"{name} folder", "ok", f"{folder} is made at the first start")
            continue
        status = folder.stat()
        if status.st_uid != os.geteuid():
            yield Finding(
                f"{name} folder",
                "failed",
                f"{folder} belongs to user id {status.st_uid}",
                f"chown {os.geteuid()} {folder}, or use --data-dir",
            )
        elif status.st_mode & 0o077:
            yield Finding(
                f"{name} folder", "failed", f"{folder} can be read by other users", f"chmod 700 {folder}"
            )
        else:
            yield Finding(f"{name} folder", "ok", str(folder))


def check_disk(program: Program) -> Iterator[Finding]:
    for name, folder in (("state", program.paths.state_dir), ("models", hub_cache(program.environ))):
        place = folder
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        text = f"{size(free)} free for {folder}"
        if free < LEAST_DISK:
            yield Finding(
                f"disk ({name})", "failed", text, "free some space, or move it with --data-dir or HF_HOME"
            )
        else:
            yield Finding(f"disk ({name})", "ok", text)


def check_kv_cache(program: Program) -> Iterator[Finding]:
    """Check the KV cache on disk, which is left out where it cannot be used."""
    try:
        settings = program.settings().settings.cache
    except CliError:
        return  # check_config tells
    most = limit_bytes(program.paths, settings)
    if not most:
        yield Finding("KV cache on disk", "ok", "off (cache.kv_disk_gb is 0)")
        return
    try:
        folder = open_kv_cache(program.paths, settings)
    except (KVFolderUnusable, OSError) as error:
        yield Finding("KV cache on disk", "note", f"left out: {error}")
        return
    used = sum(usage.size for usage in folder.models()) if folder is not None else 0
    yield Finding("KV cache on disk", "ok", f"{size(used)} of {size(most)} in {program.paths.kv_cache}")


def check_config(program: Program) -> Iterator[Finding]:
    try:
        server = program.settings().settings.server
        check_bind(server.host, KeyStore(program.paths.keys_file))
    except CliError as error:
        yield Finding("config", "failed", f"{error.what}: {error.why}", error.fix)
        return
    path = program.paths.config_file
    yield Finding("config", "ok", str(path) if path.exists() else f"defaults; {path} does not exist")


def check_daemon(program: Program) -> Iterator[Finding]:
    try:
        running = find_running(program.paths)
        if running is None:
            yield Finding("daemon", "note", "not running", "llmbox up")
            yield from _check_port(program)
            return
        status = program.client.get("/admin/api/status")
    except CliError as error:
        yield Finding("daemon", "failed", f"{error.what}: {error.why}", error.fix)
        return
    text = f"pid {running.pid} on {running.url}"
    if status["ready"]:
        yield Finding("daemon", "ok", text)
        if status["cause"]:
            yield Finding("models", "note", status["cause"], "llmbox ps, then llmbox logs")
        yield from _in_memory(program)
    else:
        yield Finding(
            "daemon", "failed", f"{text} is not ready: {status['cause']}", "llmbox ps, then llmbox logs"
        )


def _in_memory(program: Program) -> Iterator[Finding]:
    """Report what each loaded model runs on, and why."""
    for model in program.client.get("/admin/api/models")["models"]:
        if (info := model["info"]) is not None:
            text = "; ".join([runs_on(info), *info["notes"]])
            if info.get("kernels_problem"):
                fix = f"see llmbox logs; then llmbox unload {model['name']}, and load it again"
                yield Finding(f"loaded {model['name']}", "note", text, fix)
            else:
                yield Finding(f"loaded {model['name']}", "ok", text)


def _check_port(program: Program) -> Iterator[Finding]:
    import socket

    try:
        server = program.settings().settings.server
    except CliError:
        return  # reported by check_config
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", server.port))
        except OSError:
            holder = holder_of(server.port) or "another process listens there"
            fix = "stop it, or llmbox config set server.port N"
            yield Finding("port", "failed", f"{server.port} is taken: {holder}", fix)
            return
    yield Finding("port", "ok", f"{server.port} is free")


def check_models(program: Program) -> Iterator[Finding]:
    models = on_disk(program.environ, program.names)
    if not models:
        yield Finding("models", "note", "none on disk", "llmbox pull ORG/NAME, or name a directory")
    for model in models:
        name = f"model {model.ref.name}"
        if not model.servable:
            yield Finding(
                name, "note", "has no safetensors weights: cannot be served", "use a safetensors version"
            )
            continue
        try:
            parse_config(model.ref.path)
            for file in sorted(model.ref.path.glob("*.safetensors")):
                read_header(file)
        except EngineError as error:
            unsupported = isinstance(error, UnsupportedArchitecture)
            fix = "choose another model: llmbox ls" if unsupported else "fetch the file again"
            yield Finding(name, "note" if unsupported else "failed", str(error), fix)
            continue
        missing = _missing_files(model.ref.path)
        if missing:
            fix = f"llmbox pull {model.ref.name}" if model.ref.source == "hub" else "copy the missing files"
            yield Finding(name, "failed", f"lacks {', '.join(missing)}", fix)
        else:
            yield Finding(name, "ok", f"{size(model.size)}, {model.architecture}")


def _missing_files(folder: Path) -> list[str]:
    """Return missing files that serving needs: a tokenizer, and every shard that the index names."""
    import json

    from ..text.tokenizer.tokenizer_builder import find_source

    has_tokenizer = (folder / "tokenizer.json").is_file() or find_source(folder) is not None
    missing = [] if has_tokenizer else ["tokenizer.json"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError):
            return [*missing, "a readable model.safetensors.index.json"]
        missing += sorted(str(shard) for shard in shards if not (folder / str(shard)).is_file())
    return missing


def check_request_log(program: Program) -> Iterator[Finding]:
    """Report whether this version can write the request log. Its content is checked by `llmbox db check`."""
    path, name = program.paths.request_db, "request log"
    if not path.exists():
        return
    try:
        with open_file(path) as connection:
            schema = schema_of(connection) or ""
    except CliError as error:
        yield Finding(name, "failed", f"{error.what}: {error.why}", error.fix)
        return
    if schema > newest_schema():
        problem = f"{path} was written by a newer llmbox (schema {schema}): no request is logged"
        yield Finding(name, "failed", problem, "update llmbox, or move the file away to begin a new log")
    else:
        yield Finding(name, "ok", str(path))


CHECKS: tuple[Callable[[Program], Iterator[Finding]], ...] = (
    check_python,
    check_torch,
    check_machine,
    check_kernels,
    check_files,
    check_folders,
    check_disk,
    check_kv_cache,
    check_config,
    check_daemon,
    check_request_log,
    check_models,
)
