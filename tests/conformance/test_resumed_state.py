"""A run of Bridge that continues without the state of its loader: refused before a step, or begun anew on request."""

import contextlib
import shutil
import threading
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import bridge_here  # noqa: F401
import pytest
from bridge_sources import BridgeSource, sources
from support import bridge_ranks
from support.bridge_cpu import stand_ins

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, ParallelConfig, PlanConfig, RunConfig
from energon_packing.config.run import PlannedDatasetConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path
from energon_packing.energon.states import read_state
from energon_packing.errors import ConfigError, UserError
from energon_packing.ledger import merged
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.planner import make_plan

STEPS = 4
TEXT = {"family": "text", "steps": STEPS}


@pytest.mark.parametrize("source", sources())
def test_bridge_has_the_names_that_tell_whether_a_run_continues(source: BridgeSource) -> None:
    setup, loaders = source.text("training/setup.py"), source.text("data/loaders.py")
    assert "train_state=state.train_state," in setup[setup.index("setup_data_iterators(\n") :][:300]
    assert 'getattr(checkpoint_manager, "checkpointing_context", {})' in setup
    assert 'ckpt_ctx.get("dataloader_state_dir")' in setup
    assert "train_state: TrainState," in loaders
    saving = source.text("training/checkpointing.py")
    assert 'f"train_dataloader_dprank{dp_rank:03d}.pt"' in saving
    assert "dataloader starts from the beginning" in saving  # what it would do in silence
    assert 'not hasattr(iterable, "restore_state")' in saving
    assert "\n    maybe_save_dataloader_state(\n" in saving
    assert "def save(self, ctx: CheckpointSaveContext" in saving


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumed")
    source = make_data(folder / "made", conversations=40, defects=False)
    convert(ConvertConfig(sources=(source,), out=folder / "data", split={"train": 0.8, "val": 0.2}, workers=0))
    return folder


@pytest.fixture
def dataset(data):
    stand_ins.install()
    from energon_packing.bridge import PackedEnergonDatasetConfig

    made = PackedEnergonDatasetConfig(
        path=str(data / "data"), processor=str(processor_path("text")), seq_length=256, num_workers=0
    )
    made.encoder.modality, made.packing.drop_budget, made.packing.window = "text", 1.0, 8
    return made


def setup(dataset, step, folder, save=None):
    """Calls as Bridge does, with its variables."""
    from megatron.bridge.data.base import DatasetBuildContext

    checkpoint_manager = SimpleNamespace(
        checkpointing_context={"dataloader_state_dir": folder and str(folder)}, save=save
    )
    if save is not None:
        dataset.manager = checkpoint_manager
    assert checkpoint_manager is not None

    def setup_data_iterators(train_state):
        context = DatasetBuildContext(train_samples=100, valid_samples=0, test_samples=0, pg_collection=None)
        assert train_state is not None
        return dataset.build_datasets(context)[0]

    return setup_data_iterators(SimpleNamespace(step=step))


def test_a_run_that_begins_needs_no_state(dataset, tmp_path):
    assert next(setup(dataset, 0, None))["tokens"].shape[-1] > 1
    assert next(setup(dataset, 0, tmp_path / "energon"))["tokens"].shape[-1] > 1


