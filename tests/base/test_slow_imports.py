"""Garbage collection while a command imports, which a process that others use does as ever."""

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import gc
from lightning_llm.base.imports import slow_imports, take_process
OURS
with slow_imports():
    during = gc.isenabled()
print(during, gc.isenabled(), gc.get_freeze_count() > 0)
"""


@pytest.mark.parametrize(("own", "said"), [("take_process()", "False True True"), ("", "True True False")])
def test_only_a_process_of_one_command_imports_without_looking_for_garbage(own: str, said: str) -> None:
    command = [sys.executable, "-c", CODE.replace("OURS", own)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == said
