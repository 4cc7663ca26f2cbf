"""How packs of each kind of sample are stored and read again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from energon_packing.offline.clip_packer import ClipPacker
from energon_packing.offline.conversation_packer import ConversationPacker
from energon_packing.offline.index import Kind
from energon_packing.offline.packed_clips import PackedClips
from energon_packing.offline.packed_packs import PackedPacks, StoredPacks
from energon_packing.offline.shard_packer import ShardPacker


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredKind:
    """What writes and what reads shards of a packed directory."""

    packer: type[ShardPacker]
    packs: type[StoredPacks[Any]]


STORED_KINDS: Mapping[Kind, StoredKind] = {
    "conversations": StoredKind(packer=ConversationPacker, packs=PackedPacks),
    "clips": StoredKind(packer=ClipPacker, packs=PackedClips),
}
