"""Indexes, plans and packed directories in an object store are those of this machine, byte for byte, whatever the store
answers in between.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import tempfile
import traceback
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("moto", reason="scripts/requirements/4-project.txt")
pytest.importorskip("boto3", reason="scripts/requirements/4-project.txt")

import multistorageclient
from botocore.exceptions import ClientError
from click.testing import CliRunner
from support.object_store import BUCKET, object_store
from test_planned_loader import digests

from energon_packing import errors, remote_files
from energon_packing.cli.main import cli
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import processor_path
from energon_packing.errors import UserError
from energon_packing.offline import measure as measuring
from energon_packing.offline.files import HOST, read_json, write_json, writing
from energon_packing.offline.files import said as said_of_error
from energon_packing.offline.index import Index
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.pack import PackConfig, pack
from energon_packing.offline.plan import Plan
from energon_packing.offline.planner import make_plan
from energon_packing.offline.verify import VerifyConfig, verify

FAULTS = {"503": 0.01, "hang": 0.01, "cut": 0.01, "less": 0.01}


@pytest.fixture(scope="module")
def served(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch, object_store(dataset, folder) as (store, address, config):
        patch.setenv("MSC_CONFIG", str(config))
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setattr(errors, "PAUSES", (0.01, 0.01, 0.01))
        yield store, address


def contents(place):
    """Name -> SHA-256 of every file, here or in the store."""
    if (address := remote_files.remote_address(place)) is not None:
        files = {name: remote_files.read(f"{address}/{name}") for name, _ in remote_files.listed(address)}
    else:
        files = {
            path.relative_to(place).as_posix(): path.read_bytes()
            for path in place.rglob("*")
            if path.is_file() and path.name != ".lock"
        }
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


class Killed(BaseException):
    """A process that ends."""


@contextlib.contextmanager
def failing(store):
    store.fail_at_random(7, **FAULTS)
    yield
    store.fail_at_random(0)


def said_of(directory):
    """What `verify` says of a directory; nothing if all is well."""
    try:
        findings = verify(VerifyConfig(directory=directory, workers=0)).findings
    except UserError as error:
        return str(error)
    return "".join(map(str, findings))


def beside(address, name):
    return Path(os.path.dirname(address)) / name


def made(run, data, out, workers=0):
    measure(MeasureConfig(paths=(data,), out=out / "index", workers=workers), run)
    make_plan([out / "index"], run, out / "plan.parquet", force=True)
    for name, how in {
        "named": {},
        "copied": {"media": "copy", "workers": workers},
        "pixels": {"store": "pixels"},
    }.items():
        pack(PackConfig(**({"plan": out / "plan.parquet", "out": out / name, "workers": 0, "shard_packs": 2} | how)))
    return contents(out)


def loaded(run, path):
    data = type(run.data)(path=remote_files.shown(path), workers=0, repeat=False)
    return digests(open_loader(type(run)(data=data, encoder=run.encoder, packing=run.packing)))


def test_every_file_and_pack_is_the_same_from_and_to_a_store_that_fails(served, dataset, run_of, tmp_path):
    store, address = served
    run = run_of(dataset)
    here, there = tmp_path, beside(address, "made")
    plain = made(run, dataset, here / "plain")
    expected = loaded(run, here / "plain/plan.parquet")
    with failing(store):
        found = {
            (at, to): made(run, Path(data), out / f"of-{at}", workers=2)
            for at, data in {"here": dataset, "there": address}.items()
            for to, out in {"here": here, "there": there}.items()
        }
        assert found["here", "here"] == found["here", "there"] == plain
        assert found["there", "here"] == found["there", "there"]

        def packs(files):  # an index and a plan also say where the data are
            return {name: sha for name, sha in files.items() if name[:5] != "index" and "plan." not in name}

        assert packs(found["there", "there"]) == packs(plain)
        for at in ("here", "there"):
            for name in ("plan.parquet", "named", "copied"):
                assert loaded(run, there / f"of-{at}/{name}") == expected
            assert not verify(VerifyConfig(directory=there / f"of-{at}/copied", share=0.3, workers=0)).findings
            for name in ("plan.parquet", "index"):
                assert not verify(VerifyConfig(directory=there / f"of-{at}/{name}")).findings
        assert all(store.given[fault] for fault in FAULTS)
    assert not list(remote_files.private_directory().glob(".*"))  # nothing is left aside


@pytest.mark.full
def test_a_command_that_dies_between_two_uploads_leaves_nothing_complete_and_the_next_one_goes_on(
    served, dataset, run_of, tmp_path, monkeypatch
):
    _, address = served
    run, out = run_of(dataset), beside(address, "dies")
    plain = made(run, dataset, tmp_path / "plain")
    stored = []

    def store(file, target, original=remote_files.store):
        if len(stored) == most:
            raise Killed
        stored.append(target)
        original(file, target)

    monkeypatch.setattr("energon_packing.offline.files.store", store)
    (left := remote_files.private_directory() / f".0123.{HOST}.{1 << 22}").write_text("of a process that was killed")
    found, most, told = None, 0, set()
    while found is None:
        stored.clear()
        try:
            found = made(run, dataset, out)
        except Killed:
            most += 2
            told |= {said_of(out / name) for name in ("index", "named", "copied")}
    known = "", "is not an index", "holds no data set", "is not a packed directory", "is not complete"
    assert {next(each for each in known[::-1] if each in said) for said in told} == {*known} - {"is not an index"}
    assert found == plain
    assert not left.exists()


def test_an_object_with_other_bytes_of_the_same_size_is_named_before_it_is_trained(served, dataset, run_of, tmp_path):
    _, address = served
    run = run_of(dataset)
    made(run, Path(address), out := beside(address, "changed"))
    for kind in ("text/train", "media/media"):
        tar = f"{address}/{kind}-000000.tar"
        before = remote_files.read(tar)
        (file := tmp_path / "tar").write_bytes(before[:600] + bytes([before[600] ^ 1]) + before[601:])
        remote_files.store(file, tar)
        for path in ("plan.parquet", "named")[: 1 + (kind == "media/media")]:  # packs hold the texts
            with pytest.raises(UserError, match=rf"{tar} changed since it was measured \(.*version \w+ instead of"):
                loaded(run, out / path)
        (report,) = [measure(MeasureConfig(paths=(Path(address),), out=out / "index", workers=0), run)]
        assert report.measured > 0
        file.write_bytes(before)
        remote_files.store(file, tar)
    assert measure(MeasureConfig(paths=(Path(address),), out=out / "index", workers=0), run).measured > 0
    assert loaded(run, out / "plan.parquet")


def test_an_index_of_before_that_knows_no_version_is_measured_no_second_time(
    served, dataset, run_of, tmp_path, monkeypatch
):
    _, address = served
    run, out = run_of(dataset), tmp_path / "index"
    described = remote_files._described
    monkeypatch.setattr(remote_files, "_described", lambda there: dataclasses.replace(described(there), version=""))
    config = MeasureConfig(paths=(Path(address),), out=out, workers=0)
    before = measure(config, run)
    assert before.measured
    make_plan([out], run, tmp_path / "plan.parquet")
    monkeypatch.setattr(remote_files, "_described", described)
    assert (after := measure(config, run)).measured == 0
    assert after.reused == before.measured
    assert loaded(run, tmp_path / "plan.parquet")


def test_no_file_or_message_has_a_password(served, dataset, run_of, tmp_path, capfd):
    _, address = served
    run = run_of(dataset)
    secret = "pa55word"
    with pytest.MonkeyPatch.context() as patch:
        config = json.loads(Path(os.environ["MSC_CONFIG"]).read_text())
        for each in list(config["profiles"].values()):
            each["credentials_provider"]["options"]["secret_key"] = secret
            config["profiles"][(profile := f"secret-{tmp_path.name}")] = each
        (tmp_path / "msc.json").write_text(json.dumps(config))
        patch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
        data = Path(f"msc://{profile}/{address.rpartition('/')[2]}")
        out = data.parent / "secret"
        made(run, data, out)
        packs = open_loader(run_of(remote_files.shown(out / "plan.parquet")))
        next(iter(packs))
        state = json.dumps(packs.save_state(), default=str)
        files = [remote_files.read(f"{remote_files.shown(out)}/{name}") for name in contents(out)]
    assert len(files) > 10
    assert not any(secret.encode() in file for file in files)
    assert secret not in state
    for what in ("measure", "plan", "pack", "verify", "stats"):
        place = f"s3://key:{secret}@bucket/{what}.parquet"
        more = {"measure": ["--list", "--out"], "plan": ["--out", "p.parquet"], "pack": ["--out", "p"]}.get(what, [])
        done = CliRunner().invoke(cli, [what, *more, place])
        assert (done.exit_code, secret in done.output) == (2, False), done.output
        assert "://...@bucket" in done.output
    out, err = capfd.readouterr()
    assert secret not in out + err


@pytest.mark.parametrize("address", ["s3://bucket/da@ta", "msc://p/x:y@z", "gs://a/b #1?.json", "s3://a/l=?/b=*/c"])
def test_an_address_without_secrets_is_shown_as_it_is(address):
    remote_files.check_remote("--out", address)
    assert remote_files.shown(Path(address)) == address


@pytest.mark.parametrize(
    "address",
    [
        "s3://AKIA4:se/cr+et@bucket/x",
        "s3://AKIA4:se?cr#et@bucket/x/y@z",
        "s3://secret@bucket",
        "https://h/x.parquet?X-Amz-Date=2&X-Amz-Signature=secret",
        "msc://p/x?sv=1/2&sig=secret",
    ],
)
@pytest.mark.usefixtures("served")
def test_no_message_repeats_a_key_or_a_signature(address):
    for arguments in (["verify"], ["stats"], ["plan", "--out", "p.parquet"], ["convert", "--out", "p"]):
        done = CliRunner().invoke(cli, [*arguments, address])
        assert done.exit_code == 2
        assert not re.search("secret|se.cr.et", done.output), done.output
        assert "..." in done.output


def test_an_error_of_a_file_that_is_called_416_is_not_its_end(served, tmp_path, monkeypatch):
    (file := tmp_path / "part-416").write_bytes(b"some")
    remote_files.store(file, target := f"{os.path.dirname(served[1])}/part-416")
    assert remote_files.read_range(target, 4, 4) == b""
    client = type(multistorageclient.resolve_storage_client(target)[0])

    def read(self, path, *_):
        raise RuntimeError(f"Failed to GET {path}: AccessDenied") from ValueError()

    monkeypatch.setattr(client, "read", read)
    with pytest.raises(OSError, match="AccessDenied"):
        remote_files.read_range(target, 0, 4)


@pytest.mark.usefixtures("served")
def test_a_bucket_that_is_missing_and_a_typo_are_one_sentence(dataset, run_of, tmp_path, monkeypatch):
    config = json.loads(Path(os.environ["MSC_CONFIG"]).read_text())
    for each in list(config["profiles"].values()):
        each["storage_provider"]["options"]["base_path"] = "nobucket"
        config["profiles"][(profile := f"none-{tmp_path.name}")] = each
    (tmp_path / "msc.json").write_text(json.dumps(config))
    made(run_of(dataset), dataset, tmp_path / "plain")
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    settings = tmp_path / "run.yaml"
    encoder = f"encoder: {{processor: {processor_path('qwen2_5_vl')}, decode_in_child: false}}\n"
    settings.write_text(encoder + "packing: {pairs: both, drop_budget: 1}\n")
    plan, index = tmp_path / "plain/plan.parquet", tmp_path / "plain/index"
    missing, typo, unknown = f"msc://{profile}", "msx://shelf", "msc://nowhere"
    for place, why in {
        missing: "there is no such bucket",
        typo: "of a kind that is not read",
        unknown: "Profile",
    }.items():
        for arguments in (
            ["measure", dataset, "--config", settings, "--out", f"{place}/index"],
            ["plan", index, "--config", settings, "--out", f"{place}/plan.parquet"],
            ["pack", plan, "--out", f"{place}/packed"],
        ):
            done = CliRunner().invoke(cli, [*map(str, arguments), "--workers", "0"])
            last = done.output.strip().splitlines()[-1]
            assert done.exit_code == 2, done.output
            assert re.match(rf"Error: .*{place}/.*{why}", last), last
    for arguments, said in {
        ("plan", f"{missing}/index", "--config", settings, "--out", "p.parquet"): "is not an index",
        ("pack", f"{missing}/plan.parquet", "--out", "p"): "There is no plan",
        ("verify", f"{missing}/packed"): "is not a packed directory",
        ("preview", f"{missing}/plan.parquet", "--config", settings): "There is no plan",
    }.items():
        done = CliRunner().invoke(cli, [*map(str, arguments)])
        assert done.exit_code == 2
        assert re.match(rf"Error: .*{said}", done.output.strip().splitlines()[-1]), done.output


def of_s3(**more):
    return {"storage_provider": {"type": "s3", "options": {"base_path": "shelf", "region_name": "us-east-1"}}, **more}


def credentials(kind, **options):
    return {"credentials_provider": {"type": kind, "options": options}}


SECRET = "T0P-S3CRET"


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        (of_s3(credentials_provider={"options": {"secret_key": SECRET}}), "credentials_provider: 'type' is a required"),
        (of_s3(credentials_provider={"type": "S3Credentials", "options": SECRET}), "options: its value is not of type"),
        (of_s3(**credentials("S3Credentials", acess_key="k", secret_key=SECRET)), "unexpected keyword .*acess_key"),
        (of_s3(**credentials("FileBasedCredentials", credential_file_path="/none.json")), "not found: /none.json"),
        ({"storage_provider": {"type": "s4", "options": {"base_path": "b"}}}, "type: its value is not one of"),
        ({"storage_provider": {"type": "s3", "options": {}}}, "'base_path' is a required property"),
        (of_s3(**credentials("S3Credentials", access_key=f"a$k{SECRET}", secret_key=f"b${SECRET}1")), "variables .*"),
        (of_s3(**credentials("S3Credentials", access_key="k", secret_key="${LACKS_KEY3}")), r"\$\{LACKS_KEY3\}"),
        (of_s3(**credentials("S3Credentials", access_key="k", secret_key=f"b${{a-B{SECRET}}}c")), "variables .*"),
        ({"storage_provider": {"type": "s3", "options": {"base_path": "b", "profile_name": "no"}}}, "could not be fou"),
    ],
)
def test_a_mistake_in_the_configuration_is_one_sentence_and_no_traceback_has_a_key(
    profile, said, tmp_path, monkeypatch, request
):
    name = hashlib.sha256(request.node.name.encode()).hexdigest()
    (tmp_path / "msc.json").write_text(json.dumps({"profiles": {name: profile}}))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    for ask in (remote_files.status, remote_files.listed):
        with pytest.raises(UserError, match=rf"^msc://{name}/x cannot be used: .*{said}.*; see to its pro") as told:
            ask(f"msc://{name}/x")
        assert "\n" not in str(told.value)
        assert SECRET not in "".join(traceback.format_exception(told.value))
    done = CliRunner().invoke(cli, ["verify", f"msc://{name}/x"])
    assert (done.exit_code, SECRET in done.output) == (2, False), done.output


def of_client(module, **about):
    return type("Refused", (Exception,), {"__module__": module, **about})("told\nso")


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (of_client("google.api_core.exceptions", code=403), UserError, "cannot be used: told so"),
        (of_client("google.api_core.exceptions", code=404), UserError, "there is no such bucket"),
        (of_client("google.api_core.exceptions", code=503), OSError, "told so"),
        (of_client("azure.core.exceptions", status_code=429), OSError, "told so"),
        (of_client("azure.core.exceptions", status_code=403, response=object()), UserError, "told so"),
        (of_client("oci.exceptions", code="NotAuthenticated", status=401), UserError, "told so"),
        (ClientError({"ResponseMetadata": {"HTTPStatusCode": 403}}, "ListObjectsV2"), UserError, "ListObjectsV2"),
        (NotImplementedError("not made"), UserError, "cannot be used: not made"),
        (TypeError("a bug"), TypeError, "a bug"),
        (multistorageclient.types.RetryableError("later"), OSError, "later"),
        (type("CredentialRetrievalError", (Exception,), {"__module__": "botocore.exceptions"})("no"), OSError, "no"),
        (type("RustClientError", (Exception,), {"__module__": "multistorageclient_rust"})("no", 403), UserError, "no"),
    ],
)
def test_what_the_client_of_a_store_says_is_one_sentence_or_tried_again(served, monkeypatch, error, kind, said):
    given = [error] * 99

    def list_recursive(self, *_):
        if given:
            raise given.pop()
        yield from ()

    monkeypatch.setattr(multistorageclient.StorageClient, "list_recursive", list_recursive)
    with pytest.raises(kind, match=said) as told:
        remote_files.listed(served[1])
    assert type(told.value) is kind
    assert len(given) == 99 - (1 + len(errors.PAUSES) if kind is OSError else 1)
    given[:] = [error] * (kind is OSError)
    assert remote_files.listed(served[1]) == []


@pytest.mark.parametrize("error", [TimeoutError("late"), type("CredentialRetrievalError", (Exception,), {})("agent")])
def test_a_store_that_is_away_while_its_client_is_made_is_waited_for(served, monkeypatch, error):
    given, resolve = [error], multistorageclient.resolve_storage_client

    def resolves(address):
        if given:
            raise given.pop()
        return resolve(address)

    monkeypatch.setattr(multistorageclient, "resolve_storage_client", resolves)
    assert remote_files.status(f"{served[1]}/nothing") is None
    given[:] = [error] * 99
    with pytest.raises(OSError, match=str(error)) as told:
        remote_files.status(f"{served[1]}/nothing")
    assert told.value.__suppress_context__ or told.value.__cause__ is None


@pytest.mark.parametrize("checks", [True, False])
def test_a_cache_gives_no_old_bytes_or_is_refused(served, tmp_path, monkeypatch, checks):
    config = json.loads(Path(os.environ["MSC_CONFIG"]).read_text())
    config["cache"] = {"size": "100M", "location": str(tmp_path / "cache"), "check_source_version": checks}
    (profile,) = config["profiles"].values()
    config["profiles"][name := f"cached-{tmp_path.name}"] = {**profile, "caching_enabled": True}
    (tmp_path / "msc.json").write_text(json.dumps(config))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    for content in (b"before", b"later!"):
        (file := tmp_path / "file").write_bytes(content)
        remote_files.store(file, f"{os.path.dirname(served[1])}/cached")
        with contextlib.nullcontext() if checks else pytest.raises(UserError, match="set check_source_version to"):
            found = [remote_files.read_range(f"msc://{name}/cached", at, 9) for at in (0, 1)]
            assert [*found, remote_files.read(f"msc://{name}/cached")] == [content, content[1:], content]


@pytest.mark.parametrize("lost", ["gone", "as before"])
def test_an_index_that_another_command_stores_at_once_loses_no_data_set(
    served, dataset, sources, run_of, tmp_path, monkeypatch, lost
):
    data, out, run, slept = tmp_path / "data", beside(served[1], f"at-once-{lost[:3]}"), run_of(dataset), []
    convert(ConvertConfig(sources=sources[1:], out=data, split={"train": 0.6, "val": 0.4}, workers=0))
    for split in ("train", "val"):
        measure(MeasureConfig(paths=(data,), out=out, split=split, workers=0), run)

    def stores(_):  # the other command read the index before this one stored it
        index = Index.open(out)
        if not slept:
            others = [it for it in index.datasets if it.path != str(dataset)]
            (own,) = (it for it in index.datasets if it.path == str(dataset))
            before = [dataclasses.replace(own, weight=3.0)] if lost == "as before" else []
            dataclasses.replace(index, datasets=(*others, *before)).save()
        slept.append(len(index.datasets))

    monkeypatch.setattr(measuring, "time", SimpleNamespace(sleep=stores))
    measure(MeasureConfig(paths=(dataset,), out=out, workers=0), run)
    assert slept == [3, 3]
    assert {it.weight for it in Index.open(out).datasets} == {None}
    found = sorted((it.path, it.asked) for it in Index.open(out).datasets)
    assert found == sorted([(str(data), "train"), (str(data), "val"), (str(dataset), "train")])


@pytest.mark.parametrize("at", ["here", "there"])
def test_neither_packs_nor_an_index_take_the_place_of_others(served, dataset, run_of, tmp_path, at):
    out = tmp_path if at == "here" else beside(served[1], "taken")
    measure(MeasureConfig(paths=(dataset,), out=out / "index", workers=0), run := run_of(dataset))
    remote_files.make_directory(out / "taken")
    make_plan([out / "index"], run, out / "plan.parquet")
    before = make_plan([out / "index"], run_of(dataset, seq_length=1024), out / "taken/plan.parquet")
    with pytest.raises(UserError, match=r"taken/plan.parquet is another plan than .*/plan.parquet; choose another"):
        pack(PackConfig(plan=out / "plan.parquet", out=out / "taken"))
    assert Plan.open(out / "taken/plan.parquet").facts.id == before.id
    data = dataset if at == "here" else Path(served[1])
    with pytest.raises(UserError, match=f"{remote_files.shown(data)} is there and is not an index"):
        measure(MeasureConfig(paths=(dataset,), out=data, workers=0), run)
    with pytest.raises(UserError, match=f"{remote_files.shown(data)} is there and is no packed directory"):
        pack(PackConfig(plan=out / "plan.parquet", out=data))


def test_a_description_is_of_one_object_though_it_grows_while_it_is_read(served, tmp_path, monkeypatch):
    there, read = Path(f"{os.path.dirname(served[1])}/grows.json"), multistorageclient.StorageClient.read
    write_json(there, {"format": 1, "text": "short"})

    def replaced(self, path, *more, **options):
        monkeypatch.setattr(multistorageclient.StorageClient, "read", read)
        write_json(there, {"format": 1, "text": "long" * 99})
        return read(self, path, *more, **options)

    monkeypatch.setattr(multistorageclient.StorageClient, "read", replaced)
    assert read_json(there, dict, version=1, what="a text", remedy="plan")["text"] == "long" * 99


def test_a_small_description_takes_little_memory(tmp_path):
    write_json(tmp_path / "small.json", {"format": 1})
    tracemalloc.start()
    read_json(tmp_path / "small.json", dict, version=1, what="a text", remedy="plan")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 20


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "x"), "made in {private} first, .*{system}.*make room or point TMPDIR elsewhere"),
        (OSError(errno.EIO, "it differs"), "packed.json cannot be written .it differs.; make room or choose another"),
        (OSError("it differs"), "packed.json cannot be written .it differs."),
    ],
)
def test_a_full_directory_for_temporary_files_is_no_full_store(served, error, said):
    path = Path(served[1]) / "packed.json"
    private, system = remote_files.private_directory(), os.strerror(errno.ENOSPC)
    assert said_of_error(OSError(errno.EIO, "Failed to HEAD it, status_code: 500")).endswith("500")
    with pytest.raises(UserError, match=said.format(private=private, system=system)), writing(path, "pack"):
        raise error


def test_a_plan_and_its_first_pack_are_opened_with_five_requests_at_most(served, dataset, run_of, tmp_path):
    store, address = served
    made(run_of(dataset), dataset, out := beside(address, "asked"))
    store.asked = 0
    plan = Plan.open(out / "plan.parquet")
    plan.packs(0, 1)
    assert store.asked <= 5


CHAT = '{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]}\n'


def test_an_upload_that_was_broken_off_is_named(served, dataset, run_of, tmp_path, monkeypatch):
    _, address = served
    made(run_of(dataset), dataset, out := beside(address, "broken"))
    client, _ = multistorageclient.resolve_storage_client(address)
    s3 = client._storage_provider._s3_client
    keys = ["broken/named-other/shard-00000.bin", *(f"broken/named/shard-0009{number}.bin" for number in (8, 9))]
    keys += ["broken/cut/shard-00000.bin", "broken/chats/text/train-000000.tar"]
    write_json(out / "cut/packed.json", json.loads(remote_files.read(f"{out}/named/packed.json")) | {"shards": []})
    begun = [(key, s3.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]) for key in keys]
    answer, refused = s3._make_api_call, False

    def one_a_page(operation, arguments):
        if operation != "ListMultipartUploads":
            return answer(operation, arguments)
        if refused:
            raise ClientError({"ResponseMetadata": {"HTTPStatusCode": 501}}, operation)
        at = int(arguments.pop("KeyMarker", None) or 0)
        arguments.pop("UploadIdMarker", None)
        found = (every := answer(operation, arguments)).get("Uploads", [])
        more = {"IsTruncated": at + 1 < len(found), "NextKeyMarker": str(at + 1), "NextUploadIdMarker": "it"}
        return {**every, **more, "Uploads": found[at : at + 1]}

    monkeypatch.setattr(s3, "_make_api_call", one_a_page)
    said = said_of(out / "named")
    assert all(f"an upload of {key} was begun and broken off" in said for key in keys[1:3])
    assert "other" not in said
    assert re.search("is not complete.*; an upload of broken/cut/shard-00000.bin was begun", said_of(out / "cut"))
    (tmp_path / "a.jsonl").write_text(CHAT)
    (note,) = convert(ConvertConfig(sources=(tmp_path / "a.jsonl",), out=out / "chats", workers=0)).notes
    assert note.startswith(f"an upload of {keys[-1]} was begun and broken off")
    assert not said_of(out / "copied")
    refused = True
    assert not said_of(out / "named")  # some stores do not tell
    refused = False
    for key, upload in begun:
        s3.abort_multipart_upload(Bucket=BUCKET, Key=key, UploadId=upload)
    assert not said_of(out / "named")


def test_what_is_stored_in_parts_is_compared_without_reading_it_back(served, tmp_path, monkeypatch):
    _, address = served
    original = remote_files.read_range
    monkeypatch.setattr(remote_files, "read_range", lambda *_: pytest.fail("it is read"))
    (file := tmp_path / "large").write_bytes(os.urandom(1 << 20) * 70)
    remote_files.store(file, target := f"{os.path.dirname(address)}/large")
    assert "-3" in remote_files.status(target).version
    with file.open("r+b") as opened:
        opened.seek(40 << 20)
        opened.write(b"another")
    monkeypatch.setattr(remote_files, "read_range", original)
    assert not remote_files.is_stored(file, target)
