"""The packing task encoder: Energon's stages from a cooked conversation to a packed row.

1. ``preencode_sample`` measures tokens, targets and the exact length, without pixels.
2. `WindowPackingDataset`, inserted by ``build_batch``, selects.
3. ``postencode_sample`` renders the samples of one pack.
4. ``pack_selected_samples`` assembles the row.

Energon's own ``packing_buffer_size`` works too: step 2 then packs disjoint buffers of that many samples.
"""

import dataclasses
import functools
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from megatron.energon import Cooker, TaskEncoder, WorkerConfig, stateless

from energon_packing import thd
from energon_packing.config import EncoderConfig, PackingConfig, ParallelConfig
from energon_packing.config.run import AUTO_PADDING, Padding
from energon_packing.conversation import Conversation, Media
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.joinable_rows import joinable
from energon_packing.encoders.sample_encoder import AnyMeasured, Measured, SampleEncoder
from energon_packing.encoders.splitting import MeasuredSplit
from energon_packing.energon import internals
from energon_packing.energon.cookers import RECORD_COOKER
from energon_packing.energon.dataset_limits import DatasetLimits, lowered
from energon_packing.energon.dummy_image import DummyImage, aligned_filler, mask_fillers
from energon_packing.energon.reader_shares import deal_samples, dealt_identity
from energon_packing.energon.samples import (
    ConversationSample,
    MeasuredSample,
    Pack,
    Problem,
    RenderedSample,
    by_group,
    data_of,
    first_of_same,
    read_media,
)
from energon_packing.energon.states import settings_of
from energon_packing.energon.window import DisjointPackingDataset, SplitPieces, WindowPackingDataset
from energon_packing.errors import ConfigError, PackingError, SampleRejected, refuse
from energon_packing.families.geometry import MOST_PATCHES
from energon_packing.families.registry import cost_of
from energon_packing.ledger import ChangedSample, Ledger
from energon_packing.packing.balance import serpentine_order
from energon_packing.packing.constraints import Constraints, PackLimits, Size
from energon_packing.packing.model_cost import CONSTANTS, ModelCost
from energon_packing.packing.online import next_of_copies
from energon_packing.packing.whole_list import dealt, pack_lengths_flat, within_padding
from energon_packing.thd.alignment import check_multiple
from energon_packing.thd.assembly import visible_order
from energon_packing.thd.fields import TOKEN_FIELDS

FUNCTIONS = (
    *("cook_crude_sample", "preencode_sample", "postencode_sample", "select_samples_to_pack"),
    *("pack_selected_samples", "batch", "encode_batch"),
)
"""The functions of a task encoder whose failures Energon counts."""


def refuse_unlimited_failures(task_encoder: Any) -> None:
    """Refuses ``failure_tolerance=0``, which in Energon means that there is no limit on failures. Energon stops at
    ``failure_tolerance`` consecutive exceptions of a function, by ``0 < tolerance <= failures``
    (`megatron.energon.errors.ErrorContext`). So 0, and None, which becomes 0, read broken data forever."""
    default = task_encoder.__default_failure_tolerance__
    kind = type(task_encoder).__name__
    meant = "in Energon that means no limit, so data that always fail are read forever; 1 stops at the first failure"
    limits = {name: internals.get_failure_tolerance(getattr(task_encoder, name), default) for name in FUNCTIONS}
    refuse(
        (not default, f"{kind}.__default_failure_tolerance__ is {default}: {meant}."),
        *((not limit, f"{kind}.{name} has failure_tolerance 0: {meant}.") for name, limit in limits.items()),
    )


