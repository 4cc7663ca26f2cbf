"""Text-to-video packs in the Energon loader: the stages of `PackingTaskEncoder` for clips.

1. The cooker reads a record; ``preencode_sample`` measures: latent patches and text tokens, without pixels.
2. `WindowPackingDataset`, inserted by ``build_batch``, selects under both capacities.
3. ``postencode_sample`` renders the clips of one pack, ``pack_selected_samples`` lays them side by side.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from megatron.energon import Cooker, CrudeSample, Sample, basic_sample_keys, cooker, edataclass, stateless
from megatron.energon.cache import FileStore

from energon_packing.energon.cookers import record_of
from energon_packing.energon.dataset_limits import refuse_dataset_limits
from energon_packing.energon.loader import LoaderBase, build_loader, data_fingerprint
from energon_packing.energon.samples import MeasuredSample, Pack, Problem, RenderedSample, read_media
from energon_packing.energon.states import settings_of
from energon_packing.energon.task_encoder import WindowTaskEncoder
from energon_packing.errors import PackingError, SampleRejected
from energon_packing.packing.balance import pack_cost
from energon_packing.wan.config import ClipLimits, TextToVideoPackingConfig, TextToVideoRunConfig
from energon_packing.wan.encoder import CaptionEncoder, LatentEncoder, MeasuredClip, TextToVideoEncoder
from energon_packing.wan.pack import WanPack, WanSample, clip_order, pack_wan
from energon_packing.wan.record import SUBFLAVORS, TextToVideo


@edataclass
class TextToVideoSample(Sample):
    """A record and the store with its clip and tensors; if ``sample`` is None, ``problem`` states why."""

    sample: TextToVideo | None
    store: FileStore | None = None
    problem: Problem | None = None


@edataclass
class RenderedClipSample(RenderedSample):
    """A clip with its tensors; ``rows`` is empty."""

    clip: WanSample | None = None
    measured: MeasuredClip | None = None


@edataclass
class ClipPack(Pack[WanPack]):
    """What the loader yields: `Pack` with a `WanPack` as its batch; ``occupied`` and lengths count patches."""


@stateless
@cooker(need_primary=True)
def cook_text_to_video(sample: CrudeSample, primary: FileStore, media: FileStore | None = None) -> TextToVideoSample:
    """Reads ``<key>.json`` as `TextToVideo.to_record` wrote it. Never raises for bad data: see `Problem`."""
    keys = basic_sample_keys(sample)
    try:
        record = TextToVideo.from_record(sample["__key__"], record_of(sample))
    except SampleRejected as error:
        return TextToVideoSample(**keys, sample=None, problem=Problem.of(error))
    except Exception as error:  # whatever a record does to its reader, only this sample is lost
        return TextToVideoSample(**keys, sample=None, problem=Problem(reason="bad_record", detail=repr(error)))
    return TextToVideoSample(**keys, sample=record, store=primary if media is None else media)


TEXT_TO_VIDEO_COOKER: Cooker[Any] = Cooker(cook_text_to_video, has_subflavors=SUBFLAVORS)
"""Reads data sets that ``energon-packing convert --format text-to-video`` wrote."""


class TextToVideoTaskEncoder(WindowTaskEncoder):
    """Measures, selects, renders and assembles clips; every name here is part of Energon's contract. Encoders are
    models of your own, see `TextToVideoEncoder`; ``cookers`` are for data sets that ``convert`` did not write, and
    return a `TextToVideoSample`; ``fingerprint`` are further names and values that a saved state must match, or a
    function that gives them when a loader is built. Raises ConfigError: a model cannot be used."""

    packing: TextToVideoPackingConfig
    limits: ClipLimits

    def __init__(
        self,
        config: TextToVideoRunConfig,
        *,
        latent_encoder: LatentEncoder | None = None,
        caption_encoder: CaptionEncoder | None = None,
        cookers: Sequence[Cooker[Any]] = (),
        fingerprint: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        self.packing, self.multiple = config.packing, config.multiple
        self.encoder = TextToVideoEncoder(
            config.encoder, latent_encoder=latent_encoder, caption_encoder=caption_encoder
        )
        self.limits = ClipLimits.of(config)
        self.cookers = (*cookers, TEXT_TO_VIDEO_COOKER)
        self._extra_fingerprint = fingerprint or {}
        self.accept_changed = config.data.accept_changed

    def fingerprint(self) -> dict[str, Any]:
        """Returns names and values that a saved loader state must match."""
        return {
            **self.encoder.fingerprint(),
            **settings_of("packing", self.packing),
            **({"padding": "visible before the last clip"} if self.multiple > 1 else {}),
            "multiple": self.multiple,
            **self.extra_fingerprint(),
        }

    @stateless
    def preencode_sample(self, sample: TextToVideoSample) -> MeasuredSample:
        """Measures one clip. Never raises: an error becomes the sample's problem."""
        problem, measured = sample.problem, None
        if problem is None:
            try:
                refuse_dataset_limits(sample)
                if sample.sample is None:
                    raise SampleRejected("bad_record", "the cooker returned no record")
                measured = self.encoder.measure(sample.sample)
                self._check_size(measured)
            except Exception as error:
                problem = Problem.of(error)
        measured = None if problem else measured
        return MeasuredSample.derive_from(sample, measured=measured, store=sample.store, problem=problem)

    @stateless
    def postencode_sample(self, sample: MeasuredSample) -> RenderedClipSample:
        """Makes the latents and embeddings of one clip. Raises SampleRejected: see `TextToVideoEncoder.render`."""
        measured: Any = sample.measured
        return self.as_rendered(sample, self.encoder.render(measured, functools.partial(read_media, sample.store)))

    def as_rendered(self, sample: MeasuredSample, clip: WanSample) -> RenderedClipSample:
        """Returns a clip with its tensors, for `pack_selected_samples`."""
        measured: Any = sample.measured
        known = {"measured": measured, "changes": measured.changes, "cost": self.plan_cost([measured])}
        return RenderedClipSample.derive_from(sample, rows=(), clip=clip, **known)

    def arrange(self, samples: Sequence[RenderedClipSample]) -> list[int]:
        """Returns the order of a pack's clips in its row: see `clip_order`."""
        measured = [sample.measured for sample in samples if sample.measured is not None]
        return clip_order([clip.length for clip in measured], [clip.text_tokens for clip in measured], self.multiple)

    @stateless
    def pack_selected_samples(self, samples: list[RenderedClipSample]) -> ClipPack:
        """Lays the clips of one pack side by side. Raises PackingError: a clip does not have its measured size."""
        batch = self._assemble([sample.clip for sample in samples if sample.clip is not None])
        clips = batch.num_samples
        measured = [sample.measured for sample in samples if sample.measured is not None]
        for name, made, planned in (
            ("patches", batch.seq_len_q, [clip.length for clip in measured]),
            ("text tokens", batch.seq_len_kv, [clip.text_tokens for clip in measured]),
            ("grids", batch.grid_sizes, [list(clip.grid) for clip in measured]),
        ):
            if (own := made[:clips].tolist()) != planned:
                raise PackingError(f"clips {', '.join(batch.keys)} have {name} {own}, but {planned} were measured")
        return ClipPack(**self.pack_fields(samples), batch=batch, occupied=int(batch.seq_len_q_padded[:clips].sum()))

    def padding_pack(self) -> ClipPack:
        """Returns a pack of one masked clip of zeros, with the fewest patches and text tokens without padding."""
        config = self.encoder.config
        shape = config.latent_channels, self.multiple * config.patch[0], *config.patch[1:]
        latent = torch.zeros(shape, dtype=self.encoder.dtype)
        text = torch.zeros(self.multiple, config.text_width, dtype=self.encoder.dtype)
        filler = WanSample(key="", latent=latent, text=text, metadata={})
        batch = self._assemble([filler])
        batch.loss_mask.zero_()
        return ClipPack(__key__="", __restore_key__=(), __subflavors__={}, __sources__=(), batch=batch, padding=True)

    def _assemble(self, clips: list[WanSample]) -> WanPack:
        config, row = self.encoder.config, self.packing.seq_length
        return pack_wan(clips, multiple=self.multiple, patch=config.patch, capacity=row, compat=config.compat)

    def plan_cost(self, plan: Sequence[MeasuredClip]) -> float:
        """Returns `pack_cost` of the clips, whose texts are short in comparison."""
        return pack_cost([clip.length for clip in plan])


def build_text_to_video_loader(
    config: TextToVideoRunConfig,
    *,
    latent_encoder: LatentEncoder | None = None,
    caption_encoder: CaptionEncoder | None = None,
    task_encoder: TextToVideoTaskEncoder | None = None,
    **arguments: Any,
) -> LoaderBase:
    """Returns a loader of packs of clips for one data-parallel rank; its packs are `ClipPack`. The encoders are models
    of your own; None takes those of ``config.encoder``. Without a ``task_encoder`` one is built from both. Further
    arguments, and what is raised, are as for `energon_packing.energon.loader.build_loader`."""
    models = {"latent_encoder": latent_encoder, "caption_encoder": caption_encoder}
    task_encoder = task_encoder or build_text_to_video_task_encoder(config, **models)
    return build_loader(cast("Any", config), task_encoder=cast("Any", task_encoder), **arguments)


def build_text_to_video_task_encoder(config: TextToVideoRunConfig, **models: Any) -> TextToVideoTaskEncoder:
    """Returns the task encoder of a configuration; models and errors are those of `build_text_to_video_loader`."""
    data = functools.partial(data_fingerprint, cast("Any", config))
    return TextToVideoTaskEncoder(config, fingerprint=data, **models)
