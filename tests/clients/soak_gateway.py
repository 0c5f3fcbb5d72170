"""Clients of the smg gateway while it is killed and started again: what the server then holds.

Not one of the tests; run by hand, as docs/load.md says. Prints the counts, and fails if a call came
to anything that a dying gateway does not explain, or the server kept a request.
"""

import argparse
import collections
import json
import random
import re
import sys
import threading
import time
from pathlib import Path

import openai

from harness import Program, Server, free_port, wait_until

PROMPTS = ["def read_lines(path):", "import os", "class Stack:", "for line in open(path):"]


class Counts:
    """What calls came to, and what each prompt's first whole answer was."""

    def __init__(self):
        self.lock = threading.Lock()
        self.outcomes = collections.Counter()
        self.texts = {}
        self.unexpected = []

    def add(self, outcome):
        with self.lock:
            self.outcomes[outcome] += 1

    def check(self, key, text):
        with self.lock:
            if self.texts.setdefault(key, text) != text:
                self.unexpected.append(f"{key}: {self.texts[key]!r} before, {text!r} now")

    def fail(self, error):
        with self.lock:
            self.unexpected.append(repr(error))


class Gateway(Program):
    """smg in front of a server, on a port that it is given each time."""

    def __init__(self, port, worker):
        listen = ["--host", "127.0.0.1", "--port", port]
        prometheus = ["--prometheus-host", "127.0.0.1", "--prometheus-port", free_port()]
        flags = ["--worker-urls", f"grpc://{worker}", "--disable-retries"]
        smg = Path(sys.executable).parent / "smg"
        super().__init__(smg, "launch", *listen, *prometheus, *flags, HF_HUB_OFFLINE="1")


def call(client, rng, counts):
    """One chat request: whole, streamed, or streamed and left early."""
    prompt, max_tokens = rng.choice(PROMPTS), rng.choice([8, 60, 200])
    request = {
        "model": "tiny-glm52",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    if rng.random() < 0.3:
        text = client.chat.completions.create(**request).choices[0].message.content
        counts.check((prompt, max_tokens), text or "")
        return "finished"
    n_wanted = rng.randint(1, 10) if rng.random() < 0.25 else None
    pieces, reason = [], None
    with client.chat.completions.create(**request, stream=True) as stream:
        for n_read, chunk in enumerate(stream):
            if n_read == n_wanted:
                return "left"
            for choice in chunk.choices:
                pieces.append(choice.delta.content or "")
                reason = choice.finish_reason or reason
    if reason is None:
        return "cut"
    counts.check((prompt, max_tokens), "".join(pieces))
    return "finished"


def run_client(url, seed, counts, stop):
    """Calls until told to stop; a gateway that is gone explains every lost connection."""
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
    rng = random.Random(seed)
    while not stop.is_set():
        try:
            counts.add(call(client, rng, counts))
        except openai.APITimeoutError as error:
            counts.fail(error)
        except openai.APIConnectionError:
            counts.add("gateway gone")
            time.sleep(0.2)
        except openai.APIStatusError as error:
            # It has started, and does not know its worker yet.
            if error.status_code not in (404, 503):
                counts.fail(error)
            counts.add("gateway not ready")
            time.sleep(0.2)
        except Exception as error:  # httpx's, where a stream breaks
            if type(error).__module__.startswith("httpx"):
                counts.add("cut")
            else:
                counts.fail(error)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20, help="between two kills")
    parser.add_argument("--clients", type=int, default=16)
    options = parser.parse_args()
    counts, stop, freed = Counts(), threading.Event(), []
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    with Server("--smg-port", "0") as server:
        worker = re.search(r"^SMG's API on (\S+)$", server.log(), re.MULTILINE)[1]
        threads = [
            threading.Thread(target=run_client, args=(url, seed, counts, stop), daemon=True)
            for seed in range(options.clients)
        ]
        for thread in threads:
            thread.start()
        for _ in range(options.restarts):
            with Gateway(port, worker) as gateway:
                n_before = counts.outcomes["finished"]
                gateway.wait_until(lambda: counts.outcomes["finished"] > n_before, "an answer")
                time.sleep(options.seconds)
                stats = server.stats()
                gateway.process.kill()
                killed = time.monotonic()
                server.wait_until_idle()
                freed.append((stats.running_requests, (time.monotonic() - killed) * 1000))
                gateway.process.wait()
        stop.set()
        wait_until(lambda: not any(thread.is_alive() for thread in threads), "the clients' end")
        stats = server.stats()
    print(json.dumps(counts.outcomes, indent=2))
    print("running when the gateway was killed, and ms until the server was empty:")
    print(*(f"{n_running}: {time_ms:.0f}" for n_running, time_ms in freed), sep=", ")
    print(f"{stats.finished_requests} requests ended, {stats.failed_steps} steps failed")
    assert not counts.unexpected, counts.unexpected[:20]


if __name__ == "__main__":
    main()
