"""A small real data set for the loader tests, made once a session: text, images and video, no planted defects."""

import functools
import itertools
import tarfile

import pytest
import torch.utils.data._utils

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path

# Closing a loader's workers takes seconds at torch's default, for every loader of a test.
from energon_packing.energon.pack_bytes import field_digests

torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """Directory of a converted data set of about 80 conversations."""
    root = tmp_path_factory.mktemp("loader")
    source = make_data(root / "raw", conversations=80, seed=3, defects=False)
    convert(ConvertConfig(sources=(source,), out=root / "data", split={"train": 0.9, "val": 0.1}, workers=1))
    return root / "data"


@pytest.fixture(scope="session")
def train_keys(dataset):
    """All keys of the split ``train``, sorted, as the shards hold them."""
    found = []
    for shard in (dataset / "text").glob("train-*.tar"):
        with tarfile.open(shard) as tar:
            found += [member.name.removesuffix(".json") for member in tar.getmembers()]
    return sorted(found)


@pytest.fixture(scope="session")
def run_config_of(dataset):
    """Configuration on that data set; keyword arguments replace packing fields, ``data`` and ``family`` the rest.

    Loaders decode in their own process, because a fork takes longer than decoding this data set. The tests of
    `test_loader.py` and `test_damaged_data.py` have the child process that runs have.
    """

    def make(*, family="qwen2_5_vl", data=None, encoder=None, in_child=False, **packing):
        encoder = {"decode_in_child": in_child} | (encoder or {})
        return RunConfig(
            data=DataConfig(**({"path": str(dataset), "workers": 0, "repeat": False} | (data or {}))),
            encoder=EncoderConfig(processor=str(processor_path(family)), **encoder),
            packing=PackingConfig(**({"seq_length": 4096, "window": 32} | packing)),
        )

    return make


@pytest.fixture
def run_config(run_config_of):
    """`run_config_of` under the name that most tests use."""
    return run_config_of


@pytest.fixture
def child_config(run_config_of):
    """`run_config_of` with a child process that decodes, as runs have it."""
    return functools.partial(run_config_of, in_child=True)


@pytest.fixture
def continues():
    """Checks that loaders go on after a saved state, and after one that is saved right after a restore, bit by bit.

    The function takes what builds a loader, how many packs it reads, and after how many of them a state is restored;
    it returns keys and digests of the packs, and the state after each.
    """

    def check(build, packs=9, at=(1, 2, 3, 4, 5)):
        def content(pack):
            return pack.keys, pack.index, pack.worker, field_digests(pack.batch)

        loader, given, states = build(), [], []
        for pack in itertools.islice(loader, packs):
            given.append(content(pack))
            states.append(loader.save_state())

        def goes_on(state, done):
            restored = build()
            restored.restore_state(state)
            own = itertools.islice(restored, packs - done)
            first, later = content(next(own)), restored.save_state()
            assert [first, *map(content, own)] == given[done:]
            return later

        for done in at:
            later = goes_on(states[done - 1], done)
            if done == at[0]:
                goes_on(later, done + 1)
        return given, states

    return check
