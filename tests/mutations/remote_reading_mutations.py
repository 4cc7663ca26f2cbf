"""The traps of reading from an object store in training; what a row means is told in `mutation_table`."""

from mutation_table import Mutation

AHEAD = "tests/offline/test_reading_ahead.py::"
ANOTHER = AHEAD + "test_an_object_that_is_another_is_named_once_when_its_pack_is_asked_for[polylithic-"
RANGES = AHEAD + "test_ranges_are_the_bytes_of_the_file_in_few_requests"
SOURCE = "offline/source.py"

REMOTE_READING_TRAPS = {
    271: "bytes that were read ahead are others than those that are asked for",
    272: "a pack takes a request for each of its files, or one more for what is known",
    273: "reading ahead holds more bytes than allowed, or what no pack needs any more",
    274: "reading ahead serves another worker, or an object that changed is waited for",
}

REMOTE_READING_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=271,
        name="a joined range hands out its first bytes for each file in it",
        test=RANGES,
        oracle="the bytes of the file",
        edits=(
            (
                SOURCE,
                ".result()[offset - piece.start :]",
                ".result()",
            ),
        ),
    ),
    Mutation(
        trap=271,
        name="a file that continues in the next piece ends where the first one does",
        test=RANGES,
        oracle="the bytes of the file",
        edits=(
            (
                SOURCE,
                "offset, size = offset + len(part), size - len(part)",
                "size = 0",
            ),
        ),
    ),
    Mutation(
        trap=272,
        name="neighbours are read by a request each",
        test=RANGES,
        oracle="the requests of the store",
        edits=((SOURCE, "begin - stop <= GAP and", "begin - stop < 0 and"),),
    ),
    Mutation(
        trap=272,
        name="the store is asked for the size of a shard that the manifest says",
        test=AHEAD + "test_a_pack_takes_few_requests[polylithic-copied]",
        oracle="the requests of the store",
        edits=(("offline/shards.py", "self._size or present(self._address).size", "present(self._address).size"),),
    ),
    Mutation(
        trap=273,
        name="packs are read ahead however many bytes are held",
        test=AHEAD + "test_no_more_is_held_than_was_allowed_and_one_pack[polylithic-plan.parquet]",
        oracle="the bound",
        edits=((SOURCE, "return done and self.held < MOST_AHEAD", "return done"),),
    ),
    Mutation(
        trap=273,
        name="media of a sample that was dropped are held for good",
        test=RANGES,
        oracle="the bound",
        edits=((SOURCE, "        self.remote.forget(lambda owner: owner is None)\n", ""),),
    ),
    Mutation(
        trap=274,
        name="a worker reads ahead for packs that others are given",
        test=AHEAD + "test_each_worker_reads_ahead_for_what_torch_gives_it_next[2]",
        oracle="torch's own order",
        edits=(("offline/loader.py", "yield [*coming][::workers]", "yield [*coming][:PACKS_AHEAD]"),),
    ),
    Mutation(
        trap=272,
        name="a shard that was closed is not read ahead again",
        test=AHEAD + "test_shards_that_were_closed_are_read_ahead_in_later_passes_too[polylithic-pixels]",
        oracle="the thread that reads",
        edits=(
            (
                "offline/packed.py",
                "if at not in self._shards:\n            if facts",
                'if at not in (it := vars(self).setdefault("_seen", set())) and not it.add(at):\n            if facts',
            ),
        ),
    ),
    Mutation(
        trap=272,
        name="what two packs need is counted once",
        test=AHEAD + "test_packs_share_what_is_read_ahead_for_both",
        oracle="the requests",
        edits=(("offline/source.py", "piece.owner, piece.left = owner, piece.left + part", "pass"),),
    ),
    Mutation(
        trap=274,
        name="a shard that became shorter is taken for a store that is away",
        test=ANOTHER + "other-pixels/shard-00001.bin]",
        oracle="the shard that was put there",
        edits=(("remote_files.py", "if offset < client.info(path).content_length:", "if True:"),),
    ),
    Mutation(
        trap=274,
        name="copied media of another size are read",
        test=ANOTHER + "longer-copied/media-00001.bin]",
        oracle="the size in the manifest",
        edits=(("offline/packed.py", "if size != entry.media_bytes:", "if False:"),),
    ),
)
