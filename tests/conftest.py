import os
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each process: several run at once
os.environ["PYTHONPATH"] = str(ROOT)  # for tools that run in other folders


def pytest_addoption(parser):
    parser.addoption(
        "--slow", action="store_true", help="also what takes long, or looks at a promise once more"
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "slow(*words): with --slow alone; with words, what has one of them in its name"
    )


def pytest_collection_modifyitems(config, items):
    def is_slow(item) -> bool:
        words = [mark.args or ("",) for mark in item.iter_markers("slow")]
        return any(word in item.name for word in sum(words, ()))

    if not config.getoption("--slow"):
        slow = [item for item in items if is_slow(item)]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not is_slow(item)]


@pytest.fixture
def call(monkeypatch):
    """Runs a script or tool in this process: module, command line -> what its `main` returns."""

    def call(module, *words):
        monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, words)])
        return module.main()

    return call


@pytest.fixture
def serve():
    """Starts a server on the loopback: handler -> its address."""
    servers = []

    def serve(handler) -> str:
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield serve
    for server in servers:
        server.shutdown()


@pytest.fixture
def code():
    """What makes a folder `ran` where it is unpickled."""

    class Code:
        def __reduce__(self):
            return os.mkdir, ("ran",)

    return Code()
