"""What the scripts of this folder share: a server of their own, and a way to run tests.

A script is run by `cargo xtask test clients`, or by hand with the Python environment that it makes,
`target/tools/python/bin/python`. The server is `TANDEM_BIN`, or what `cargo build --release` makes.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Nothing here leaves the machine, whatever proxy others go through.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
TANDEM = os.environ.pop("TANDEM_BIN", str(ROOT / "target/release/tandem"))

# The server's settings are those of a test, not of whoever runs it.
for name in [name for name in os.environ if name.startswith("TANDEM_")]:
    del os.environ[name]

# Seconds. No test depends on how fast the machine is: this ends one that would wait for ever.
PATIENCE = 60

sys.path.append(str(ROOT / "proto"))
# Compiled from the project's own files, so that nothing generated has to be kept.
inference, inference_services = grpc.protos_and_services(
    "tandem/inference/v1/inference_service.proto"
)
control, control_services = grpc.protos_and_services("tandem/control/v1/control_service.proto")


def wait_until(condition, what):
    """Waits until `condition()` is true and returns what it returned."""
    give_up = time.monotonic() + PATIENCE
    while not (result := condition()):
        assert time.monotonic() < give_up, f"{what}: not within {PATIENCE} s"
        time.sleep(0.02)
    return result


def free_port():
    """A loopback port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Program:
    """A running program whose output is kept; it ends with the `with` block, however that ends."""

    def __init__(self, *command, **environment):
        self.command = [str(part) for part in command]
        self.environment = os.environ | environment

    def __enter__(self):
        self._log = tempfile.NamedTemporaryFile(suffix=".log")
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=self.environment,
        )
        return self

    def __exit__(self, kind, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if kind is not None:
            print(f"-- log of {self.command[0]}:\n{self.log()}", file=sys.stderr)
        self._log.close()

    def log(self):
        """Everything that it has printed, standard output and standard error alike."""
        return Path(self._log.name).read_text(errors="replace")

    def wait_until(self, condition, what):
        """Like `wait_until`, but fails at once if the program ends."""

        def checked():
            # Asked first, so that what it did before it ended counts.
            ended, result = self.process.poll() is not None, condition()
            assert result or not ended, f"{what}: it ended with {self.process.returncode}"
            return result

        return wait_until(checked, what)

    def stop(self):
        """Asks it to stop as an operator would, and returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


class Server(Program):
    """`tandem serve` with the bundled checkpoint, on a free port unless told otherwise.

    Inside the `with` block it is healthy; at its end it must have stopped cleanly.
    """

    def __init__(self, *flags, **environment):
        listen = ["--host", "127.0.0.1", "--port", "0"]
        super().__init__(TANDEM, "serve", *listen, *flags, **environment)

    def __enter__(self):
        super().__enter__()
        try:
            listening = re.compile(r"^listening on (\S+)\n", re.MULTILINE)
            said = self.wait_until(lambda: listening.search(self.log()), "the server's address")
            self.address = said[1]
            self.channel = grpc.insecure_channel(self.address)
            self.inference = inference_services.InferenceServiceStub(self.channel)
            self.control = control_services.ControlServiceStub(self.channel)
            self.wait_until(lambda: self.health() == "SERVING", "the server's health")
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, kind, *rest):
        # A server that failed a test may hang as well.
        if kind is None:
            try:
                code = self.stop()
                assert code == 0, f"the server ended with {code}"
            except BaseException:
                super().__exit__(*sys.exc_info())
                raise
        super().__exit__(kind, *rest)

    def health(self, service=""):
        """The state that the health service tells for a service, by name."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    def stats(self):
        """What GetStats answers."""
        return self.control.GetStats(control.GetStatsRequest(), timeout=PATIENCE)

    def wait_until_idle(self):
        """Waits until the engine has no request, as after one was cancelled."""

        def idle():
            stats = self.stats()
            busy = stats.running_requests or stats.waiting_requests or stats.used_blocks
            return not busy

        self.wait_until(idle, "an engine without requests")


def run_tests(namespace, *arguments):
    """Calls every `test_` function of a script, in order, with these arguments."""
    # A script that is told to stop stops what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to stop"))
    for name, function in namespace.items():
        if name.startswith("test_"):
            start = time.monotonic()
            function(*arguments)
            print(f"{name} ok ({time.monotonic() - start:.1f} s)", flush=True)