def test_a_run_that_continues_is_refused_where_no_state_would_be_restored(dataset, tmp_path):
    import torch

    folder = tmp_path / "energon"
    for given in (None, folder):
        with pytest.raises(ConfigError, match=r"continues at step 2.*the data would start over.*missing_state"):
            setup(dataset, 2, given)
    dataset.dataloader_load = ""
    with pytest.raises(ConfigError, match="continues at step 2"):
        setup(dataset, 2, folder)
    dataset.data.accept_changed = ["missing_state"]
    with pytest.warns(UserWarning, match="begins its data anew"):
        iterator = setup(dataset, 2, None)
    state = (next(iterator), iterator.save_state())[1]
    dataset.data.accept_changed, dataset.dataloader_load = (), None
    # Bridge's main branch also starts anew where the folder is there, but not that of the iteration.
    (folder / "step_0000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"no state of the loader at .*step_0000002"):
        setup(dataset, 2, folder)
    file = folder / "iter_0000002" / "train_dataloader_dprank000.pt"
    file.parent.mkdir()
    for content in (b"", b"not a state"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"dprank000\.pt is not the state of a loader"):
            setup(dataset, 2, folder)
    torch.save({"dataloader_state_dict": state}, file)
    iterator = setup(dataset, 2, folder)
    assert not hasattr(iterator, "restore_state")  # Bridge then reads no file
    assert next(iterator)["tokens"].shape[-1] > 1
    assert iterator.save_state()["packs"] == 2


@pytest.mark.parametrize("named", [None, "states"])
def test_bridges_clean_up_leaves_the_checkpoint_of_the_model_and_its_state(dataset, tmp_path, named):
    from megatron.bridge.training import checkpointing

    groups = SimpleNamespace(pp=None, tp=None, cp=None, dp=None)

    def save(checkpoint, callbacks):
        """What Bridge's own does of this."""
        assert callbacks == "callbacks"
        step, iterator = checkpoint.state.train_state.step, checkpoint.train_data_iterator
        Path(folder, f"iter_{step:07d}").mkdir(parents=True)
        checkpointing.maybe_save_dataloader_state([], iterator, step, str(states), pg_collection=groups)  # writes none
        checkpointing.cleanup_old_non_persistent_checkpoint(folder, leave_ckpt_num=1)

    folder = str(tmp_path / "kept")
    states = Path(folder, named or "energon")
    dataset.dataloader_save = named and str(states)
    (states / "step_0000004").mkdir(parents=True)
    (states / "step_0000004/train_dataloader_dprank001.pt").touch()  # of an earlier attempt, on two ranks
    iterator = setup(dataset, 0, None, save)
    for step in (2, 4):
        next(iterator)
        cfg = SimpleNamespace(checkpoint=SimpleNamespace(save=folder, most_recent_k=1), dataset=dataset)
        dataset.manager.save(
            SimpleNamespace(
                state=SimpleNamespace(cfg=cfg, train_state=SimpleNamespace(step=step)),
                train_data_iterator=SimpleNamespace(iterable=iterator),
                pg_collection=groups,
            ),
            "callbacks",
        )
    assert [path.name for path in Path(folder).rglob("iter_*")] == ["iter_0000004"]
    assert list(states.rglob("*.pt")) == [states / "step_0000004/train_dataloader_dprank000.pt"]
    expected, kept = iterator.save_state(), weakref.ref(iterator)
    del iterator
    assert kept() is None  # its workers would live until garbage is collected, which waits for them
    assert setup(dataset, 4, states).save_state() == expected


def test_a_run_with_more_ranks_names_both_numbers_and_the_way_out(dataset, tmp_path):
    from energon_packing.bridge.provider import saved_state

    place = tmp_path / "step_0000002"
    place.mkdir()
    (place / "train_dataloader_dprank000.pt").touch()
    dataset.dataloader_load = str(tmp_path)
    with pytest.raises(ConfigError, match=rf"{place}/.*dprank001.pt, but of 1 .*rank: .*state convert {place}"):
        saved_state(dataset, (2, None), rank=1, accepted=())


@pytest.fixture(scope="module")
def short_plan(data):
    """Each data set six and a half times."""
    run = RunConfig(
        data=DataConfig(path=str(data / "data")),
        encoder=EncoderConfig(processor=str(processor_path("text")), modality="text"),
        packing=PackingConfig(seq_length=256, drop_budget=1.0, window=8),
        plan=PlanConfig(max_data_parallel=2, datasets={"text": PlannedDatasetConfig(epochs=6.5)}),
    )
    measure(MeasureConfig(paths=(data / "data",), out=data / "index", workers=0), run)
    return make_plan([data / "index"], run, data / "plan.parquet")


@pytest.mark.parametrize(
    ("step", "position", "left", "refused"),
    [
        (0, None, 0, False),
        (0, None, 1, True),
        (2, -2, 0, False),
        (2, -2, 1, True),  # with fewer packs per step than before, so that all steps together would fit
        (1000, None, 0, False),  # begun anew, after a thousand steps of something else
        (1000, None, 1, True),
    ],
)
def test_a_plan_has_to_suffice_for_the_steps_that_are_left_from_where_the_run_continues(
    dataset, data, short_plan, tmp_path, monkeypatch, step, position, left, refused
):
    """`left`: packs that the run would read beyond the plan."""
    import torch

    dataset.path, dataset.do_validation = str(data / "plan.parquet"), False
    at = 0 if position is None else short_plan.packs + position
    train = SimpleNamespace(
        train_iters=step + short_plan.packs - at + left, global_batch_size=1, micro_batch_size=1, rampup_batch_size=None
    )
    if position is None:
        dataset.data.accept_changed = ["missing_state"]
    monkeypatch.setattr("energon_packing.bridge.dataset._enforce_rules", lambda run: None)  # of the model
    dataset.follow(SimpleNamespace(train=train, dist=SimpleNamespace(eval_context_parallel_size=None)))
    if position is not None:
        file = tmp_path / f"iter_{step:07d}" / "train_dataloader_dprank000.pt"
        file.parent.mkdir()
        source = open_loader(dataset.run_config(ParallelConfig())).save_state() | {"position": at}
        torch.save({"dataloader_state_dict": {"packs": at, "source": source}}, file)
    warned = pytest.warns(UserWarning, match="anew") if step == 1000 else contextlib.nullcontext()
    with warned, pytest.raises(UserError, match="Plan more epochs") if refused else contextlib.nullcontext():
        assert next(setup(dataset, step, tmp_path))["tokens"].shape[-1] > 1
    train.rampup_batch_size = [1, 1, 1]  # nobody knows how many packs are left: the loader ends where the plan does
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert next(setup(dataset, step, tmp_path))["tokens"].shape[-1] > 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not stand_ins.needed(), reason="a CUDA device and Transformer Engine are present")
def test_a_run_of_bridge_goes_on_with_its_state_and_is_stopped_without_it(data):
    """Bridge saves once more after its last step, unless the interval divides it: a run that is started again after its
    end does so before its first pack, and can go on."""
    folder = data / "ended"
    folder.mkdir()
    kept, whole, gone = (folder / name for name in ("kept", "whole", "gone"))
    run = {**TEXT, "steps": 3, "world": 2, "save": str(kept), "save_interval": 2}
    runs = [
        {**run, "name": "uninterrupted", "save": str(whole)},
        {**run, "name": "killed", "kill_after": 3},
        {**run, "name": "requeued"},
        {**run, "name": "requeued-after-the-end"},
    ]
    bridge_ranks.launch(runs, folder, data / "data", timeout=400)
    for rank, expected in enumerate(bridge_ranks.reports(folder, "uninterrupted", 2)):
        for name, done in (("uninterrupted", 0), ("requeued", 2), ("requeued-after-the-end", 3)):
            report = bridge_ranks.reports(folder, name, 2)[rank]
            told = report["error"] and report["error"][:2]
            print(f"rank {rank}, {name}: from step {done} of 3, losses {report['losses']}, error {told}")
            assert told is None
            assert report["losses"] == expected["losses"][done:]
            assert [pack["digest"] for pack in report["packs"]] == [pack["digest"] for pack in expected["packs"]][done:]
        place = f"energon/step_0000003/train_dataloader_dprank{rank:03d}.pt"
        assert str(read_state(kept / place, missing="")) == str(read_state(whole / place, missing=""))
    shutil.copytree(whole, gone)
    shutil.rmtree(gone / "energon")
    stopped = {**run, "save": str(gone)}
    anew = {**stopped, "name": "anew", "dataset": {"data.accept_changed": ["missing_state"]}}
    bridge_ranks.launch([{**stopped, "name": "stopped"}, anew], folder, data / "data", timeout=400)
    for report in bridge_ranks.reports(folder, "stopped", 2):
        assert report["error"][0] == "ConfigError"
        assert "no state of the loader at" in report["error"][1]
    assert [report["error"] for report in bridge_ranks.reports(folder, "anew", 2)] == [None] * 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not stand_ins.needed(), reason="a CUDA device and Transformer Engine are present")
