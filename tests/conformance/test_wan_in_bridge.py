"""Packs of clips against Bridge's own Wan data path, recipes, model and forward step."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import bridge_here  # noqa: F401
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import wan_on_cpu
from support.bridge_cpu import training_run
from support.bridge_wan import bridge_batch, bridge_wan
from support.p2p_cut import infers_padding

from energon_packing import thd
from energon_packing.config import ParallelConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.errors import ConfigError, PackingError
from energon_packing.wan.pack import WanSample, clip_order, pack_wan, patch_grid

pytest.importorskip("diffusers", reason="Bridge's Wan model needs diffusers")

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

        from energon_packing.bridge.dataset import use_packed_data

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


@pytest.mark.usefixtures("cpu_world")
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


@pytest.mark.usefixtures("cpu_world")
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


@pytest.mark.usefixtures("cpu_world")
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


@pytest.mark.usefixtures("cpu_world")
@pytest.mark.parametrize(("sequence_parallel", "compat", "multiple"), [(True, "texts", 8), (False, "none", 4)])
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


@pytest.mark.usefixtures("cpu_world")
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
        ("model.apply_rope_fusion", True, "apply_rope_fusion is true"),
        ("model.qkv_format", "sbhd", "qkv_format is 'sbhd'"),
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


@pytest.mark.usefixtures("cpu_world")
def test_rows_of_bridges_form_are_refused_where_sequence_parallelism_could_not_divide_them(recipe, world):
    world(8)
    cfg = recipe(tensor_model_parallel_size=4, context_parallel_size=2, sequence_parallel=True)
    cfg.dataset.encoder.compat = "bridge"
    with pytest.raises(ConfigError, match=r"aligns clips to 4.* needs rows divisible by 8"):
        cfg.validate()


@pytest.mark.usefixtures("cpu_world")
def test_a_model_of_another_kind_and_a_processor_are_refused(recipe):
    from support.bridge_cpu import tiny_models

    from energon_packing.bridge.dataset import use_packed_data

    cfg = recipe()
    with pytest.raises(ConfigError, match="a Wan model has no processor"):
        use_packed_data(cfg, "data", processor="some/processor")
    cfg.model = tiny_models.provider("text", vocab_size=4096, seq_length=SEQ_LENGTH)
    with pytest.raises(ConfigError, match="makes rows of clips for Wan"):
        cfg.validate()


@pytest.mark.usefixtures("cpu_world")
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


@pytest.mark.usefixtures("cpu_world")
@pytest.mark.parametrize(("name", "multiple"), [("wan_1_3b_text2video", 8), ("wan_14b_sft", 8)])
def test_a_shipped_recipe_is_valid_and_makes_rows_of_its_alignment(name, multiple, clips, world, monkeypatch, tmp_path):
    world(8)
    monkeypatch.syspath_prepend(str(ROOT))
    recipes = importlib.import_module("bridge_configs.wan")
    assert recipes.GPUS[name] == 8
    cfg = getattr(recipes, name)(str(clips[1]))
    (tmp_path / "checkpoints" / "Wan2.1-T2V-14B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    cfg.validate()
    assert cfg.model.calculate_per_token_loss
    assert not cfg.ddp.average_in_collective
    assert cfg.rng.data_parallel_random_init
    assert cfg.dataset.encoder.compat == "texts"
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


@pytest.mark.usefixtures("cpu_world")
@pytest.mark.parametrize(("compat", "fillers"), [("texts", 0), ("none", 1)])
def test_a_row_of_the_largest_recipe_holds_the_clip_that_it_is_for(monkeypatch, compat, fillers):
    """81 frames of 1280 x 720, whose text of an odd length brings a masked clip along."""
    monkeypatch.syspath_prepend(str(ROOT))
    cfg = importlib.import_module("bridge_configs.wan").wan_14b_sft()
    latent = torch.zeros(1, 1 + 80 // 4, 720 // 8, 1280 // 8)
    clip = WanSample(key="v", latent=latent, text=torch.zeros(77, 4), metadata={})
    pack = pack_wan([clip], multiple=8, capacity=cfg.dataset.seq_length, compat=compat)
    assert pack.seq_len_q.tolist() == [75_600, *[8] * fillers]


@pytest.mark.usefixtures("cpu_world")
def test_the_training_program_takes_the_step_of_the_rows_with_the_times_of_its_run(recipe, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    step_of = importlib.import_module("train").step_of
    for finetunes, drawn in ((True, ("uniform", 3.0)), (False, ("logit_normal", 2.5))):
        (bridges,) = [cell.cell_contents for cell in step_of(recipe(), None, finetunes).__closure__]
        assert (bridges.timestep_sampling, bridges.flow_shift) == drawn
    from energon_packing.bridge.step import forward_step

    assert step_of(SimpleNamespace(dataset=None), None, True) is forward_step
    with pytest.raises(ConfigError, match=r"wan_step:WanForwardStep is a class"):
        step_of(recipe(), "megatron.bridge.diffusion.models.wan.wan_step:WanForwardStep", True)


@pytest.mark.usefixtures("cpu_world")
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


def sample(grid, text, seed=0, key=None):
    generator = torch.Generator().manual_seed(seed)
    frames, height, width = grid
    return WanSample(
        key=key or f"v{seed}",
        latent=torch.randn(4, frames, 2 * height, 2 * width, generator=generator),
        text=torch.randn(text, 8, generator=generator),
        metadata={"fps": seed},
    )


SHAPES = st.lists(
    st.tuples(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)), st.integers(1, 40)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(shapes=SHAPES, cp_size=st.sampled_from([1, 2, 4]))
def test_a_compatible_pack_equals_the_one_of_bridges_wan_data_path_field_by_field(wan, shapes, cp_size):
    samples = [sample(grid, text, seed) for seed, (grid, text) in enumerate(shapes)]
    theirs = bridge_batch(wan, samples, cp_size)
    ours = pack_wan(samples, multiple=thd.alignment_multiple(context_parallel=cp_size), compat="bridge").to_bridge()
    equal(ours, theirs)


def test_by_default_texts_keep_their_length_and_everything_is_aligned():
    multiple = thd.alignment_multiple(tensor_parallel=4, context_parallel=2, sequence_parallel=True)
    assert multiple == 8  # Bridge's path would align to 4
    pack = pack_wan([sample((1, 3, 3), 5, 1), sample((2, 2, 2), 13, 2)], multiple=multiple)
    assert pack.seq_len_q.tolist() == [9, 8]
    assert pack.seq_len_q_padded.tolist() == [16, 8]
    assert pack.seq_len_kv.tolist() == [5, 13]
    assert pack.seq_len_kv_padded.tolist() == [8, 16]
    assert pack.grid_sizes.tolist() == [[1, 3, 3], [2, 2, 2]]
    assert pack.loss_mask[:, 0].tolist() == [1.0] * 9 + [0.0] * 7 + [1.0] * 8
    assert not pack.video_latents[9:16].any()
    assert not pack.context_embeddings[5:8].any()


@pytest.mark.parametrize("shapes", [[((1, 3, 3), 5), ((2, 2, 2), 13)], [((1, 3, 3), 5)]])
def test_texts_as_the_weights_know_them_are_bridges_in_rows_of_our_alignment(wan, shapes):
    samples = [sample(grid, text, seed) for seed, (grid, text) in enumerate(shapes)]
    theirs = bridge_batch(wan, samples, 1)
    pack = pack_wan(samples, multiple=8, compat="texts")
    clips = len(samples)
    for name in ("seq_len_kv", "seq_len_kv_padded"):
        assert torch.equal(getattr(pack, name)[:clips], theirs[name])
    assert torch.equal(pack.context_embeddings[: 512 * clips], theirs["context_embeddings"])
    assert not (pack.seq_len_q_padded % 8).any()
    assert pack.fillers == int(clips == 1), "a lone clip with padding of patches"


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        ({"latent": torch.zeros(4, 1, 3, 4)}, {}, PackingError, "sample odd: a latent of .* does not divide"),
        (
            {"latent": torch.full((4, 1, 2, 2), float("nan"))},
            {},
            PackingError,
            "sample odd: its latent .*NaN or infinite",
        ),
        ({"text": torch.zeros(0, 8)}, {}, PackingError, "sample odd: its text has shape"),
        ({"text": torch.zeros(5, 9)}, {}, PackingError, "differ in width"),
        ({"text": torch.zeros(513, 8)}, {"compat": "bridge"}, PackingError, "more than the 512"),
        ({"text": torch.zeros(513, 8)}, {"compat": "texts"}, PackingError, "more than the 512"),
        ({"latent": torch.full((4, 1, 2, 2), 2e3)}, {"compat": "bridge"}, PackingError, "values above 1000"),
        ({}, {"capacity": 9}, PackingError, "occupy 10 patches"),
        ({}, {"multiple": 0}, ConfigError, "multiple"),
        ({}, {"compat": "nemo"}, ConfigError, "compat"),
    ],
)
def test_what_cannot_be_packed_is_refused_in_a_sentence(change, options, error, message):
    fields = {"key": "odd", "latent": torch.zeros(4, 1, 2, 2), "text": torch.zeros(5, 8)} | change
    with pytest.raises(error, match=message):
        pack_wan([sample((1, 3, 3), 5, 1), WanSample(**fields)], **options)
    assert patch_grid((3, 4, 6), (1, 2, 2)) == (3, 2, 3)


@settings(max_examples=150, deadline=None)
@given(shapes=SHAPES, multiple=st.sampled_from([1, 2, 4, 6, 8, 16]))
def test_no_pack_of_videos_hides_its_padding_from_either_attention(shapes, multiple):
    samples = [sample(grid, text, seed) for seed, (grid, text) in enumerate(shapes)]
    patches = [grid[0] * grid[1] * grid[2] for grid, _ in shapes]
    order = clip_order(patches, [text for _, text in shapes], multiple)
    assert sorted(order) == list(range(len(samples)))
    arranged = [samples[at] for at in order]
    assert clip_order([patches[at] for at in order], [shapes[at][1] for at in order], multiple) == list(
        range(len(order))
    )
    pack = pack_wan(arranged, multiple=multiple)
    occupied = sum(-(-length // multiple) * multiple for length in patches)
    assert pack.total_tokens == occupied + multiple * pack.fillers
    assert pack.fillers == 0 or len(samples) == 1
    assert pack_wan(arranged, multiple=multiple, capacity=pack.total_tokens).fillers == pack.fillers
    assert pack.keys == tuple(each.key for each in arranged)
    assert (pack.num_samples, pack.real_tokens) == (len(samples), sum(patches))
    assert pack.loss_mask.sum() == sum(patches)
    assert len(pack.to_bridge()["video_metadata"]) == len(pack.seq_len_q) == len(samples) + pack.fillers
    boundaries = pack.boundaries()
    patches, texts = (
        (real, real if torch.equal(real, boundaries[f"{name}_padded"]) else boundaries[f"{name}_padded"])
        for name in ("cu_seq_len_q", "cu_seq_len_kv")
        for real in (boundaries[name],)
    )
    for pairs in ((patches,), (patches, texts)):  # attention among patches, and of patches to texts
        has_padding = any(not torch.equal(*pair) for pair in pairs)
        for release in ("2.9", "2.16", "2.18"):
            assert any(infers_padding(*pair, release) for pair in pairs) is has_padding, release


def test_a_video_that_leaves_no_room_for_the_masked_clip_is_refused_and_bridges_form_has_none():
    lone = sample((1, 3, 3), 5, 1)
    pack = pack_wan([lone], multiple=4)
    assert pack.grid_sizes.tolist() == [[1, 3, 3], [4, 1, 1]]
    assert pack.seq_len_q.tolist() == [9, 4]
    assert pack.seq_len_q_padded.tolist() == [12, 4]
    assert pack.seq_len_kv.tolist() == [5, 4]
    assert not pack.video_latents[12:].any()
    with pytest.raises(PackingError, match=r"occupy 16 patches .* masked clip, more than the row's 12"):
        pack_wan([lone], multiple=4, capacity=12)
    assert pack_wan([lone], multiple=4, capacity=12, compat="bridge").fillers == 0


TIME = 500.0


@pytest.fixture
def on_cpu(monkeypatch):
    """Bridge's Wan code on a CPU, nothing of it compiled."""
    wan_on_cpu.install(monkeypatch)
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.fixture
def model(monkeypatch):
    """Two layers in fp32; Bridge's own embedding of the time is in bf16 always, which would hide small differences."""
    from diffusers.models.embeddings import TimestepEmbedding
    from megatron.bridge.diffusion.models.common.dit_embeddings import ParallelTimestepEmbedding

    monkeypatch.setattr(ParallelTimestepEmbedding, "forward", TimestepEmbedding.forward)
    return training_run.build_model(wan_on_cpu.tiny_provider())


