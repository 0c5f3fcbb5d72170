"""`tandem chat` and `tandem top`: in a terminal, in a pipe, and against a server."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import tempfile
import termios
from pathlib import Path

from harness import PATIENCE, ROOT, TANDEM, Server, run_tests, wait_until

PROMPT = "def read_lines(path):"
GREEN = "\x1b[32m"
# What the line editor switches on whenever it waits for a line.
WAITS = "\x1b[?2004h"
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """A program in a terminal of its own; it ends with the `with` block, however that ends."""

    def __init__(self, *arguments, **environment):
        self.command = [str(part) for part in (TANDEM, *arguments)]
        self.environment = os.environ | {"TERM": "xterm-256color"} | environment
        self.environment.pop("NO_COLOR", None)

    def __enter__(self):
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.execve(self.command[0], self.command, self.environment)
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.bytes, self.code, self.is_open = b"", None, True
        return self

    def __exit__(self, kind, *_):
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.terminal)
        if kind is not None:
            print(f"-- screen of {self.command}:\n{self.bytes!r}")

    def text(self):
        """Everything that it has written."""
        while select.select([self.terminal], [], [], 0)[0]:
            try:
                read = os.read(self.terminal, 1 << 16)
            except OSError:
                read = b""
            if not read:
                self.is_open = False  # It has ended.
                break
            self.bytes += read
        return self.bytes.decode(errors="replace")

    def wait_for(self, part, n=1):
        """Waits until it has written `part` at least `n` times."""

        def written():
            is_written = self.text().count(part) >= n
            assert is_written or self.is_open, f"it has ended without {part!r}, {n} times"
            return is_written

        wait_until(written, f"{part!r}, {n} times")

    def type(self, keys):
        os.write(self.terminal, keys.encode())

    def say(self, line):
        """Types a line when it is waited for, and waits until the next one is."""
        n = self.text().count(WAITS)
        self.type(line + "\r")
        self.wait_for(WAITS, n + 1)

    def ends(self):
        """Waits for its end and returns its exit code."""

        def ended():
            self.text()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
            return pid

        wait_until(ended, "the end of the program")
        return self.code


def test_a_chat_in_a_terminal(_):
    with tempfile.TemporaryDirectory() as data:
        with Terminal("chat", "--max-tokens", "48", XDG_DATA_HOME=data) as chat:
            chat.wait_for(WAITS)
            assert "tiny-glm52" in chat.text() and "/help" in chat.text()
            greeting = chat.text()
            chat.say(PROMPT + "\\")
            chat.say("")
            assert GREEN in chat.text()[len(greeting) :]
            assert "(cut: --max-tokens" in chat.text()
            chat.say("/stats")
            assert re.search(r"acceptance length [1-4]\.\d\d: ", chat.text())
            chat.say("/nonsense")
            assert "/nonsense: no such command" in chat.text()
            chat.type(CTRL_C)
            chat.wait_for("Ctrl-D or /quit leaves")
            chat.type(CTRL_D)
            assert chat.ends() == 0
        history = Path(data, "tandem/chat_history")
        assert PROMPT in history.read_text()
        assert history.stat().st_mode & 0o077 == 0, oct(history.stat().st_mode)


def test_an_interrupt_ends_an_answer_and_not_the_chat(_):
    with Terminal("chat", "--max-tokens", "1900", "--no-history") as chat:
        chat.wait_for(WAITS)

        def stopped():
            # A machine may be so slow to pass the key on that the answer is at its end.
            n_waits, n_green = chat.text().count(WAITS), chat.text().count(GREEN)
            chat.type(PROMPT + "\r")
            chat.wait_for(GREEN, n_green + 3)
            chat.type(CTRL_C)
            chat.wait_for(WAITS, n_waits + 1)
            stopped = "(stopped)" in chat.text()
            chat.say("/clear")
            return stopped

        wait_until(stopped, "an answer that was stopped")
        assert "(stopped)" in chat.text()
        chat.type("/quit\r")
        assert chat.ends() == 0


def piped(lines, *arguments, **environment):
    """What a chat without a terminal prints."""
    command = [TANDEM, "chat", "--max-tokens", "24", *arguments]
    done = subprocess.run(
        command,
        input=lines,
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
        env=os.environ | environment,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_pipe_gets_the_same_answers_from_an_engine_here_and_from_a_server(server):
    lines = f"{PROMPT}\\\n\n    # and\n/stats\n"
    code, here, _ = piped(lines)
    assert code == 0 and "acceptance length" in here and "\x1b" not in here, here
    code, there, _ = piped(lines, "--connect", f"http://{server.address}")
    assert code == 0
    answers = [text.split("\n24 tokens")[0] for text in (here, there)]
    assert answers[0] == answers[1] and len(answers[0]) > 40, answers
    server.wait_until_idle()


def test_what_is_missing_is_said(server):
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder)
        checkpoint = ROOT / "crates/bundled-checkpoints/checkpoints/tiny-glm52"
        for file in ["config.json", "tokenizer.json"]:
            (bare / file).write_bytes((checkpoint / file).read_bytes())
        connect = ["--connect", f"http://{server.address}", "--model", bare]
        code, _, error = piped(PROMPT, *connect)
        assert code == 1 and "give one with --chat-template FILE" in error, error
        template = checkpoint / "chat_template.jinja"
        code, answer, error = piped(PROMPT, *connect, "--chat-template", template)
        assert code == 0 and len(answer) > 20, (answer, error)
    code, _, error = piped(PROMPT, "--connect", "http://127.0.0.1:1")
    assert code == 1 and "onnect" in error, error
    code, _, error = piped("/nonsense\n")
    assert code == 1 and "/nonsense" in error, error


def top(*arguments):
    return subprocess.check_output([TANDEM, "top", *arguments], timeout=PATIENCE, encoding="utf-8")


def test_the_figures_of_a_server_once(server):
    connect = ["--connect", f"http://{server.address}"]
    stats = server.stats()
    figures = json.loads(top(*connect, "--json"))
    assert figures["completion_tokens"] == stats.completion_tokens
    assert figures["model"]["served_model_name"] == "tiny-glm52"
    text = top(*connect, "--once")
    assert "0 of 64 running" in text and "\x1b" not in text, text
    assert f"{stats.completion_tokens} generated" in text, text


def test_the_figures_of_a_server_live(server):
    with Terminal("top", "--connect", f"http://{server.address}") as live:
        # Words: blanks that were there already are not written again.
        live.wait_for("running")
        live.wait_for("prefill")
        live.type("q")
        assert live.ends() == 0
        # It has left the other screen, and shows the cursor.
        assert "\x1b[?1049l" in live.text() and "\x1b[?25h" in live.text()
    with Terminal("top", "--connect", "http://127.0.0.1:1") as live:
        live.wait_for("unreachable")
        live.type(CTRL_C)
        assert live.ends() == 0


if __name__ == "__main__":
    with Server() as running:
        run_tests(dict(globals()), running)