def test_a_run_of_bridge_whose_processes_all_get_sigterm_saves_and_continues_exactly(data):
    folder = data / "terminated"
    folder.mkdir()
    run = {**TEXT, "steps": 4, "world": 2, "save_interval": 100, "dataset": {"num_workers": 1}}
    kept = {**run, "save": str(folder / "kept")}
    runs = [{**run, "name": "whole"}, {**kept, "name": "ended", "end_after": 2}, {**kept, "name": "after"}]
    bridge_ranks.launch(runs, folder, data / "data", timeout=400)
    for whole, ended, after in zip(*(bridge_ranks.reports(folder, each["name"], 2) for each in runs), strict=True):
        assert [each["error"] for each in (whole, ended, after)] == [None] * 3
        assert 2 <= len(ended["losses"]) < 4
        for kind in ("losses", "norms"):
            assert ended[kind] + after[kind] == whole[kind]
        digests = [[pack["digest"] for pack in each["packs"]] for each in (whole, ended, after)]
        assert digests[1] + digests[2] == digests[0]


@pytest.mark.parametrize(
    ("graphs", "ahead"), [({"cuda_graph_impl": "none"}, 1), ({"vision_cuda_graph_impl": "transformer_engine"}, 0)]
)
def test_no_thread_copies_to_a_gpu_where_cuda_graphs_are_captured(dataset, graphs, ahead, monkeypatch):
    from energon_packing.bridge import dataset as bridge_dataset

    dataset.num_workers = 1
    model = SimpleNamespace(sequence_parallel=False, **graphs)
    run = SimpleNamespace(model=model, dist=SimpleNamespace(eval_context_parallel_size=None))
    monkeypatch.setattr(dataset, "_run", run)
    monkeypatch.setattr(bridge_dataset, "_enforce_rules", lambda _: None)
    before, train = set(threading.enumerate()), setup(dataset, 0, None)
    next(train)
    assert sum(each.name.startswith("packs ahead") for each in set(threading.enumerate()) - before) == ahead


def test_an_evaluation_has_a_ledger_of_its_own_and_leaves_the_trainings_as_it_is(dataset, tmp_path):
    from megatron.bridge.data.base import DatasetBuildContext

    dataset.packing.ledger, dataset.validation_split = str(tmp_path / "ledger"), "train"  # which has several packs
    context = DatasetBuildContext(train_samples=100, valid_samples=10, test_samples=0, pg_collection=None)
    train, validation, _ = dataset.build_datasets(context)
    for _ in range(2):
        for iterator in (train, train, validation):
            next(iterator)
    for folder, packs in (("ledger", 4), ("ledger/validation", 2)):
        report = merged(tmp_path / folder)
        assert (report.workers, report.packs, report.abandoned, report.duplicates) == (1, packs, 0, [])