def four_clips():
    """Four clips of different sizes with texts of different lengths."""
    made = []
    for seed, (grid, text) in enumerate((((1, 3, 3), 5), ((2, 2, 2), 13), ((1, 1, 3), 1), ((3, 2, 1), 8))):
        generator = torch.Generator().manual_seed(seed)
        latent = torch.randn(4, grid[0], 2 * grid[1], 2 * grid[2], generator=generator)
        made.append(
            WanSample(key=f"v{seed}", latent=latent, text=torch.randn(text, 32, generator=generator), metadata={})
        )
    return made


def predict(model, batch):
    """Bridge's reading of a batch, and its model on it: ``[Q, values of a patch]``."""
    from megatron.bridge.diffusion.models.wan.wan_step import wan_data_step

    read = wan_data_step("thd", iter([batch]))
    return model(
        x=read["video_latents"].transpose(0, 1),
        grid_sizes=read["grid_sizes"],
        t=torch.tensor([TIME]),
        context=read["context_embeddings"],
        packed_seq_params=read["packed_seq_params"],
    )[:, 0].detach()


def one_segment(pack):
    """The control: the same row with its boundaries taken away."""
    total, text = torch.tensor([pack.total_tokens]), torch.tensor([len(pack.context_embeddings)])
    lengths = {"seq_len_q": total, "seq_len_q_padded": total, "seq_len_kv": text, "seq_len_kv_padded": text}
    return {**pack.to_bridge(), **{name: value.int() for name, value in lengths.items()}}


