"""h2load against Generate and GenerateStream with far more calls at once than the queue takes.

Not one of the tests; run by hand, as docs/load.md says. h2load (of nghttp2) counts answers by HTTP
status, which is 200 for every gRPC answer; how many of them were served, the server's own count of
requests says, and the others were refused.
"""

import argparse
import re
import subprocess
import tempfile

from harness import PATIENCE, Server, inference, run_tests

SERVICE = "tandem.inference.v1.InferenceService"
N_QUEUED_MAX = N_RUNNING_MAX = 16


def frame(message):
    """A message as gRPC sends it, with its length before it."""
    data = message.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


def load(server, method, message, options):
    """Runs h2load and returns its counts, and how many calls the engine served."""
    before = server.stats().finished_requests
    with tempfile.NamedTemporaryFile() as body:
        body.write(frame(message))
        body.flush()
        command = ["h2load", "-n", options.calls, "-c", options.connections, "-m", options.streams]
        headers = ["-H", "content-type: application/grpc", "-H", "te: trailers"]
        url = f"http://{server.address}/{SERVICE}/{method}"
        command += ["-d", body.name, *headers, url]
        said = subprocess.run(map(str, command), check=True, capture_output=True, text=True).stdout
    server.wait_until_idle()
    counts = {
        name: int(n)
        for line in re.findall(r"^(?:requests|status codes): (.*)$", said, re.MULTILINE)
        for n, name in re.findall(r"(\d+) (\w+)", line)
    }
    return counts, server.stats().finished_requests - before


def check(server, method, kind, options):
    message = kind(text="import os\n", stopping=inference.StoppingParams(max_tokens=32))
    counts, n_served = load(server, method, message, options)
    n_refused = options.calls - n_served
    print(f"{method}: {counts}; served {n_served}, refused {n_refused}")
    assert counts["succeeded"] == counts["2xx"] == options.calls, counts
    assert n_served >= N_RUNNING_MAX and n_refused > 0
    # It serves as before.
    reply = server.inference.Generate(
        inference.GenerateRequest(text="import os\n", stopping={"max_tokens": 8}), timeout=PATIENCE
    )
    assert len(reply.outputs[0].token_ids) > 0
    assert server.stats().failed_steps == 0


def test_unary_calls(server, options):
    check(server, "Generate", inference.GenerateRequest, options)


def test_streams(server, options):
    check(server, "GenerateStream", inference.GenerateStreamRequest, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--streams", type=int, default=32, help="calls at a time of a connection")
    arguments = parser.parse_args()
    limits = ["--max-queued-requests", N_QUEUED_MAX, "--max-num-seqs", N_RUNNING_MAX]
    with Server(*limits) as the_server:
        run_tests(globals(), the_server, arguments)
