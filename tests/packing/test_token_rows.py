"""Rows of tokens: fast-axolotl's documented examples, and that nothing leaks or gets lost."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bridge_cpu.tiny_models import hugging_face_config
from transformers import AutoModelForCausalLM

from energon_packing.errors import ConfigError, UserError
from energon_packing.packing import concatenate_and_pack, pack_sequences


def test_the_published_example_gives_the_published_rows() -> None:
    sequences = [torch.tensor([1, 2, 3]), torch.tensor([4, 5]), torch.tensor([6, 7, 8, 9]), torch.tensor([10, 11, 12])]
    packed = pack_sequences(sequences, max_length=8, pad_token_id=0)
    assert packed.dtype == torch.int64
    assert packed.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [6, 7, 8, 9, 10, 11, 12, 0]]


def test_boundaries_are_start_and_end_of_each_sequence_in_its_row() -> None:
    packed, boundaries = pack_sequences([[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11, 12]], 8, 0, return_boundaries=True)
    assert boundaries == [[(0, 3), (3, 5)], [(0, 4), (4, 7)]]
    assert boundaries.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2, 0]]
    assert [row.tolist() for row in boundaries.cu_seqlens] == [[0, 3, 5, 8], [0, 4, 7, 8]]
    assert all(row.dtype == torch.int32 for row in boundaries.cu_seqlens)
    assert [packed[0, a:b].tolist() for a, b in boundaries[0]] == [[1, 2, 3], [4, 5]]


def test_labels_and_masks_are_packed_beside_the_tokens() -> None:
    ids, labels, mask = rows = concatenate_and_pack(
        [[1, 2, 3], [4, 5, 6, 7]],
        [[-100, 2, 3], [4, -100, 6, 7]],
        [[1, 1, 1], [1, 1, 1, 1]],
        max_length=8,
        pad_token_id=0,
        label_pad_id=-100,
    )
    assert ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 0]]
    assert labels.tolist() == [[-100, 2, 3, 4, -100, 6, 7, -100]]
    assert mask.tolist() == [[1, 1, 1, 1, 1, 1, 1, 0]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert rows.boundaries == [[(0, 3), (3, 7)]]


def test_the_first_label_of_each_segment_can_be_masked_for_models_that_shift() -> None:
    rows = concatenate_and_pack([[1, 2], [3, 4]], [[1, 2], [3, 4]], [[1, 1], [1, 1]], 5, 0, mask_first_label=True)
    assert rows.labels.tolist() == [[-100, 2, -100, 4, -100]]


def test_each_oversize_mode_does_what_it_says() -> None:
    sequences = [[1, 2], [3, 4, 5, 6, 7], []]
    with pytest.raises(UserError, match="sequence 1 has 5 tokens, a row holds 4"):
        pack_sequences(sequences, 4, 0)
    packed, where = pack_sequences(sequences, 4, 0, True, oversize="drop")
    assert packed.tolist() == [[1, 2, 0, 0]]
    assert where.dropped == [1, 2]
    assert pack_sequences(sequences, 4, 0, oversize="truncate").tolist() == [[1, 2, 0, 0], [3, 4, 5, 6]]
    packed, where = pack_sequences(sequences, 4, 0, True, oversize="split", policy="best_fit")
    assert sorted(packed.tolist()) == [[1, 2, 7, 0], [3, 4, 5, 6]]
    assert where.dropped == [2]
    with pytest.raises(ConfigError, match="'pad'"):
        pack_sequences(sequences, 4, 0, oversize="pad")  # type: ignore[call-overload]


def test_unequal_labels_or_masks_are_refused_by_index() -> None:
    with pytest.raises(UserError, match="sequence 1 has 2 input_ids, 1 labels"):
        concatenate_and_pack([[1], [1, 2]], [[1], [1]], [[1], [1, 1]], 4, 0)
    with pytest.raises(UserError, match="1 labels"):
        concatenate_and_pack([[1], [1, 2]], [[1]], [[1], [1, 1]], 4, 0)


def test_a_tokenizer_without_padding_token_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"pad_token_id is None.*such as its eos_token_id"):
        pack_sequences([[1, 2]], 4, None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^label_pad_id is None.*-100"):
        concatenate_and_pack([[1]], [[1]], [[1]], 4, 0, None)  # type: ignore[arg-type]


def test_a_model_sees_each_sequence_alone_only_by_positions_without_cache_and_mask() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hugging_face_config("text", vocab_size=99)).eval()
    sequences = [torch.randint(1, 99, (length,)).tolist() for length in (5, 9, 7)]
    rows = concatenate_and_pack(sequences, sequences, [[1] * len(each) for each in sequences], 24, 0)

    @torch.no_grad()
    def far(**given: Any) -> float:
        """The largest difference of a logit from that of the sequence alone."""
        alone = torch.cat([model(input_ids=torch.tensor([each])).logits[0] for each in sequences])
        packed = model(input_ids=rows.input_ids, position_ids=rows.position_ids, **given).logits[0]
        return float((packed[: len(alone)] - alone).abs().max())

    assert far(use_cache=False) < 1e-5
    assert far() > 0.1  # transformers looks for segments neither beside a cache
    assert far(use_cache=False, attention_mask=rows.attention_mask) > 0.1  # nor beside a mask


def test_no_sequences_give_no_rows() -> None:
    assert pack_sequences([], 4, 0).shape == (0, 4)


@given(
    st.lists(st.lists(st.integers(1, 9), max_size=14), max_size=15),
    st.integers(1, 8),
    st.sampled_from(["next_fit", "best_fit", "window"]),
)
@settings(max_examples=200, deadline=None)
def test_splitting_loses_no_token_and_segments_lead_back_to_their_sequences(
    sequences: list[list[int]], max_length: int, policy: str
) -> None:
    packed, where = pack_sequences(sequences, max_length, 0, True, policy=policy, oversize="split")
    found = [[0] * len(sequence) for sequence in sequences]
    for row, segments, cu_seqlens, positions in zip(
        packed.tolist(), where.segments, where.cu_seqlens, where.position_ids.tolist(), strict=True
    ):
        for segment in segments:
            tokens = row[segment.start : segment.end]
            found[segment.sequence][segment.offset : segment.offset + len(tokens)] = tokens
            assert positions[segment.start : segment.end] == list(range(len(tokens)))
        bounds = cu_seqlens.tolist()
        assert bounds[0] == 0
        assert bounds[-1] == max_length
        assert all(earlier < later for earlier, later in itertools.pairwise(bounds))
        assert set(row[segments[-1].end :]) <= {0}
    assert found == sequences
