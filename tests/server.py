"""Servers with OpenAI's protocol, started in processes of their own as users start them."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Options of vLLM for one of many tests that share a GPU.
SMALL = "--kv-cache-memory-bytes", 2**26, "--gpu-memory-utilization", 0.02


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def vllm(folder: Path, *options: object) -> list[str]:
    """``vllm serve FOLDER``; in an environment whose package has another name, as that for CPUs, what it runs."""
    try:
        version("vllm")
    except PackageNotFoundError:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    else:
        script = shutil.which("vllm")
        command = [*([script] if script else [sys.executable, "-m", "vllm.entrypoints.cli.main"]), "serve", folder]
    return [str(part) for part in (*command, *options)]


def transformers(folder: Path, *options: object) -> list[str]:
    """``hf-kbit run transformers serve FOLDER``."""
    command = [sys.executable, "-m", "hf_kbit.cli", "run", "transformers", "serve", folder, *options]
    return [str(part) for part in command]


class Server:
    """A server that may still be starting.

    Attributes:
        url: where it listens, on the loopback interface.
        process: the process that was started, whose children are of its group.
    """

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]):
        port = free_port()
        self.log, self.url = log, f"http://127.0.0.1:{port}"
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                env=os.environ | {"PYTHONPATH": paths} | environment,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=5) as answer:
            return answer.read().decode()

    def wait(self, seconds: float = 400) -> bool:
        """Whether it became healthy, and not ended before."""
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            with suppress(OSError):
                self.get("/health")
                return True
            assert time.monotonic() < end, f"neither healthy nor ended after {seconds} s: {self.said()}"
            time.sleep(0.3)
        return False

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def metric(self, name: str) -> float:
        """One of vLLM's, summed over its labels."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(f"{name}{{")]
        assert lines, f"{name}: no such metric"
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def stop(self) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


@contextmanager
def starting(command: list[str], log: Path, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """A server that has just been started, and is stopped at the end."""
    server = Server(command, log, environment or {})
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def started(command: list[str], log: Path, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """A server that is healthy."""
    with starting(command, log, environment) as server:
        assert server.wait(), server.said()
        yield server
