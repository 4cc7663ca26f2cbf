"""What settings of other packers and trainers are here, by their names there; docs/migration.md has their defaults."""

_PACKED = "has no counterpart here: rows are always packed, and samples see themselves only"

COUNTERPARTS = {
    "InternVL": {
        "use_packed_ds": _PACKED,
        "max_packed_tokens": "is packing.seq_length here",
        "max_buffer_size": "is packing.window here, which counts samples, not open packs",
        "num_images_expected": "is packing.max_images_per_pack here",
        "allow_overflow": "has no counterpart here: no pack is longer than its row (see packing.oversize)",
        "strict_mode": "is packing.pad_to_max_length here, for tokens; images are not padded",
        "replacement": "is data.repeat here",
        "log_freq": "is metrics.interval here",
        "loss_reduction": "is encoder.loss_weighting here",
        "min_num_frame": "is encoder.video_min_frames here",
        "max_num_frame": "is encoder.video_max_frames here",
        "conv_style": "is encoder.chat_template here; the processor's is the default",
    },
    "LLaMA-Factory": {
        "cutoff_len": "is packing.seq_length here",
        "neat_packing": _PACKED,
        "mask_history": "is encoder.train_on here, with the value last_assistant",
        "train_on_prompt": "is encoder.train_on here, with the value all",
        "image_max_pixels": "is encoder.max_pixels here",
        "image_min_pixels": "is encoder.min_pixels here",
        "video_maxlen": "is encoder.video_max_frames here",
        "buffer_size": "is data.shuffle_buffer here",
        "preprocessing_num_workers": "is data.workers here",
    },
    "ms-swift": {
        "packing_length": "is packing.seq_length here",
        "packing_strategy": "is packing.policy here",
        "truncation_strategy": "is packing.oversize here",
        "padding_free": _PACKED,
    },
    "Bridge's native packing": {"packing_buffer_size": "is packing.window here"},
    "LoongForge": {"max_token_len": "is packing.seq_length here"},
}
"""Trainer -> name of a setting there -> what it is here, as the end of a sentence."""
