"""The real command line and daemon around the fake engine: `python -P tests/support/fake_cli.py ARGS`.

A daemon that it starts in the background is this program again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from llmbox.app.cli.program import Program
from llmbox.app.main import main


def fake_parts():
    from llmbox.app.daemon.parts import Parts
    from llmbox.app.text.model_text import load_model_text
    from support.fake_engine import fake_launch

    return Parts(fake_launch(), load_model_text)


if __name__ == "__main__":
    main(program=Program(command=[sys.executable, "-P", __file__], parts=fake_parts))