class WindowTaskEncoder(TaskEncoder[Any, Any, Any, Any]):
    """A task encoder whose packs come from a `WindowPackingDataset`. A subclass sets the attributes and defines
    ``fingerprint``, ``plan_cost``, ``arrange``, ``postencode_sample`` and ``pack_selected_samples``."""

    decoder = None  # Energon's decoder would decode all media in the first pass, before it is known what fits.
    packing: Any
    limits: Any
    accept_changed: tuple[str, ...] = ()  # names of the fingerprint that a restored state may differ in
    tells_end: bool = False  # whether workers tell the end of an epoch, which `build_dataset` asks for a `PackLoader`
    takes_buffers: bool = False  # whether Energon's ``packing_buffer_size`` works too, by ``select_samples_to_pack``
    _extra_fingerprint: Mapping[str, Any] | Callable[[], Mapping[str, Any]]

    @property
    def capacity(self) -> int:
        """Maximum tokens or patches of a pack; the shares of `PackLoader.statistics` refer to it."""
        return self.packing.seq_length

    def fingerprint(self) -> dict[str, Any]:
        """Names and values that a saved loader state must match."""
        raise NotImplementedError

    def extra_fingerprint(self) -> dict[str, Any]:
        """The part of the fingerprint that was handed over; a function is called once."""
        if callable(self._extra_fingerprint):
            self._extra_fingerprint = self._extra_fingerprint()
        return dict(self._extra_fingerprint)

    def prepare(self, samples: Sequence[Any]) -> None:
        """Does what is quicker for several cooked samples together, before `preencode_sample` of each; here nothing."""

    def media_tokens(self, media: Sequence[Media]) -> int:
        """About how many tokens the images and videos of one sample are, by which samples are dealt to readers."""
        return 0

    def plan_cost(self, plan: Sequence[Any]) -> float:
        """Cost of the measured samples of one pack."""
        raise NotImplementedError

    def arrange(self, samples: Sequence[Any]) -> list[int]:
        """Returns the order of rendered samples in their row, as positions. It depends on the samples alone, and
        arranging them again changes nothing: a pack that is restored is not arranged again."""
        raise NotImplementedError

    @stateless
    def batch(self, samples: list[Any]) -> Any:
        """Returns the only sample: a packed row is a whole micro-batch, so there is nothing to stack."""
        return samples[0]

    def build_batch(
        self,
        dataset: internals.SavableDataset[Any],
        *,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        worker_config: WorkerConfig,
    ) -> internals.SavableDataset[Any]:
        """Energon's hook; here the packing window replaces the batcher. ``batch_size`` is None for packs, 1 for batches
        of one pack each. Raises ConfigError: a batch size above 1 (THD rows reach context-parallel slicing one at a
        time), a function of a subclass that may fail without limit, or as for `packed`."""
        refuse_unlimited_failures(self)
        if batch_size not in (None, 1):
            raise ConfigError(f"The micro-batch size of packed data is 1, not {batch_size}; raise seq_length instead.")
        deal_samples(dataset, worker_config, self.media_tokens)
        packed = self.packed(dataset, packing_buffer_size, worker_config)
        if batch_size is None:
            return packed
        packed = internals.BatchDataset(
            packed,
            batch_size=1,
            batcher=self.batch,
            batcher_stateless=internals.get_stateless(self.batch),
            drop_last=batch_drop_last,
            worker_config=worker_config,
            failure_tolerance=internals.get_failure_tolerance(self.batch, self.__default_failure_tolerance__),
        )
        if self._is_overridden(self.encode_batch):
            default = self.__default_failure_tolerance__
            packed = internals.MapDataset(
                packed,
                self.encode_batch,
                worker_config=worker_config,
                stateless_map_fn=internals.get_stateless(self.encode_batch),
                failure_tolerance=internals.get_failure_tolerance(self.encode_batch, default),
            )
        return packed

    def loader_fingerprint(self, dataset: internals.SavableDataset[Any]) -> dict[str, Any]:
        """Returns `fingerprint` with the reader's rank, the number of readers, and what each of them reads."""
        own = dataset.worker_config
        readers = {"rank": own.rank, "ranks": own.world_size, "workers": own.num_workers}
        return {**self.fingerprint(), **readers, **dealt_identity(dataset)}

    def packed(
        self, dataset: internals.SavableDataset[Any], buffer_size: int | None, worker_config: WorkerConfig
    ) -> internals.SavableDataset[Any]:
        """Returns packs from a sliding window over measured samples, or from disjoint buffers of a size. Raises
        `ConfigError`: a buffer size below 1, or any where the class does not take one."""
        kind, window, balance, own = WindowPackingDataset, self.packing.window, self.packing.balance_window, {}
        if buffer_size is not None:
            name = type(self).__name__
            refuse(
                (not self.takes_buffers, f"{name} packs from its own window; leave packing_buffer_size out."),
                (buffer_size < 1, f"packing_buffer_size is {buffer_size}; it must be at least 1."),
            )
            kind, window, balance, own = DisjointPackingDataset, buffer_size, 1, {"packing_buffer_size": buffer_size}
        return kind(
            dataset,
            window=window,
            balance_window=balance,
            packer=self,
            fingerprint={**self.loader_fingerprint(dataset), **own},
            accept_changed=self.accept_changed,
            tells_end=self.tells_end,
            worker_config=worker_config,
        )

    def _check_size(self, measured: Any) -> None:
        """Refuses a sample that fits no pack, as ``packing.oversize`` asks. Raises `ConfigError`: that is ``raise``;
        `SampleRejected`, which carries the sample's length: it is anything else."""
        reason, detail = "over_limit", self.limits.exceeded(measured)
        if self.limits.too_long(measured):
            reason, detail = "oversize", self.limits.length_text(measured, self.packing.seq_length)
        if detail is not None and self.packing.oversize == "raise":
            fix = "Raise the limit, or drop such samples with packing.oversize=drop."
            raise ConfigError(f"Sample {measured.key} has {detail}. {fix}")
        if detail is not None:
            raise SampleRejected(reason, detail, measured.length)

    @staticmethod
    def pack_fields(samples: Sequence[RenderedSample]) -> dict[str, Any]:
        """Returns the fields of a `Pack` that follow from its samples, of any kind."""
        return {
            "__key__": samples[0].__key__,
            "__restore_key__": (),
            "__subflavors__": samples[0].__subflavors__,
            "__sources__": tuple(source for sample in samples for source in sample.__sources__ or ()),
            "keys": tuple(sample.__key__ for sample in samples),
            "changed": tuple(
                ChangedSample(key=sample.__key__, how=how, detail=detail)
                for sample in samples
                for how, detail in sample.changes
            ),
            "cost": sum(sample.cost for sample in samples),
            "vision_cost": sum(sample.vision_cost for sample in samples),
        }

    def make_ledger(self, worker_config: WorkerConfig, *, run: str = "") -> Ledger:
        """Returns the ledger of a worker; if ``packing.ledger`` names a directory, each worker has its own file."""
        return Ledger(
            self.packing.ledger,
            budget=self.packing.drop_budget,
            name=f"rank{worker_config.rank}-worker{worker_config.rank_worker_id()}",
            most_pending=self.packing.max_drops_without_pack,
            run=run,
        )

    def select_pack(self, samples: Sequence[MeasuredSample], ended: bool) -> list[int]:
        """Selects the next pack by ``packing.policy``, within all limits of a pack, from the measured ``samples`` of
        the window, oldest first; ``ended`` if no further one enters it. Returns ascending positions of samples of one
        group (`by_group`), its oldest among them. It is a pack of the group that holds the most. So groups that occur
        seldom wait until they hold as much as the others, and fill their packs as well. Of what the window holds more
        than once, see `next_of_copies`."""
        units = self._units(samples)
        group = max(by_group(samples).values(), key=lambda positions: sum(units[at] for at in positions))
        held = [samples[at] for at in group]
        chosen = next_of_copies(
            self.packing.policy,
            np.array(first_of_same(held)),
            [units[at] for at in group],
            self.limits.units,
            self.limits.costs([sample.measured for sample in held]),
            self.limits.limited,
            padding=self.limits.padding([sample.measured for sample in held]),
            ended=ended,
        )
        return [group[at] for at in chosen]

    def fewest_packs(self, samples: Sequence[MeasuredSample]) -> int:
        """Returns a lower bound on the packs that the samples fill: by length alone, as if samples were divisible."""
        units = self._units(samples)
        return sum(-(-sum(units[at] for at in held) // self.limits.units) for held in by_group(samples).values())

    def _units(self, samples: Sequence[MeasuredSample]) -> list[int]:
        return [self.limits.length_units(sample.measured) for sample in samples]

    def order_plans(self, plans: Sequence[Sequence[MeasuredSample]], block: int) -> Sequence[int]:
        """Serpentine order: cost rises in one block and falls in the next, so all ranks have similar costs at once."""
        return serpentine_order([self.plan_cost([sample.measured for sample in plan]) for plan in plans], block)


class PackingTaskEncoder(WindowTaskEncoder):
    """Measures, selects, renders and assembles conversations; every name here is part of Energon's contract. Raises
    ConfigError: the processor cannot be used, or ``seq_length`` is not a multiple of the alignment.

    Args:
        encoder: processor, prompt and limits, which are lowered to those of a pack; or your own encoders
            (`SampleEncoder`), of which the first that accepts a conversation measures and renders it. Limits of your
            own encoders are not lowered, except for data sets of a blend that set limits: these need a
            `ConversationEncoder`, and the combined limits are lowered to a pack's.
        processor: an already loaded processor; None loads ``encoder.processor``.
        cookers: for data sets that ``convert`` did not write; they are tried before our own. A cooker returns a
            `ConversationSample`.
        fingerprint: further names and values that a saved state must match, or a function that gives them when a loader
            is built.
        cost: of samples; None is that of ``packing.cost_model``.
    """

    packing: PackingConfig
    limits: PackLimits
    cost: ModelCost
    takes_buffers = True
    aligns_rows = True  # whether each segment of a row is padded here; a subclass may leave that to the trainer

    def __init__(
        self,
        encoder: EncoderConfig | SampleEncoder | Sequence[SampleEncoder],
        packing: PackingConfig,
        parallel: ParallelConfig | None = None,
        *,
        processor: Any = None,
        cookers: Sequence[Cooker[Any]] = (),
        fingerprint: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        accept_changed: Sequence[str] = (),
        cost: ModelCost | None = None,
    ) -> None:
        super().__init__()
        self.accept_changed = tuple(accept_changed)
        self.packing = packing
        self.cost = cost or cost_of(packing.cost_model, packing.cost_frozen)
        self.multiple = (parallel or ParallelConfig()).multiple
        check_multiple("packing.seq_length", packing.seq_length, self.multiple)
        self.encoders = _encoders(encoder, packing, processor)
        self.encoder = self.encoders[0]
        self.fields = tuple(dict.fromkeys(field for each in self.encoders for field in each.fields))
        own = [each for each in self.encoders if isinstance(each, ConversationEncoder)]
        takes_images = [each for each in own if "image" in each.kinds]
        for it in [each.family for each in takes_images[:1]]:
            sides = (getattr(each, "patch_size", None) for each in (it.processor, it.images))
            self.cost.check_fit(it.name, next(filter(None, sides), None))
        sees = any(each.kinds & set(each.family.placeholders) for each in own)
        refuse(
            (packing.dummy_image and not takes_images, "packing.dummy_image needs an encoder that takes images."),
            (
                packing.pad_cu_seqlens and (self.encoder.config.position_ids == "mrope" or sees),
                "packing.pad_cu_seqlens repeats the last boundary, which only models of text accept; leave it out, or "
                "set encoder.modality to text and encoder.position_ids to 1d.",
            ),
            (
                packing.padding == "real" and any(not each.family.causal for each in own),
                "packing.padding is 'real', but tokens of an image see each other in both directions in this family, "
                "and only causal attention cannot see the padding behind a sample; set it to between.",
            ),
        )
        known = len(own) == len(self.encoders) and all(each.family.causal for each in own)
        auto: Padding = AUTO_PADDING if known else "between"
        self._padding = auto if packing.padding == "auto" else packing.padding
        self.dummy = DummyImage(takes_images[0]) if packing.dummy_image else None
        reserved = 0 if self.dummy is None else -(-self.dummy.measured.length // self.multiple) * self.multiple
        if reserved >= packing.seq_length:
            row = f"packing.seq_length {packing.seq_length}"
            raise ConfigError(f"packing.dummy_image takes {reserved} tokens of {row}; raise it.")
        names = {each.family.name for each in own if self.aligns_rows}
        of_family = [most for name, most in MOST_PATCHES.items() if name in names]
        self.limits = PackLimits.of_settings(
            lambda name: getattr(packing, name),
            tokens=packing.seq_length - reserved,
            multiple=self.multiple,
            patches=packing.max_patches_per_pack or min(of_family, default=None),
            padded_pixels=packing.max_padded_pixels_per_pack if of_family else None,
            # If there is room for a dummy image, there is room for a masked segment too.
            lone_room=self.aligns_rows and reserved == 0,
        )
        self.cookers = (*cookers, RECORD_COOKER)
        self._of_datasets = DatasetLimits(packing)
        self._extra_fingerprint = fingerprint or {}

    def fingerprint(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, encoder in enumerate(self.encoders, 1):
            own = {**encoder.fingerprint(), **settings_of("encoder", encoder.config)}
            found |= own if number == 1 else {f"{name} of encoder {number}": value for name, value in own.items()}
        by_model = self.packing.balance_window > 1 and self.cost != CONSTANTS  # else no pack depends on it
        return {
            **found,
            **settings_of("packing", dataclasses.replace(self.packing, max_patches_per_pack=self.limits.patches)),
            **({"packing.cost_model": json.dumps(dataclasses.asdict(self.cost))} if by_model else {}),
            "multiple": self.multiple,
            **({"padding": "visible before the last segment"} if self.aligns_rows and self.multiple > 1 else {}),
            **self.extra_fingerprint(),
        }

    def media_tokens(self, media: Sequence[Media]) -> int:
        """Tokens of the images and videos of one sample by the first encoder that takes them, and a pack's at most.
        Nothing of your own encoders. Raises SampleRejected: as `VisionFamily.plan`."""
        for encoder in self.encoders:
            if isinstance(encoder, ConversationEncoder) and {each.kind for each in media} <= encoder.kinds:
                return min(sum(plan.tokens for plan in encoder.family.plans(media)), self.limits.tokens)
        return 0

    def prepare(self, samples: Sequence[ConversationSample]) -> None:
        of_encoders: dict[int, list[Conversation]] = {}
        for sample in samples:
            if sample.problem is None and sample.conversation is not None and not sample.conversation.is_pair:
                of_encoders.setdefault(self._accepting(sample.conversation), []).append(sample.conversation)
        for number, conversations in of_encoders.items():
            if isinstance(encoder := self.encoders[number], ConversationEncoder):
                encoder.prepare(conversations)

    @stateless
    def preencode_sample(self, sample: ConversationSample) -> MeasuredSample:
        """Measures one conversation. Never raises: an error becomes the sample's problem."""
        if not isinstance(sample, ConversationSample):  # of a data set that is cooked by nobody
            fix = "convert it with 'energon-packing convert', or make it a CrudeWebdataset and give a cooker for it."
            refused = ConfigError(f"{data_of(sample)} gives {type(sample).__name__}, no conversations: {fix}")
            sample = ConversationSample.derive_from(sample, conversation=None, problem=Problem.of(refused))
        problem = sample.problem
        measured: AnyMeasured | None = None
        split: MeasuredSplit | None = None
        number = 0
        if problem is None:
            try:
                if sample.conversation is None:
                    raise SampleRejected("bad_record", "the cooker returned no conversation")
                conversation = sample.conversation.trained(self.packing.pairs)
                number = self._accepting(conversation)
                encoder = self._of_datasets.encoder(self.encoders[number], sample, number=number)
                measured = self._measured(encoder, conversation, most=self.limits.tokens)
                limits = self.limits
                # It fits a row, but not together with the masked segment that it needs if it is alone there.
                if limits.too_long(measured) and limits.length_units(measured) <= limits.units:
                    measured = self._measured(self._tighter(encoder), conversation, most=limits.tokens - self.multiple)
                if (split := self._split(encoder, conversation, measured)) is None:
                    self._check_size(measured)
            except Exception as error:
                problem = Problem.of(error)
        return MeasuredSample.derive_from(
            sample,
            measured=None if problem or split else measured,
            store=sample.store,
            problem=problem,
            encoder=number,
            split=split,
            modality=sample.conversation.modality if sample.conversation else "",
        )

    def _measured(self, encoder: SampleEncoder, conversation: Conversation, *, most: int) -> AnyMeasured:
        """Measures the sample, cut to `most` tokens if the configuration asks for truncation."""
        if conversation.is_pair:
            return encoder.measure_pair(conversation)
        cut = self.packing.oversize == "truncate" and most > 0
        return encoder.measure(conversation, **({"truncate_to": most} if cut else {}))

    def _tighter(self, encoder: SampleEncoder) -> SampleEncoder:
        """Returns the encoder with a lower token limit if it makes samples fit, by resizing or by cutting turns."""
        most = self.limits.tokens - self.multiple
        if not isinstance(encoder, ConversationEncoder) or most < 1:
            return encoder
        limits = encoder.config.limits
        if limits.max_tokens is None or not {"resize", "truncate"} & set(limits.when_over):
            return encoder
        return encoder.under(dataclasses.replace(limits, max_tokens=min(limits.max_tokens, most)))

    def _split(self, encoder: SampleEncoder, conversation: Conversation, measured: AnyMeasured) -> MeasuredSplit | None:
        """Returns the pieces of a sample that fits no pack, if splitting is configured; pairs are never split."""
        if self.packing.oversize != "split" or not isinstance(measured, Measured):
            return None
        if self.limits.holds(measured) or not isinstance(encoder, ConversationEncoder):
            return None
        limits = self.limits
        # Any piece may be alone in its row, and whether it fits must not depend on its length being aligned.
        most = limits.tokens - self.multiple * (limits.lone_room and self.multiple > 1)

        def fits(tokens: int, images: int, patches: int, height: int, width: int) -> bool:
            piece = Size(segment_lengths=(tokens,), images=images, patches=patches, height=height, width=width)
            return tokens <= most and limits.holds(piece)

        packing = self.packing
        return encoder.split(conversation, measured, fits, at=packing.split_at, positions=packing.split_positions)

    def _accepting(self, conversation: Conversation) -> int:
        """Returns the index of the first encoder that accepts it; else that of the last, which raises the reason."""
        accepting = (number for number, encoder in enumerate(self.encoders) if encoder.accepts(conversation))
        return next(accepting, len(self.encoders) - 1)

    @stateless
    def postencode_sample(self, sample: MeasuredSample) -> RenderedSample:
        """Decodes the media of one sample and makes its row. Raises SampleRejected: see
        `ConversationEncoder.render`."""
        if sample.measured is None:
            raise PackingError(f"sample {sample.__key__} was selected although it was never measured")
        read = functools.partial(read_media, sample.store)
        rows = tuple(self.encoders[sample.encoder].render(segment, read) for segment in sample.measured.segments)
        vision, language = self.cost.costs(sample.measured)
        costs = {"cost": int(vision + language), "vision_cost": int(vision)}
        return RenderedSample.derive_from(sample, rows=rows, changes=sample.measured.changes, **costs)

    def select_samples_to_pack(self, samples: list[MeasuredSample]) -> list[list[MeasuredSample]]:
        """Packs one of Energon's own disjoint buffers as a whole, best-fit decreasing; bad samples are left out."""
        good = [(sample, sample.measured) for sample in samples if sample.measured is not None]
        packs = []
        for held in by_group([sample for sample, _ in good]).values():
            for part in dealt(np.array(first_of_same([good[at][0] for at in held]))):
                own = [good[held[at]] for at in part]
                measured = [each for _, each in own]
                units, room = np.array([self.limits.length_units(each) for each in measured]), self.limits.units
                costs, padding = self.limits.costs(measured), self.limits.padding(measured)
                pairs = {name: (costs[name], limit) for name, limit in self.limits.limited.items()}
                groups = pack_lengths_flat(units, room, "best_fit", constraints=pairs)
                for group in within_padding(groups, units, room, Constraints.from_pairs(pairs, units.size), padding):
                    order = visible_order([measured[at].segment_lengths for at in group], self.multiple)
                    packs.append([own[group[at]][0] for at in order])
        return packs

    def arrange(self, samples: Sequence[RenderedSample]) -> list[int]:
        """Returns the order of a pack's samples in its row; see `visible_order`."""
        lengths = [[int(row["input_ids"].shape[0]) for row in sample.rows] for sample in samples]
        return visible_order(lengths, self.multiple) if self.aligns_rows else list(range(len(samples)))

    @stateless
    def pack_selected_samples(self, samples: list[RenderedSample]) -> Pack:
        """Assembles the row of one pack, in the order given. If a member failed to render, a padded segment may be
        last; a masked segment then uses the room of that member."""
        batch = self._assemble([row for sample in samples for row in sample.rows])
        if batch.total_tokens > self.packing.seq_length:
            raise PackingError(f"a pack of {batch.total_tokens} tokens is over seq_length {self.packing.seq_length}")
        return self.pack_of(samples, batch)

    def pack_of(self, samples: Sequence[RenderedSample], batch: thd.PackedBatch) -> Pack:
        """Returns the pack of a row and its samples."""
        return Pack(
            **self.pack_fields(samples),
            batch=batch,
            occupied=sum(-(-length // self.multiple) * self.multiple for length in batch.sample_lengths),
        )

    def padding_pack(self) -> Pack:
        """Returns a pack without samples: one fully masked segment, which is the dummy image if there is one."""
        batch = self._assemble([])
        return Pack(__key__="", __restore_key__=(), __subflavors__={}, __sources__=(), batch=batch, padding=True)

    def _assemble(self, rows: list[dict[str, Any]]) -> thd.PackedBatch:
        """Assembles the row; adds the dummy image if the samples have no media, or a filler if there are no samples."""
        fillers: list[dict[str, Any]] = []
        if self.dummy is not None and not any(row.get("visual_inputs") for row in rows):
            fillers = [self.dummy.row]
        elif not rows:
            shape = (3, 1) if self.encoder.config.position_ids == "mrope" else (1,)
            masked = {field.of_row: field.filled(1) for field in TOKEN_FIELDS if field.of_row}
            tokens = torch.tensor([self.encoder.pad_token_id])
            fillers = [masked | {"input_ids": tokens, "position_ids": torch.zeros(shape, dtype=torch.int64)}]
        padded = [aligned_filler(row, self.fields, self.multiple, self.encoder.pad_token_id) for row in fillers]
        batch = thd.assemble(
            joinable([*rows, *padded], self.fields),
            multiple=self.multiple,
            extra_fields=self.fields,
            width=self.packing.seq_length if self.packing.pad_to_max_length else None,
            pad_token_id=self.encoder.pad_token_id,
        )
        return self.with_boundaries_of_run(mask_fillers(batch, len(fillers)))

    def with_boundaries_of_run(self, batch: thd.PackedBatch) -> thd.PackedBatch:
        """Returns the row with the boundaries that ``packing.padding`` and ``packing.pad_cu_seqlens`` ask for."""
        if self._padding == "real":
            batch = thd.real_padding(batch)
        if not self.packing.pad_cu_seqlens:
            return batch
        most = (self.packing.max_segments_per_pack or 0) + 1  # and the masked rest of the row
        return thd.pad_cu_seqlens(batch, max_segments=most, max_seqlen=self.packing.seq_length)

    def packed(
        self, dataset: internals.SavableDataset[Any], buffer_size: int | None, worker_config: WorkerConfig
    ) -> internals.SavableDataset[Any]:
        """Packs the measured samples, from the window or from disjoint buffers; splits long samples if configured."""
        if self.packing.oversize == "split":
            dataset = SplitPieces(dataset, worker_config=worker_config)
        return super().packed(dataset, buffer_size, worker_config)

    def plan_cost(self, plan: Sequence[AnyMeasured]) -> float:
        return float(sum(sum(self.cost.costs(sample)) for sample in plan))


def _encoders(
    encoder: EncoderConfig | SampleEncoder | Sequence[SampleEncoder], packing: PackingConfig, processor: Any
) -> tuple[SampleEncoder, ...]:
    if isinstance(encoder, EncoderConfig):
        limits, sentences = lowered(encoder.limits, packing)
        if sentences:
            named = ", ".join(f"encoder.limits.{sentence}" for sentence in sentences)
            warnings.warn(f"A sample must fit into a pack, so these were lowered: {named}.", stacklevel=2)
        return (ConversationEncoder(dataclasses.replace(encoder, limits=limits), processor=processor),)
    encoders = (encoder,) if isinstance(encoder, SampleEncoder) else tuple(encoder)
    if processor is not None or not encoders:
        raise ConfigError("PackingTaskEncoder needs a configuration and a processor, or at least one built encoder.")
    for name in ("extra_fields", "position_ids"):
        if len({getattr(each.config, name) for each in encoders}) > 1:
            raise ConfigError(f"encoder.{name} differs between the encoders of one pack; give all of them the same.")
    return encoders