@pytest.mark.usefixtures("cpu_world", "on_cpu")
@pytest.mark.parametrize("multiple", [1, 4, 8])
def test_bridges_model_predicts_of_each_clip_in_a_pack_what_it_predicts_of_the_clip_alone(model, multiple):
    samples = four_clips()
    sizes = [sample.latent[0].numel() // 4 for sample in samples]
    samples = [samples[at] for at in clip_order(sizes, [len(sample.text) for sample in samples], multiple)]
    pack = pack_wan(samples, multiple=multiple)
    packed, joined = predict(model, pack.to_bridge()), None
    if multiple == 1:  # positions of a joined clip: those of each, so that attention alone differs
        batch = one_segment(pack)
        rotary = model.rope_embeddings
        boundaries = pack.boundaries()["cu_seq_len_q_padded"]
        frequencies = rotary(4, 12, boundaries, pack.grid_sizes, "cpu")
        model.rope_embeddings.forward = lambda *_: frequencies
        joined = predict(model, batch)
        del model.rope_embeddings.forward
    worst = control = 0.0
    start = 0
    for sample, length, place in zip(samples, pack.seq_len_q.tolist(), pack.seq_len_q_padded.tolist(), strict=False):
        alone = predict(model, pack_wan([sample]).to_bridge())
        worst = max(worst, float((packed[start : start + length] - alone).abs().max()))
        if joined is not None:
            control = max(control, float((joined[start : start + length] - alone).abs().max()))
        start += place
    print(f"\nmultiple {multiple}: packed and alone differ by {worst:.1e}; without boundaries by {control:.1e}")
    assert worst < 1e-5
    assert joined is None or control > 1e-3


def by_segment(t, cu_seqlens, freqs, cp_size=1, cp_rank=0, interleaved=False):
    """Transformer Engine's rule for packed rows (``fused_rope.cu``): the table from its start for each segment."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    parts = t.split(cu_seqlens.diff().tolist())
    turned = [_apply_rotary_pos_emb_bshd(part[:, None], freqs[: len(part)], interleaved) for part in parts]
    return torch.cat(turned)[:, 0]


@pytest.mark.usefixtures("cpu_world", "on_cpu", "model")  # in fp32
@pytest.mark.parametrize("set_again", [False, True])
def test_later_clips_have_their_own_positions_with_the_kernels_that_a_recipe_chooses(recipe, monkeypatch, set_again):
    from megatron.core.models.common.embeddings import rope_utils

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", by_segment)
    provider = recipe(apply_rope_fusion=True).model
    model = training_run.build_model(provider)
    model.config.apply_rope_fusion |= set_again  # which `validate` refuses: the control
    packed = predict(model, (pack := pack_wan(four_clips(), multiple=8)).to_bridge())
    start, worst = 0, []
    for sample, length, place in zip(
        four_clips(), pack.seq_len_q.tolist(), pack.seq_len_q_padded.tolist(), strict=True
    ):
        alone = predict(model, pack_wan([sample]).to_bridge())
        worst.append(float((packed[start : start + length] - alone).abs().max()))
        start += place
    assert worst[0] < 1e-5, "the first clip is right anyway"
    assert max(worst) < 1e-5 or set_again
    assert max(worst) > 1e-3 or not set_again


@pytest.mark.usefixtures("cpu_world", "on_cpu")
@pytest.mark.parametrize("count", [1, 3])
def test_bridges_forward_step_learns_from_real_patches_alone(count):
    from megatron.bridge.diffusion.models.wan.wan_step import WanForwardStep
    from megatron.bridge.diffusion.recipes.wan.wan import wan_1_3b_pretrain_config
    from megatron.bridge.training.state import GlobalState

    state = GlobalState()
    state.cfg = wan_1_3b_pretrain_config()
    # The step computes in bf16, which the wrapper of a mixed precision run gives the model.
    model = training_run.build_model(wan_on_cpu.tiny_provider()).bfloat16()
    pack = pack_wan(four_clips()[:count], multiple=8)
    padded = replace(pack, video_latents=pack.video_latents.clone(), context_embeddings=pack.context_embeddings.clone())
    padding = pack.loss_mask[:, 0] == 0
    assert padding.any()
    padded.video_latents[padding] = 3.0
    starts = pack.boundaries()["cu_seq_len_kv_padded"][:-1].tolist()
    for start, length, place in zip(starts, pack.seq_len_kv.tolist(), pack.seq_len_kv_padded.tolist(), strict=True):
        padded.context_embeddings[start + length : start + place] = 3.0
    found = []
    for each in (pack, padded):
        model.zero_grad()
        torch.manual_seed(3)
        output, loss_function = WanForwardStep()(state, iter([each.to_bridge()]), model)
        loss, patches, _ = loss_function(output)
        loss.backward()
        assert int(patches) == pack.real_tokens
        found.append((loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    assert torch.isfinite(found[0][0])
    assert float(found[0][0]) > 0
    assert any(bool(gradient.any()) for gradient in found[0][1])
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(left, right) for left, right in zip(found[0][1], found[1][1], strict=True))
