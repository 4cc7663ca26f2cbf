"""Rejected and unwanted answers are trained by nobody who did not ask for them, whoever reads the data set."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.trained_pairs import CONSUMERS, COUNT, DATA_SETS, ONE_ROW_PER_SAMPLE, bad, conversion, good, texts

from energon_packing.cli.main import cli

SENTENCE = r"preference pair|unwanted"


def converted(name: str, folder: Path) -> Path:
    """A data set, with the labels of its answers where it has any."""
    label = ["--kto-label", "label"] if name.endswith("kto") else []
    options = ["--split", "train=1", "--workers", "0", "--out", str(folder / "data")]
    result = CliRunner().invoke(cli, ["convert", *conversion(name, folder / "source"), *label, *options])
    assert result.exit_code == 0, result.output
    return folder / "data"


def mixed(folder: Path) -> Path:
    """Pairs and one plain conversation, of which convert tells."""
    (source,) = conversion("TRL implicit prompt", folder / "source")
    plain = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "It is so."}]}
    with Path(source).open("a") as file:
        file.write(json.dumps(plain) + "\n")
    made = folder / "data"
    result = CliRunner().invoke(cli, ["convert", source, "--split", "train=1", "--workers", "0", "--out", str(made)])
    assert f"{COUNT} preference pairs among {COUNT + 1} samples, mixed with plain conversations" in result.output
    return made


def forgotten(data: Path) -> Path:
    """The same data set as somebody else would have made it: nobody counted its pairs."""
    report = data / "conversion.json"
    report.write_text(json.dumps({**json.loads(report.read_text()), "pairs": 0, "unwanted": 0}))
    return data


ONE_OF_EACH_KIND = ("Bridge, in_batch", "Megatron-LM", "plain Energon, single rows", "from packed rows")
ALL = [("LLaMA-Factory dpo", name) for name in CONSUMERS] + [("LLaMA-Factory kto", name) for name in ONE_OF_EACH_KIND]


@pytest.fixture(scope="module")
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(request.param, tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def pairs_and_a_conversation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed(tmp_path_factory.mktemp("mixed"))


@pytest.fixture
def consumer(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("Bridge"):
        request.getfixturevalue("stand_ins")
    return str(request.param)


def answers(data: Path) -> tuple[set[str], set[str]]:
    """The wanted and the unwanted answers of a data set, from its records."""
    labels = (data.parent / "source" / "kto.json").exists()
    wanted = {good(n) for n in range(COUNT) if not (labels and n % 2)}
    return wanted, {bad(n) for n in range(COUNT) if not labels or n % 2}


@pytest.mark.parametrize(("data", "consumer"), ALL, indirect=True)
def test_a_run_trains_of_pairs_and_labelled_answers_what_it_chose(consumer: str, data: Path, tmp_path: Path) -> None:
    wanted, unwanted = answers(data)
    assert texts(consumer, data, "chosen", tmp_path / "chosen") == wanted
    if len(unwanted) == COUNT and consumer in ONE_ROW_PER_SAMPLE:  # pairs, each of two rows
        with pytest.raises(Exception, match="makes two rows"):
            texts(consumer, data, "both", tmp_path / "both")
    else:
        assert texts(consumer, data, "both", tmp_path / "both") == wanted | unwanted
    with pytest.raises(Exception, match=SENTENCE) as refused:
        texts(consumer, data, None, tmp_path / "none")
    assert "set it to 'chosen'" in str(refused.value)
    # Who names a data set to us is told before anything is read.
    counts = "has 8 preference pairs" if len(unwanted) == COUNT else "has 4 unwanted answers"
    assert (counts in str(refused.value)) == (not consumer.startswith("plain"))


@pytest.mark.parametrize("consumer", ONE_OF_EACH_KIND, indirect=True)
def test_a_run_that_drops_pairs_trains_the_plain_conversations_beside_them(
    consumer: str, pairs_and_a_conversation: Path, tmp_path: Path
) -> None:
    assert texts(consumer, pairs_and_a_conversation, "drop", tmp_path / "drop") == {"It is so."}
    with pytest.raises(Exception, match=SENTENCE):
        texts(consumer, pairs_and_a_conversation, None, tmp_path / "none")


@pytest.mark.parametrize("consumer", ["Bridge, packs", "plain Energon", *ONE_OF_EACH_KIND[1:]], indirect=True)
def test_a_pair_that_nobody_counted_stops_the_run_where_it_is_met(
    consumer: str, pairs_and_a_conversation: Path, tmp_path: Path
) -> None:
    shutil.copytree(pairs_and_a_conversation, tmp_path / "data")
    made = forgotten(tmp_path / "data")  # the plain conversation would go on without the others
    with pytest.raises(Exception, match=r"Sample \S+ is a preference pair, and packing.pairs is 'refuse'"):
        texts(consumer, made, None, tmp_path / "none")


@pytest.mark.parametrize("name", list(DATA_SETS)[1:])
def test_every_layout_of_pairs_is_counted_and_refused_in_one_sentence_by_every_command(
    name: str, tmp_path: Path
) -> None:
    made = converted(name, tmp_path)
    report = json.loads((made / "conversion.json").read_text())
    kto = name.endswith("kto")
    assert (report["pairs"], report["unwanted"]) == ((0, COUNT // 2) if kto else (COUNT, 0))
    found = f"{COUNT // 2} unwanted answers" if kto else f"{COUNT} preference pairs"
    run = tmp_path / "run.yaml"
    from energon_packing.demo import processor_path

    run.write_text(
        f"data: {{path: {made}, workers: 0}}\nencoder: {{processor: {processor_path('text')}}}\n"
        "packing: {seq_length: 2048}\n"
    )
    index = tmp_path / "index"
    measure = ["measure", str(made), "--config", str(run), "--out", str(index)]
    commands = [measure, ["stats", str(made), "--config", str(run)], ["preview", str(made), "--config", str(run)]]
    for command in commands:
        result = CliRunner().invoke(cli, command)
        assert result.exit_code == 2, (command, result.output)
        assert f"Error: {made} has {found} among {COUNT} samples, and packing.pairs is" in result.output
    result = CliRunner().invoke(cli, ["validate", str(run), "--no-bridge", "--json"])
    (look,) = [look for look in json.loads(result.stdout)["reads"] if look["look"] == "samples"]
    assert (result.exit_code, found in look["why"]) == (1, True)
    if name != "ms-swift rejected_response":  # one is enough for what follows, where nothing asks for the layout
        return
    text = run.read_text().replace("2048", "2048, pairs: both")
    run.write_text(text)
    for command in [*commands, ["stats", str(index)], ["validate", str(run), "--no-bridge"]]:
        result = CliRunner(env={"COLUMNS": "400"}).invoke(cli, command)
        assert result.exit_code == 0, result.output
        assert found in " ".join(result.output.split()), (command, result.output)
    plan = ["plan", str(index), "--config", str(run), "--out", str(tmp_path / "plan.parquet")]
    for choice, sentence in (
        ("refuse", f"{index} has {found}"),
        ("chosen", "was measured with packing.pairs='both', the configuration has 'chosen'"),
    ):
        run.write_text(text.replace("both", choice))
        result = CliRunner().invoke(cli, plan)
        assert sentence in result.output
    result = CliRunner().invoke(cli, measure)
    assert "measured with another encoder: packing.pairs was both, now it is chosen" in result.output


def test_labelled_answers_of_llama_factory_come_in_only_where_the_user_says_so(tmp_path: Path) -> None:
    arguments = ["convert", *conversion("LLaMA-Factory kto", tmp_path), "--dry-run"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert "add --kto-label label to keep the labels" in result.output
    result = CliRunner().invoke(cli, [*arguments, "--kto-label", "other"])
    assert "add --kto-label label" in result.output
    assert CliRunner().invoke(cli, [*arguments, "--kto-label", "label"]).exit_code == 0
