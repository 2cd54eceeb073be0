import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also what takes long, or looks at a promise once more")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long, or looks at a promise once more; runs with --slow")


def pytest_collection_modifyitems(config, items):
    slow = [item for item in items if item.get_closest_marker("slow") and not config.getoption("--slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]
