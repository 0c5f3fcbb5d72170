"""The examples for users do what they say, and show the same completion."""

import os
import re
import subprocess
import sys

from harness import PATIENCE, ROOT, Server, run_tests

# Whatever the locale of whoever runs this.
os.environ["PYTHONIOENCODING"] = "utf-8"

PROMPT = "def add(a, b):\n"


def text_of(program, server):
    """What an example prints, with a prompt and the address of the server."""
    command = [*program, "--addr", server.address, "--max-tokens", "48", PROMPT]
    return subprocess.check_output(command, timeout=PATIENCE, encoding="utf-8")


def test_python_and_rust_show_the_same_completion(server):
    python = text_of([sys.executable, ROOT / "examples/python/stream.py"], server)
    rust = text_of([os.environ["STREAM_EXAMPLE"]], server)
    completion, summary = python.rsplit("\n\n", 1)
    assert completion.startswith(PROMPT) and "⟦" in completion, python
    assert re.fullmatch(r"[1-9]\d* of \d+ drafts were accepted\n", summary), python
    assert completion in rust, rust


def test_the_python_example_reads_like_an_error_where_it_fails(server):
    program = [sys.executable, ROOT / "examples/python/stream.py", "--max-tokens", "0"]
    command = [*program, "--addr", server.address]
    failed = subprocess.run(command, capture_output=True, timeout=PATIENCE, encoding="utf-8")
    assert failed.returncode == 1 and "INVALID_ARGUMENT: " in failed.stderr, failed
    assert "Traceback" not in failed.stderr, failed.stderr


if __name__ == "__main__":
    with Server() as running:
        run_tests(dict(globals()), running)
