"""`PackedWanDatasetConfig` in Bridge's own Wan recipes: validate, data iterators, and the batches that a step reads."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import tarfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import wan_on_cpu
from bridge_wan import bridge_batch, bridge_wan

from energon_packing import thd
from energon_packing.config import ParallelConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.errors import ConfigError
from energon_packing.wan.pack import WanSample

pytest.importorskip("megatron.core", reason="Megatron-Bridge is not installed")
pytest.importorskip("diffusers", reason="Bridge's Wan model needs diffusers")
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("cpu_world")

ROOT = Path(__file__).resolve().parents[2]
SEQ_LENGTH = 96
wan = pytest.fixture(scope="module")(bridge_wan)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Key -> latents, embeddings and metadata of 60 clips, and the folder of the data set made of them."""
    root = tmp_path_factory.mktemp("clips")
    generator, draw = torch.Generator().manual_seed(0), np.random.default_rng(0)
    made, lines = {}, []
    for number in range(60):
        frames, height, width = (int(side) for side in draw.integers(1, 4, 3))
        latent = torch.randn(4, frames, 2 * height, 2 * width, generator=generator)
        text = torch.randn(int(draw.integers(1, 20)), 32, generator=generator)
        np.save(root / f"{number}.npy", latent.numpy())
        np.save(root / f"{number}.text.npy", text.numpy())
        metadata = {"number": number, "sizes": [frames, height, width]}
        made[f"s{number}"] = WanSample(key=f"s{number}", latent=latent, text=text, metadata=metadata)
        names = {"latents": f"{number}.npy", "context": f"{number}.text.npy"}
        lines.append(json.dumps({"id": f"s{number}", "metadata": metadata, **names}))
    (root / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    out = root / "dataset"
    split = {"train": 0.8, "val": 0.2}
    convert(ConvertConfig(sources=(root / "rows.jsonl",), out=out, format="text-to-video", split=split, workers=0))
    return made, out


@pytest.fixture
def world(monkeypatch):
    """Tells Bridge's ``validate()`` of so many ranks; this process is one of them."""
    return lambda size: monkeypatch.setattr("megatron.bridge.training.config.get_world_size_safe", lambda: size)


@pytest.fixture
def recipe(clips):
    """Bridge's own recipe with our data set and a model of two layers; keyword arguments are fields of the model."""

    def make(**model):
        from megatron.bridge.diffusion.recipes.wan.wan import wan_1_3b_pretrain_config

        from energon_packing.bridge.recipe import use_packed_data

        cfg = wan_1_3b_pretrain_config()
        cfg.model = wan_on_cpu.tiny_provider(**model)
        use_packed_data(cfg, str(clips[1]), seq_length=SEQ_LENGTH, global_batch_size=1, num_workers=0)
        cfg.dataset.packing.window = 16
        cfg.train.train_iters, cfg.validation.eval_iters = 4, 2
        cfg.validation.eval_interval = 5
        return cfg

    return make


def groups(**sizes):
    """Process groups of so many ranks, of which this is the first."""
    return SimpleNamespace(
        **{name: SimpleNamespace(size=lambda size=size: size, rank=lambda: 0) for name, size in sizes.items()}
    )


def iterators(cfg, **sizes):
    """Training and validation iterators as ``setup()`` makes them, for ranks of the given groups."""
    from megatron.bridge.data.loaders import setup_data_iterators
    from megatron.bridge.data.utils import get_dataset_provider
    from megatron.bridge.training.setup import _bind_dataset_provider_context
    from megatron.bridge.training.state import TrainState

    ranks = groups(**{"tp": 1, "cp": 1, "pp": 1, **sizes})
    ranks.dp = torch.distributed.group.WORLD
    provider = get_dataset_provider(cfg.dataset)
    train, valid, test = setup_data_iterators(
        cfg=cfg,
        train_state=TrainState(),
        model_length=1,
        train_valid_test_datasets_provider=_bind_dataset_provider_context(
            provider, tokenizer=None, pg_collection=ranks
        ),
        dp_group=ranks.dp,
    )
    assert test is None
    return train, valid


def keys_of(batch, clips):
    """Keys of a batch's samples, by the metadata that travel with them."""
    return [f"s{entry['number']}" for entry in batch["video_metadata"] if entry]


def equal(ours, theirs):
    assert list(ours) == list(theirs)
    for name, expected in theirs.items():
        if isinstance(expected, torch.Tensor):
            assert (ours[name].dtype, ours[name].shape) == (expected.dtype, expected.shape), name
            assert torch.equal(ours[name], expected), name
        else:
            assert ours[name] == expected, name


@pytest.mark.parametrize("cp_size", [1, 2])
def test_batches_of_bridges_own_iterators_equal_those_of_its_wan_data_path_field_by_field(
    recipe, clips, wan, cp_size, world
):
    world(cp_size)
    cfg = recipe(context_parallel_size=cp_size)
    cfg.dataset.encoder.compat = "bridge"
    cfg.validate()
    seen = set()
    for iterator, count in zip(iterators(cfg, cp=cp_size), (12, 3), strict=True):
        for _ in range(count):
            batch = next(iterator)
            keys = keys_of(batch, clips)
            if keys:  # an evaluation ends with packs of padding
                equal(batch, bridge_batch(wan, [clips[0][key] for key in keys], cp_size))
            assert len(batch["video_latents"]) <= SEQ_LENGTH
            seen.update(keys)
    assert len(seen) > 40


def test_by_default_rows_hold_the_true_texts_of_their_clips(recipe, clips):
    cfg = recipe()
    cfg.validate()
    train, _ = iterators(cfg)
    for _ in range(8):
        batch = next(train)
        samples = [clips[0][key] for key in keys_of(batch, clips)]
        assert batch["seq_len_kv"].tolist() == [len(sample.text) for sample in samples]
        assert torch.equal(batch["context_embeddings"][:, 0], torch.cat([sample.text for sample in samples]))
        assert len(samples) > 1


def test_the_step_reads_boundaries_of_patches_and_of_text_from_a_batch(recipe, clips, monkeypatch):
    from megatron.bridge.diffusion.models.wan.wan_step import wan_data_step

    monkeypatch.setattr(torch.Tensor, "to", wan_on_cpu.without_cuda(torch.Tensor.to))
    cfg = recipe(tensor_model_parallel_size=1, context_parallel_size=1)
    cfg.validate()
    train, _ = iterators(cfg)
    batch = wan_data_step("thd", train)
    samples = [clips[0][key] for key in keys_of(batch, clips)]
    patches = [sample.latent[0].numel() // 4 for sample in samples]
    own, cross = (batch["packed_seq_params"][name] for name in ("self_attention", "cross_attention"))
    assert own.cu_seqlens_q.diff().tolist() == own.cu_seqlens_kv.diff().tolist() == patches
    assert cross.cu_seqlens_kv.diff().tolist() == [len(sample.text) for sample in samples]
    assert batch["video_latents"].shape == (1, sum(patches), 16)


def test_every_evaluation_has_the_same_clips_and_one_of_the_whole_split_has_each_once(recipe, clips):
    cfg = recipe()
    cfg.validate()
    cfg.validation.eval_iters = 2
    found = []
    for _ in range(2):  # runs, of two evaluations each
        _, valid = iterators(cfg)
        found += [[keys_of(next(valid), clips) for _ in range(cfg.validation.eval_iters)] for _ in range(2)]
    assert sum(map(len, found[0])) > 2
    assert found == [found[0]] * 4
    cfg.validation.eval_iters = 30
    _, valid = iterators(cfg)
    batches = [next(valid) for _ in range(30)]
    keys = [key for batch in batches for key in keys_of(batch, clips)]
    with tarfile.open(clips[1] / "text" / "val-000000.tar") as shard:
        assert Counter(keys) == Counter(name.removesuffix(".json") for name in shard.getnames())
    assert batches[-1]["loss_mask"].sum() == 0


def test_an_iterator_that_is_restored_continues_with_the_batch_after_the_saved_one(recipe):
    cfg = recipe()
    cfg.validate()
    train, _ = iterators(cfg)
    source = train.iterable  # of Bridge's RerunDataIterator; checkpoints ask it for its state
    for _ in range(3):
        next(source)
    state = source.save_state()
    expected = [next(source) for _ in range(4)]
    again, _ = iterators(cfg)
    source = again.iterable
    source.restore_state(state)
    for batch in expected:
        equal(next(source), batch)


@pytest.mark.parametrize("stored", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_plan_of_clips_or_what_is_packed_of_it_is_the_data_set_of_a_run(recipe, clips, tmp_path, stored):
    from energon_packing.offline.measure import MeasureConfig, measure
    from energon_packing.offline.open_loader import open_loader
    from energon_packing.offline.pack import PackConfig, pack
    from energon_packing.offline.planner import make_plan

    cfg = recipe()
    run = cfg.dataset.run_config(ParallelConfig())
    index, plan, out = tmp_path / "index", tmp_path / "plan.parquet", tmp_path / "packed"
    measure(MeasureConfig(paths=(clips[1],), out=index, workers=0), run)
    make_plan([index], run, plan)
    planned = open_loader(dataclasses.replace(run, data=dataclasses.replace(run.data, path=str(plan))))
    if stored:
        pack(PackConfig(plan=plan, out=out, store="pixels", workers=0))
    cfg.dataset.path, cfg.dataset.validation_path = str(out if stored else plan), str(clips[1])
    cfg.validate()
    source = iterators(cfg)[0].iterable
    batches = [expected.batch.to_bridge() for expected in itertools.islice(planned, 5)]
    for batch in batches[:3]:
        equal(next(source), batch)
    again = iterators(cfg)[0].iterable
    again.restore_state(source.save_state())
    equal(next(again), batches[3])


@pytest.mark.parametrize(("sequence_parallel", "compat", "multiple"), [(True, "none", 8), (False, "none", 4)])
def test_rows_are_aligned_to_the_layout_that_the_run_has_in_the_end(
    recipe, clips, world, sequence_parallel, compat, multiple
):
    world(8)
    cfg = recipe(tensor_model_parallel_size=4, context_parallel_size=2, sequence_parallel=sequence_parallel)
    cfg.dataset.encoder.compat = compat
    cfg.validate()
    assert multiple == thd.alignment_multiple(4, 2, sequence_parallel)
    assert cfg.dataset.parallel_config(groups(tp=4, cp=2)).multiple == multiple
    train, _ = iterators(cfg, tp=4, cp=2)
    batch = next(train)
    for name in ("seq_len_q_padded", "seq_len_kv_padded"):
        assert not (batch[name] % multiple).any()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("dataset.path", "", "dataset.path is empty"),
        ("dataset.micro_batch_size", 2, "dataset.micro_batch_size is 2"),
        ("dataset.pin_memory", False, "dataset.pin_memory is false"),
        ("dataset.trust_remote_code", True, "trust_remote_code is true"),
        ("dataset.dataloader_type", None, "'external'"),
        ("dataset.seq_lenght", 5, "did you mean dataset.seq_length"),
        ("dataset.window", 5, "use dataset.packing.window"),
        ("dataset.packing.window", 0, "packing.window is 0"),
        ("dataset.encoder.compat", "nemo", "compat is 'nemo'"),
        ("dataset.encoder.patch", (2, 2, 2), r"dataset.encoder.patch is \(2, 2, 2\), but model"),
        ("dataset.encoder.latent_channels", 16, "latent_channels is 16, but model.in_channels is 4"),
        ("dataset.encoder.text_width", 4096, "text_width is 4096, but model.text_dim is 32"),
        ("train.micro_batch_size", 2, "train.micro_batch_size is 2"),
        ("model.pipeline_model_parallel_size", 2, "its own noise and time"),
        ("model.context_parallel_size", 5, "seq_length 96 is not a multiple of 10"),
    ],
)
def test_what_cannot_work_is_refused_before_any_gpu_is_taken(recipe, world, place, value, message):
    world(10)
    cfg = recipe()
    cfg.train.global_batch_size = cfg.validation.eval_global_batch_size = 10
    *parents, last = place.split(".")
    target = cfg
    for parent in parents:
        target = getattr(target, parent)
    setattr(target, last, value)
    with pytest.raises(ConfigError, match=message):
        cfg.validate()


def test_rows_of_bridges_form_are_refused_where_sequence_parallelism_could_not_divide_them(recipe, world):
    world(8)
    cfg = recipe(tensor_model_parallel_size=4, context_parallel_size=2, sequence_parallel=True)
    cfg.dataset.encoder.compat = "bridge"
    with pytest.raises(ConfigError, match=r"aligns clips to 4.* needs rows divisible by 8"):
        cfg.validate()


def test_a_model_of_another_kind_and_a_processor_are_refused(recipe):
    from support.bridge_cpu import tiny_models

    from energon_packing.bridge.recipe import use_packed_data

    cfg = recipe()
    with pytest.raises(ConfigError, match="a Wan model has no processor"):
        use_packed_data(cfg, "data", processor="some/processor")
    cfg.model = tiny_models.provider("text", vocab_size=4096, seq_length=SEQ_LENGTH)
    with pytest.raises(ConfigError, match="makes rows of clips for Wan"):
        cfg.validate()


def test_every_stage_of_a_run_needs_its_noise_which_bridge_seeds_by_stage():
    """The reason why more than one pipeline stage is refused, in Bridge's own source."""
    import inspect

    from megatron.bridge.diffusion.common.flow_matching.flow_matching_pipeline import FlowMatchingPipeline
    from megatron.bridge.training import initialize

    assert "torch.randn_like(" in inspect.getsource(FlowMatchingPipeline.step)
    assert "100 * pp_rank" in inspect.getsource(initialize._set_random_seed)


def test_overrides_and_bridges_yaml_reach_every_section(recipe, tmp_path):
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    cfg = recipe()
    overrides = ["dataset.encoder.compat=bridge", "dataset.packing.window=33", "dataset.data.seed=7"]
    process_config_with_overrides(cfg, cli_overrides=overrides)
    cfg.validate()
    cfg.to_yaml(str(tmp_path / "run_config.yaml"))
    again = ConfigContainer.from_yaml(str(tmp_path / "run_config.yaml")).dataset
    from energon_packing.config import ParallelConfig

    config = again.run_config(ParallelConfig())
    assert (config.encoder.compat, config.packing.window, config.data.seed) == ("bridge", 33, 7)
    assert config == cfg.dataset.run_config(ParallelConfig())


@pytest.mark.parametrize(("name", "multiple"), [("wan_1_3b_text2video", 8), ("wan_14b_sft", 8)])
def test_a_shipped_recipe_is_valid_and_makes_rows_of_its_alignment(name, multiple, clips, world, monkeypatch):
    world(8)
    monkeypatch.syspath_prepend(str(ROOT))
    recipes = importlib.import_module("bridge_configs.wan")
    assert recipes.GPUS[name] == 8
    cfg = getattr(recipes, name)(str(clips[1]))
    cfg.model.apply_rope_fusion = False  # asks for a Transformer Engine that is not here
    cfg.validate()
    assert cfg.model.calculate_per_token_loss
    assert not cfg.ddp.average_in_collective
    assert cfg.dataset.seq_length == cfg.model.seq_length
    model = cfg.model
    layout = groups(tp=model.tensor_model_parallel_size, cp=model.context_parallel_size, pp=1, dp=1)
    assert cfg.dataset.parallel_config(layout).multiple == multiple
    # The clips here are those of a smaller model.
    cfg.dataset.encoder.latent_channels, cfg.dataset.encoder.text_width = 4, 32
    cfg.dataset.num_workers = 0
    loader = cfg.dataset.make_loader(cfg.dataset.run_config(cfg.dataset.parallel_config(layout)))
    pack = next(iter(loader)).batch
    assert not (pack.seq_len_q_padded % multiple).any()
    assert pack.num_samples > 20


def test_the_recipe_of_the_page_runs_as_it_stands_in_wan_md():
    from manual import DOCS
    from manual.blocks import read_page

    from energon_packing.wan.bridge import PackedWanDatasetConfig

    (block,) = [block for block in read_page(DOCS / "wan.md").blocks if block.run_by]
    names = {}
    exec(compile(block.text, "docs/wan.md", "exec"), names)
    dataset = names["cfg"].dataset
    assert isinstance(dataset, PackedWanDatasetConfig)
    assert (dataset.packing.window, names["cfg"].train.global_batch_size) == (256, 8)
