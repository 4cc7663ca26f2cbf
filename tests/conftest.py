"""Fixtures that several test directories share, and the tiers: ``--fast`` leaves out what is marked ``full``."""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # else routers of experts are compiled, by g++ on a new machine

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from forking_python import UNFREEZE, freeze_for_good
from hypothesis import HealthCheck, settings

from energon_packing.config import EncoderConfig
from energon_packing.demo import processor_path
from energon_packing.errors import be_patient

# No test is judged by the clock: a busy machine must not turn a property red.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

VISION = ("qwen2_5_vl", "qwen3_vl")
STEP = 300 << 20
LARGE = [1500 << 20]
"""Bytes of a test process from which on what was frozen is looked through again."""


def resident() -> int:
    """Bytes of memory that this process holds; 0 where the kernel does not say."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if file.exists() else 0


LONGEST_FIRST = (
    "mutations/test_mutations.py",
    "lock/test_lock.py",
    "conformance/test_replica_training.py",
    "energon/test_reader_shares.py",
    "energon/test_loader.py",
    "energon/test_drops.py",
    "energon/test_fingerprint.py",
    "offline/test_pack_command.py",
    "offline/test_evaluation.py",
    "energon/test_rows_of_packs.py",
    "offline/test_nodes_killed.py",
    "executors/test_executors.py",
    "executors/test_ray_nodes.py",
    "offline/test_packed_loader.py",
    "wan/test_global_generators.py",
    "energon/test_states.py",
    "energon/test_blends.py",
    "offline/test_planned_loader.py",
    "energon/test_damaged_data.py",
    "offline/test_state_convert.py",
    "energon/test_workers.py",
    "energon/test_packs_ahead.py",
    "wan/test_text_to_video_loader.py",
    "media/test_decoding_process.py",
    "conformance/test_megatron_lm.py",
    "conformance/test_gloo_gradients.py",
    "conformance/test_planned_training.py",
    "manual/test_manual_blocks.py",
    "conformance/test_bridge_training.py",
    "chat/test_template_pairs.py",
    "conformance/test_in_batch_mode.py",
    "families/test_families.py",
    "scripts/test_parity.py",
    "conformance/test_resumed_state.py",
    "conformance/test_recipes.py",
    "conformance/test_ranks_together.py",
    "conformance/test_trained_pairs.py",
    "scripts/test_soak.py",
    "cli/test_validate_data.py",
    "scripts/test_new_user_script.py",
    "scripts/test_demo_script.py",
    "chat/test_published_templates.py",
    "conformance/test_packed_forward_step.py",
    "conformance/test_dataset_config.py",
    "convert/test_convert_workers.py",
    "conformance/test_rules_of_bridge.py",
)
"""Files of more than 15 seconds. A file stays in one process, so the last to start decides when the tests end."""
LONGEST = 3
"""So many of them start before all others."""

FORKING = ("energon", "executors", "media/test_decoding_process.py", "offline", "wan")
"""Folders and files whose tests fork many processes. They come before the others: a fork copies the tables of all
memory, and the test processes grow from one to four gigabytes."""

FIRST_CASE_IS_FAST = ("conformance", "energon", "executors", "offline", "wan")
"""Folders whose tests run loaders, training or clusters: the fast tier runs the first case of each, and `full` all."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out the tests that are marked `full`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the longest files first, then those that fork; leaves out what is marked ``full`` for ``--fast``."""
    tests = Path(__file__).parent
    if config.getoption("--fast"):
        chosen = [item for item in items if not item.get_closest_marker("full")]
        first: dict[str, pytest.Item] = {}
        for item in chosen:
            in_loops = item.path.relative_to(tests).parts[0] in FIRST_CASE_IS_FAST
            first.setdefault(item.nodeid.partition("[")[0] if in_loops else item.nodeid, item)
        left = {id(item) for item in first.values()}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in left])
        items[:] = first.values()
    places = {tests / file: place for place, file in enumerate(LONGEST_FIRST)}
    forking = tuple(tests / name for name in FORKING)

    def turn(item: pytest.Item) -> tuple[int, int]:
        place = places.get(item.path, len(places))
        if place < LONGEST:
            return 0, place
        return (1 if any(item.path.is_relative_to(name) for name in forking) else 2), place

    items.sort(key=turn)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test with a longer limit of its own may use it up before its process is ended with all stacks.

    pytest's ``faulthandler_timeout`` knows nothing of the limits of pytest-timeout.
    """
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        stderr = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(marker.args[0] + 100, file=stderr, exit=True)


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    """No test waits for a store because an earlier one made a loader in this process."""
    yield
    be_patient(None)


def leave_no_watchdogs() -> None:
    """Ends the thread that Energon starts with each iterator and never ends, which holds the data set for good.

    Without the data sets that it held, what Energon collects every ten batches is not worth the time: pytest's timeout
    watches the tests, and reference counts free a loader.
    """
    from megatron.energon import watchdog
    from megatron.energon.wrappers import gc_dataset

    watchdog.Watchdog._worker = lambda _: None
    gc_dataset.gc = SimpleNamespace(**vars(gc) | {"collect": int})


@pytest.fixture(scope="module", autouse=True)
def imports_without_garbage() -> None:
    """Keeps the garbage collector off all that was imported before this file, for good.

    These are a million objects. Energon collects garbage around every epoch and after every ten batches, half a second
    each time, and each forked worker copies the pages that a collection writes to. What was frozen while a test used it
    becomes garbage out of reach; it is let go once it is large, because forks copy the tables of all memory.
    """
    if resident() > LARGE[0]:
        UNFREEZE()
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        LARGE[0] = resident() + STEP
    freeze_for_good()
    if "megatron.energon" in sys.modules:
        leave_no_watchdogs()


@pytest.fixture(autouse=True)
def first_use_without_garbage() -> Iterator[None]:
    """The same for what a test was the first to import: transformers imports when it is used."""
    before = len(sys.modules)
    yield
    if len(sys.modules) > before + 50:
        freeze_for_good()


@pytest.fixture(autouse=True)
def threads_end_with_their_test() -> Iterator[None]:
    """Collects what a test leaves of process groups, each with three threads that wake a hundred times per second.

    A model and its groups refer to each other, so only the garbage collector ends them; imports are out of its reach.
    """
    yield
    tasks = Path("/proc/self/task")
    if tasks.is_dir() and len(os.listdir(tasks)) > 40:
        gc.collect()


@pytest.fixture(scope="session")
def encoders():
    """Family name -> encoder on the shipped processor of that family (``text`` included)."""
    from energon_packing.encoders.encoder import ConversationEncoder

    return {name: ConversationEncoder(EncoderConfig(processor=str(processor_path(name)))) for name in (*VISION, "text")}


@pytest.fixture(scope="session")
def demo_data(tmp_path_factory):
    """Converts conversations of the demo; each data set is made once in a process, and no test changes it."""
    from energon_packing.convert import ConvertConfig, convert
    from energon_packing.demo import make_data

    @functools.cache
    def made(conversations: int, *, seed: int = 5, val: float = 0.0, samples_per_shard: int = 5000) -> Path:
        folder = tmp_path_factory.mktemp("demo")
        source = make_data(folder / "made", conversations=conversations, seed=seed, defects=False)
        split = {"train": 1 - val} | ({"val": val} if val else {})
        shards = {"samples_per_shard": samples_per_shard, "workers": 0}
        convert(ConvertConfig(sources=(source,), out=folder / "data", split=split, **shards))
        return folder / "data"

    return made
