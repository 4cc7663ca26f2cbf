"""The traps of files in object stores; what a row means is told in `mutation_table`."""

from mutation_table import Mutation

ADDRESSES = "tests/offline/test_addresses.py::"
REMOTE = "tests/convert/test_convert_remote.py::"
FILES, PACKS = "remote_files.py", "offline/packs.py"

STORE_TRAPS = {
    257: "an object with other bytes is trained, or an index that knows less is measured again",
    258: "what is in a store looks complete, or as it was sent, and is not",
    259: "an answer with fewer bytes than were asked for is the end of a file",
    260: "a password is in a file or a message",
}

STORE_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=257,
        name="a shard of records with another version is trained",
        test=ADDRESSES + "test_an_object_with_other_bytes_of_the_same_size_is_named_before_it_is_trained[polylithic]",
        oracle="bytes that were changed under an equal size, on an S3 server (moto)",
        edits=(
            (
                PACKS,
                '            (version != known, f"version {version} instead of {known}"),\n',
                "",
            ),
        ),
    ),
    Mutation(
        trap=257,
        name="a shard of media has no version",
        test=ADDRESSES + "test_an_object_with_other_bytes_of_the_same_size_is_named_before_it_is_trained[polylithic]",
        oracle="bytes that were changed under an equal size, on an S3 server (moto)",
        edits=(
            (
                "offline/index.py",
                'return f"{size} bytes" + (f", version {version}" if version else ""), changed',
                'return f"{size} bytes", changed',
            ),
        ),
    ),
    Mutation(
        trap=257,
        name="shards of an index without versions are measured again",
        test=ADDRESSES + "test_an_index_of_before_that_knows_no_version_is_measured_no_second_time[polylithic]",
        oracle="the number of shards measured",
        edits=(
            (
                "offline/measure.py",
                '        if "version" not in stored.get("identity", ()):',
                '        if "version" not in identity:',
            ),
        ),
    ),
    Mutation(
        trap=258,
        name="what was stored is not compared",
        test=REMOTE + "test_what_is_stored_is_read_back",
        oracle="a client that damages what it uploads",
        edits=((FILES, "    if not is_stored(file, address):\n", "    if not exists(Path(address)):\n"),),
    ),
    Mutation(
        trap=258,
        name="any checksum of a store is that of the file",
        test=ADDRESSES + "test_what_is_stored_in_parts_is_compared_without_reading_it_back[polylithic]",
        oracle="a file that was changed in the middle of a part, and the server's checksum of parts",
        edits=((FILES, 'if md5(b"".join(sums)).hexdigest() == whole:', "if whole:"),),
    ),
    Mutation(
        trap=258,
        name="a conversion that lost a shard in the store is completed",
        test=REMOTE + "test_a_conversion_that_was_stored_in_part_is_completed_and_what_is_missing_is_named",
        oracle="a data set of which a shard was moved away",
        edits=(
            (
                "convert/workspace.py",
                "            if lost := self._lost(shards - files.keys()):\n",
                "            if lost := shards - shards:\n",
            ),
        ),
    ),
    Mutation(
        trap=258,
        name="shards of a conversion stay on this machine until all are there",
        test=REMOTE + "test_an_output_in_a_store_is_kept_resumed_replaced_or_refused",
        oracle="the tars on this machine at each upload",
        edits=(("convert/workspace.py", "                file.unlink()\n", ""),),
    ),
    Mutation(
        trap=259,
        name="a range with fewer bytes is taken as it is",
        test=ADDRESSES + "test_every_file_and_pack_is_the_same_from_and_to_a_store_that_fails[polylithic]",
        oracle="files and packs of a disk, and an S3 server that gives fewer bytes",
        edits=((FILES, "if len(content) < size and offset + len(content) < client", "if size < 0 and client"),),
    ),
    Mutation(
        trap=260,
        name="a message repeats the address with its password",
        test=ADDRESSES + "test_no_file_or_message_has_a_password[polylithic]",
        oracle="a search for the password in every byte",
        edits=(
            (
                FILES,
                'return str(path) if address is None else _SIGNED.sub("?...", _USER.sub("://...@", address))',
                "return address or str(path)",
            ),
        ),
    ),
    Mutation(
        trap=258,
        name="shards of another conversion are taken for those that were sent",
        test=REMOTE + "test_conversions_to_one_address_never_make_a_data_set_of_each_others_shards[another node]",
        oracle="the texts of two conversions to one address",
        edits=(
            (
                "convert/workspace.py",
                "if name not in notes or notes[name] != there.get(name)}",
                "if name not in notes or name not in there}",
            ),
        ),
    ),
    Mutation(
        trap=258,
        name="a conversion that was killed before old shards were removed is finished",
        test=REMOTE + "test_conversions_to_one_address_never_make_a_data_set_of_each_others_shards[old shards]",
        oracle="the tars that are left",
        edits=(("convert/workspace.py", "None if exists(config.out / MARK) else read_report", "read_report"),),
    ),
    Mutation(
        trap=258,
        name="two conversions on one machine write to one address",
        test=REMOTE + "test_conversions_to_one_address_never_make_a_data_set_of_each_others_shards[this node]",
        oracle="a second conversion while the first stores what completes it",
        edits=(
            (
                "convert/pipeline.py",
                "            stack.enter_context(workspace.alone(local.parent, config.out))\n",
                "            pass\n",
            ),
        ),
    ),
    Mutation(
        trap=258,
        name="a plan in a store is replaced by that of other packs",
        test=ADDRESSES + "test_neither_packs_nor_an_index_take_the_place_of_others[polylithic-there]",
        oracle="the id of the plan that was there",
        edits=(
            (
                "offline/formats/shards.py",
                'if new and there and there.get("id") != self.facts.plan:',
                "if not there and new and there:",
            ),
        ),
    ),
    Mutation(
        trap=260,
        name="a secret key with a slash is no secret",
        test=ADDRESSES + "test_no_message_repeats_a_key_or_a_signature",
        oracle="a search for the secret in what commands print",
        edits=((FILES, r'"://[^/?#\s]*(?::\S*)?@"', r'"://[^/?#\s]*@"'),),
    ),
    Mutation(
        trap=260,
        name="a traceback has the keys of the configuration",
        test=ADDRESSES + "test_a_mistake_in_the_configuration_is_one_sentence_and_no_traceback_has_a_key[profile0-"
        "credentials_provider: 'type' is a required]",
        oracle="a search for the key in the traceback",
        edits=(
            (
                FILES,
                'see to its profile for multi-storage-client") from None',
                'see to its profile for it") from error',
            ),
        ),
    ),
    Mutation(
        trap=258,
        name="a shard whose version a list calls otherwise is lost",
        test=REMOTE + "test_lists_that_call_versions_otherwise_than_answers_about_a_file_lose_no_shard",
        oracle="the names that a provider of multi-storage-client gives",
        edits=(("convert/workspace.py", "notes[name] != there.get(name)]\n", "False]\n"),),
    ),
    Mutation(
        trap=258,
        name="an index lacks what another command overwrote at once",
        test=ADDRESSES + "test_an_index_that_another_command_stores_at_once_loses_no_data_set[polylithic-gone]",
        oracle="the data sets of both commands",
        edits=(("offline/measure.py", "if any(of(it) not in stored for it in datasets):", "if False:"),),
    ),
)
