"""Loss weights by token, by sample and by square root, through Bridge's own loss function."""

import importlib.util
import math
from functools import cache

import pytest
import torch

from energon_packing import thd
from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation, Turn
from energon_packing.demo import processor_path
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.targets import FIXED_POINT

SHARE = {"token": lambda x: 1.0, "sample": lambda x: 1 / x, "square": lambda x: 1 / math.sqrt(x)}
WORDS = ((1, 70, 3), (200,), (9, 9), (2, 2, 2, 2, 120))
"""Words of the answers of each sample, by pack: packs of very uneven numbers of targets."""


@pytest.fixture(scope="module")
def bridge_loss():
    """Bridge's loss function; the installed packages stand on kernels that a machine without an accelerator lacks."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip("Megatron-Bridge is not installed")
    from support.bridge_cpu import stand_ins

    stand_ins.install()
    from megatron.bridge.training.losses import masked_next_token_loss

    yield masked_next_token_loss
    stand_ins.uninstall()


@cache
def encoder(weighting: str, **settings) -> ConversationEncoder:
    return ConversationEncoder(
        EncoderConfig(processor=str(processor_path("text")), loss_weighting=weighting, **settings)
    )


def sample(words: int, weight: float | None = None) -> Conversation:
    turns = (
        Turn(role="user", parts=(f"Say {words}.",)),
        Turn(role="assistant", parts=("and so on " * words,), loss_weight=weight),
    )
    return Conversation(key=str(words), turns=turns)


def packs(by: ConversationEncoder, multiple: int = 1):
    """Packs of whole rows, as the loader makes them."""
    return [
        thd.assemble([by.render(by.measure(sample(words)), lambda name: b"") for words in pack], multiple=multiple)
        for pack in WORDS
    ]


def reference(weighting: str, logits: torch.Tensor, known: torch.Tensor, made) -> torch.Tensor:
    """The weighted mean of all targets of all packs, straight from its definition, in double precision."""
    total = torch.zeros((), dtype=torch.float64)
    norm = 0.0
    for batch in made:
        for row in thd.unpack(batch):
            at = (row["labels"] != -100).nonzero()[:, 0]
            given, targets = (torch.searchsorted(known, row[name][at]) for name in ("input_ids", "labels"))
            losses = torch.nn.functional.cross_entropy(logits[given], targets, reduction="sum")
            share = SHARE[weighting](len(at))
            total = total + share * losses
            norm += share * len(at)
    return total / norm


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("weighting", ["token", "sample", "square"])
def test_bridges_loss_over_uneven_packs_has_the_gradient_of_the_weighted_mean(bridge_loss, weighting, multiple):
    made = packs(encoder(weighting), multiple)
    known = torch.cat([batch.tokens[0] for batch in made]).unique()
    torch.manual_seed(0)
    logits = torch.randn(len(known), len(known), dtype=torch.float64, requires_grad=True)  # of a bigram model
    mean = reference(weighting, logits, known, made)
    (expected,) = torch.autograd.grad(mean, logits)
    value = mean.item()

    total, tokens = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int)
    for batch in made:
        targets = torch.where(batch.labels[0] == -100, -100, torch.searchsorted(known, batch.labels[0]))
        given = torch.searchsorted(known, batch.tokens[0])
        losses = torch.nn.functional.cross_entropy(logits[given], targets, reduction="none")
        loss, count, _ = bridge_loss(batch.loss_mask, losses.float(), check_for_nan_in_loss=False)
        assert count.dtype == torch.int
        exact = batch.loss_mask.double().sum()
        assert abs(exact - count) <= 1e-4 * exact
        total = total + loss
        tokens += count
    (found,) = torch.autograd.grad(total / tokens, logits)
    assert (total / tokens).item() == pytest.approx(value, rel=1e-4)
    assert (found - expected).norm() <= 1e-4 * expected.norm()


TURNS = (None,), (0.5,), (2.0, 0.25), (0.0, None, 0.01), (1.0, 1.0), (100.0,)
"""Weights of the answers of samples."""


@pytest.mark.parametrize("weighting", ["token", "sample", "square"])
def test_samples_count_the_same_whatever_their_turns_weigh_and_turns_weigh_what_they_say(weighting):
    made = encoder(weighting)
    for number, given in enumerate(TURNS):
        talks = [sample(3 * at + number + 1, weight) for at, weight in enumerate(given)]
        conversation = Conversation(key="k", turns=tuple(turn for talk in talks for turn in talk.turns))
        weights = made.measure(conversation).expand()[1]
        own = encoder("token").measure(conversation).expand()[1]
        assert weights[1:].tolist() == pytest.approx((own[1:] * weights.sum() / own.sum()).tolist())
        # len2weight of InternVL's finetuning script, of the targets that a sample has by its weights
        counts = {"token": own.sum(), "sample": 1.0, "square": own.sum() ** 0.5}[weighting]
        scale = 1 if weighting == "token" else FIXED_POINT
        assert weights.sum(dtype=float) == pytest.approx(scale * counts, rel=1e-5)


def test_the_pieces_of_a_sample_count_as_the_sample_and_each_answer_of_a_pair_as_one():
    made = encoder("sample")
    turns = (*sample(9, 0.5).turns, *sample(7).turns, *sample(8, 2.0).turns)
    whole = Conversation(key="k", turns=turns)
    split = made.split(whole, made.measure(whole), lambda tokens, *_: tokens <= 60)
    assert len(split.pieces) == 3
    assert sum(piece.expand()[1].sum(dtype=float) for piece in split.pieces) == pytest.approx(FIXED_POINT, rel=1e-5)
    chosen, rejected = sample(5, 0.5).turns[1:], sample(30).turns[1:]
    pair = made.measure_pair(Conversation(key="p", turns=turns[:1], chosen=chosen, rejected=rejected))
    assert [answer.expand()[1].sum() for answer in pair.segments] == pytest.approx([FIXED_POINT] * 2, rel=1e-5)


def test_plain_token_weights_stay_ones_unless_a_scale_is_set():
    assert set(encoder("token").measure(sample(5)).expand()[1]) == {0.0, 1.0}
    assert set(encoder("token", loss_scale=8).measure(sample(5)).expand()[1]) == {0.0, 8.0}
