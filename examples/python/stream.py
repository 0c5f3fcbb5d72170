"""Streams a completion from a Tandem server and shows which tokens were accepted drafts.

    pip install grpcio grpcio-tools
    python examples/python/stream.py 'def add(a, b):'

Accepted drafts are green on a terminal and stand in ⟦ ⟧ elsewhere.
"""

import argparse
import sys
from pathlib import Path

import grpc

# Compiles the service's description at run time. A project of its own would rather do it once:
# python -m grpc_tools.protoc -I proto --python_out=. --grpc_python_out=. FILE
sys.path.append(str(Path(__file__).resolve().parents[2] / "proto"))
messages, services = grpc.protos_and_services("tandem/inference/v1/inference_service.proto")

PROMPT = 'def read_lines(path):\n    """Return the lines of a text file."""\n'


def show(stream):
    """Prints the text of each step as it comes, and returns what drafting did."""
    open_mark, close_mark = ("\x1b[32m", "\x1b[0m") if sys.stdout.isatty() else ("⟦", "⟧")
    for message in stream:
        # A step adds its accepted drafts, if any, and one token that the model itself chose.
        delta = message.delta
        accepted = "".join(delta.text_pieces[: delta.n_accepted])
        chosen = "".join(delta.text_pieces[delta.n_accepted :])
        marked = f"{open_mark}{accepted}{close_mark}" if accepted else ""
        print(marked + chosen + message.finished.tail_text, end="", flush=True)
    return message.finished.speculation


def main():
    parser = argparse.ArgumentParser(description="Streams a completion from a Tandem server.")
    parser.add_argument("prompt", nargs="?", default=PROMPT, help="the text to continue")
    parser.add_argument("--addr", default="127.0.0.1:50051", help="host:port of the server")
    parser.add_argument("--max-tokens", type=int, default=96, help="length of the completion")
    args = parser.parse_args()

    request = messages.GenerateStreamRequest(text=args.prompt)
    request.stopping.max_tokens = args.max_tokens
    print(args.prompt, end="")
    try:
        with grpc.insecure_channel(args.addr) as channel:
            stub = services.InferenceServiceStub(channel)
            stats = show(stub.GenerateStream(request, wait_for_ready=True, timeout=60))
    except grpc.RpcError as error:
        sys.exit(f"\n{error.code().name}: {error.details()}")
    print(f"\n\n{stats.accepted_tokens} of {stats.draft_tokens} drafts were accepted")


if __name__ == "__main__":
    main()
