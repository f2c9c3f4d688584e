"""Every benchmark with options starts by the command that its docstring and the documentation name."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
EXCEPT = {"ray_router.py"}
"""Scripts that need an optional package."""

# One process for all: it imports torch once. Each script gets the path and the environment of a new process.
START = """
import os, runpy, sys
path, environ = list(sys.path), dict(os.environ)
for script in sys.argv[1:]:
    own = os.path.dirname(script)
    sys.path[:], sys.argv = path, [script, "--help"]
    os.environ.clear()
    os.environ.update(environ)
    try:
        runpy.run_path(script, run_name="__main__")
        print(script, "does not read its arguments")
    except SystemExit as end:
        if end.code:
            print(script, end.code)
    except BaseException as error:
        print(script, repr(error))
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(os.path.dirname(own)):
            del sys.modules[name]
"""


def test_every_script_tells_its_options() -> None:
    scripts = [
        str(path)
        for path in sorted(HERE.glob("*.py"))
        if path.name not in EXCEPT and "parse_args()" in path.read_text() and path != Path(__file__)
    ]
    assert len(scripts) > 20
    ended = subprocess.run(
        [sys.executable, "-P", "-c", START, *scripts], capture_output=True, text=True, timeout=300
    )
    problems = [line for line in ended.stdout.splitlines() if line.startswith(str(HERE))]
    assert ended.returncode == 0, ended.stderr
    assert not problems
