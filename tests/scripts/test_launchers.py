"""The launchers in scripts/launch: the commands that they print, what they refuse, and a real run of two processes."""

import importlib.util
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from forking_python import quick_python

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "scripts" / "launch"
RECIPE = "bridge_configs.qwen3:qwen3_8b_sft"
LAUNCHERS = ("torchrun", "slurm", "kubernetes", "ray")


def launch(name, *words, timeout=60, **environment):
    """The finished launcher; the variables of a cluster are those that are given."""
    python = quick_python()  # of the launcher, and of torchrun for its processes
    kept = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHON": python, "PYTHON_EXEC": python}
    command = ["bash", str(LAUNCH / f"{name}.sh"), *map(str, words)]
    return subprocess.run(
        command, env=kept | environment, capture_output=True, text=True, timeout=timeout, check=False, cwd="/"
    )


def commands(name, *words, **environment):
    """What a dry run prints, each line as the words that a shell reads."""
    done = launch(name, "--dry-run", *words, **environment)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines() if not line.startswith("#")]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    files = [str(path.relative_to(ROOT)) for path in sorted(LAUNCH.glob("*.sh"))]
    done = subprocess.run(["shellcheck", "-x", *files], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_data_are_converted_and_the_run_is_validated_before_it_trains():
    words = (
        "--gpus",
        4,
        "--source",
        "a b.jsonl",
        "--media-root",
        "m",
        "--data",
        "d",
        RECIPE,
        "--",
        "train.train_iters=3",
    )
    convert, validate, train = commands("torchrun", *words)
    assert convert[1:] == shlex.split("-m energon_packing.cli.main convert 'a b.jsonl' --media-root m --out d --resume")
    assert validate[3:7] == ["validate", RECIPE, "--world-size", "4"]
    assert validate[7:11] == ["--set", "train.train_iters=3", "--set", "dataset.path=d"]
    script = train.index(str(ROOT / "scripts" / "train.py"))
    assert train[1:script] == shlex.split("-m torch.distributed.run --standalone --nnodes 1 --nproc-per-node 4")
    assert train[script + 1 :] == ["--data", "d", RECIPE, "train.train_iters=3"]


def test_a_second_machine_waits_and_prepares_nothing():
    place = ("--nodes", 2, "--node-rank", 1, "--master", "first:1234")
    (train,) = commands("torchrun", *place, RECIPE)
    assert "--standalone" not in train
    assert train[3:13] == shlex.split(
        "--nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr first --master-port 1234"
    )
    assert len(commands("torchrun", "--nodes", 2, RECIPE)) == 2


def test_slurm_submits_a_job_that_runs_the_same_words_on_its_nodes():
    words = ("--nodes", 3, "--gpus", 4, "--sbatch", "--partition=p q", "--data", "d", RECIPE, "--", "a.b=[1, 2]")
    submit, validate, train = commands("slurm", *words, SLURM_JOB_ID="77", SLURMD_NODENAME="n0")
    assert submit[:9] == shlex.split(
        "sbatch --job-name energon-packing --nodes 3 --ntasks-per-node 1 --gpus-per-node 4"
    )
    assert "--partition=p q" in submit
    inside = shlex.split(submit[submit.index("--wrap") + 1])
    assert inside == ["bash", str(LAUNCH / "slurm.sh"), "--inside-job", *map(str, words)]
    assert validate[validate.index("--world-size") + 1] == "12"
    assert (train[0], validate[0]) == ("srun", quick_python())  # in the batch script, which has the machine to itself
    assert {"--cpu-bind=none", "--kill-on-bad-exit=1"} <= set(train)
    assert "--rdzv-id 77 --rdzv-backend c10d --rdzv-endpoint n0:29500" in " ".join(train)
    assert train[-1] == "a.b=[1, 2]"


def test_words_for_srun_reach_training_and_the_data_stage_which_needs_the_same_container(tmp_path):
    """Not a dry run: an ``sbatch`` that runs the job as a shell reads it, and an ``srun`` that notes its words."""
    noted = tmp_path / "noted"
    for name, line in (
        ("sbatch", 'echo "$*" >> NOTED; bash -c "${!#}"'),
        ("srun", 'printf "%s|" "$@" >> NOTED; echo >> NOTED'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{line.replace('NOTED', str(noted))}\n")
        (tmp_path / name).chmod(0o755)
    inside = ["--container-image=a b:1", "--container-mounts=/l:/l"]
    words = ["--nodes", 2, "--cpus-per-task", 96, *(each for word in inside for each in ("--srun", word))]
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = launch("slurm", *words, "--data", "d", "--source", "x", RECIPE, PATH=path, PYTHON="python3")
    assert done.returncode == 0, done.stderr
    submitted, *steps = noted.read_text().splitlines()
    assert "--cpus-per-task 96 --exclusive" in submitted
    convert, validate, train = (step.split("|")[:-1] for step in steps)
    for words, nodes, ends in (
        (convert, "1", "convert"),
        (validate, "1", "validate"),
        (train, "2", "torch.distributed.run"),
    ):
        own = words[: words.index("python3")]
        assert set(inside) <= set(own)
        assert own[own.index("--cpus-per-task") + 1] == "96"
        assert (own[own.index("--nodes") + 1], own[own.index("--ntasks") + 1]) == (nodes, nodes)
        assert ends in words


def test_a_pod_reads_its_place_from_the_operators_environment():
    place = {"WORLD_SIZE": "4", "RANK": "2", "MASTER_ADDR": "pod0", "MASTER_PORT": "23456"}
    (train,) = commands("kubernetes", "--gpus", 2, RECIPE, **place)
    assert train[3:13] == shlex.split(
        "--nnodes 4 --node-rank 2 --nproc-per-node 2 --master-addr pod0 --master-port 23456"
    )
    validate, train = commands("kubernetes", "--nodes", 2, RECIPE, JOB_COMPLETION_INDEX="0", MASTER_ADDR="pod0")
    assert validate[validate.index("--world-size") + 1] == "16"
    (train,) = commands("kubernetes", "--nodes", 2, RECIPE, JOB_COMPLETION_INDEX="1", MASTER_ADDR="pod0")
    assert train[5:7] == ["--node-rank", "1"]


def test_ray_runs_one_torchrun_a_node_with_places_to_fill():
    submit, _validate, nodes = commands("ray", "--nodes", 2, "--gpus", 4, "--address", "http://head:1", RECIPE)
    assert submit[3:7] == ["job", "submit", "--address", "http://head:1"]
    assert nodes[1:4] == [str(LAUNCH / "ray_nodes.py"), "2", "GPU=4"]
    spec = importlib.util.spec_from_file_location("ray_nodes", LAUNCH / "ray_nodes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    filled = module.command_of(nodes[4:], 1, "10.0.0.1", 999)
    assert filled[3:13] == shlex.split(
        "--nnodes 2 --nproc-per-node 4 --node-rank 1 --master-addr 10.0.0.1 --master-port 999"
    )


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_script_of_megatron_lm_gets_its_arguments_and_the_data(name, tmp_path):
    script = tmp_path / "pretrain_gpt.py"
    script.touch()
    words = ("--megatron-lm", script, "--data", "d", "--", "--seq-length", "4096")
    *_, validate, train = commands(name, *words)
    rest = ["--seq-length", "4096", "--packing-set", "data.path=d"]
    assert validate[-5:] == ["--", *rest]
    assert train[-5:] == [str(script), *rest]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "name a run"),
        (("--gpus", "0", RECIPE), "--gpus is '0'"),
        (("--srun", "--mpi=none", RECIPE), "there is no option --srun"),
        (("--gpus",), "--gpus needs a value"),
        (("--gpu", "1", RECIPE), "there is no option --gpu"),
        ((RECIPE, "train.train_iters=3"), "overrides go after --"),
        (("--node-rank", "1", RECIPE), "--node-rank 1 does not exist"),
        (("--source", "a.jsonl", RECIPE), "--source needs --data"),
        (("--source", "a.jsonl", "--data", "d", "--skip-data", RECIPE), "contradict"),
        (("--megatron-lm", "nowhere.py"), "there is no training script nowhere.py"),
    ],
)
def test_a_mistake_ends_with_one_sentence_before_anything_runs(words, sentence):
    done = launch("torchrun", "--dry-run", *words)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not [line for line in done.stdout.splitlines() if "torch.distributed" in line]


def test_training_does_not_start_where_validation_fails(tmp_path):
    """A python that notes what it is asked to run, and says no to `validate`."""
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/bash\necho "$*" >> {tmp_path}/ran\n[[ "$*" != *" validate "* ]]\n')
    fake.chmod(0o755)
    done = launch("torchrun", RECIPE, PYTHON=str(fake))
    assert done.returncode == 1
    assert len((tmp_path / "ran").read_text().splitlines()) == 1


needs_bridge = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.bridge") is None,
    reason="Megatron-Bridge is not installed",
)


@needs_bridge
@pytest.mark.full
@pytest.mark.slow
def test_two_processes_train_the_tiny_recipe_from_conversations_on(tmp_path):
    from energon_packing.demo import make_data

    source = make_data(tmp_path / "raw", conversations=16, seed=3, defects=False)
    words = ("--gpus", 2, "--cpu", "--source", source, "--data", tmp_path / "data", "scripts.launch.tiny:text")
    done = launch("torchrun", *words, "--", "train.train_iters=2", timeout=280, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "valid" in done.stdout
    assert "trained 2 steps on 2 ranks" in done.stdout


@needs_bridge
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("scripts.launch.tiny:text", "train.micro_batch_size=2"), 1, "micro"),
        (("scripts.launch.tiny:nothing",), 2, "has no function nothing"),
        (("checkpoints/run_config.yaml",), 2, "There is no file checkpoints/run_config.yaml"),
        (
            ("scripts.launch.tiny:text", "checkpoint.pretrained_checkpoint=no/weights"),
            2,
            "no/weights, which does not exist",
        ),
        (("scripts.launch.tiny:text", "--mode", "finetune"), 2, "leave --step and --mode out"),
        (("scripts.launch.tiny:text", "--step", "a:b"), 2, "leave --step and --mode out"),
        (("scripts.launch.tiny:text", "--chek"), 2, "--check"),
        (("bridge_configs.wan:wan_1_3b_text2video",), 1, "1 GPUs are not divisible by TP x PP x CP = 4"),
    ],
)
def test_the_training_program_stops_with_a_sentence(words, code, sentence):
    command = [quick_python(), str(ROOT / "scripts" / "train.py"), "--cpu", "--data", "d", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)
    assert done.returncode == code, done.stderr[-2000:]
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@needs_bridge
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_on_the_cpu_goes_on_counting_from_the_one_checkpoint_that_was_kept(tmp_path):
    """With the clean-up of Bridge's own checkpoints (``most_recent_k``), which must leave the model's."""
    from energon_packing.convert import ConvertConfig, convert
    from energon_packing.demo import make_data

    source = make_data(tmp_path / "raw", conversations=16, seed=3, defects=False)
    convert(ConvertConfig(sources=(source,), out=tmp_path / "data", workers=0))
    kept = tmp_path / "kept"
    settings = {"save": kept, "save_interval": 2, "most_recent_k": 1, "async_save": "false"}
    words = [*(f"checkpoint.{name}={value}" for name, value in settings.items()), "train.train_iters=4"]

    def train(*more):
        program = [quick_python(), str(ROOT / "scripts" / "train.py"), "--cpu", "scripts.launch.tiny:text"]
        command = [*program, "--data", str(tmp_path / "data"), *words, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)
        steps = [int(line.split()[1][:-1]) for line in done.stdout.splitlines() if line.startswith("step ")]
        return done, steps

    def left():
        return [path.name for path in sorted(kept.glob("iter_*")) + sorted((kept / "energon").iterdir())]

    done, steps = train("train.exit_interval=2")
    assert (done.returncode, steps, left()) == (0, [1, 2], ["iter_0000002", "step_0000002"]), done.stderr[-2000:]
    (kept / "energon" / "step_0000002").rename(kept / "energon" / "iter_0000002")  # as older versions named it
    done, steps = train(f"checkpoint.load={kept}", "checkpoint.most_recent_k=-1")
    assert (done.returncode, steps) == (0, [3, 4]), done.stderr[-2000:]
    assert "trained 2 steps on 1 rank" in done.stdout
    assert left() == ["iter_0000002", "iter_0000004", "iter_0000002", "step_0000004"]


def program():
    spec = importlib.util.spec_from_file_location("train_program", ROOT / "scripts" / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_of_all_ranks_the_first_one_with_an_error_prints_it_with_its_number(monkeypatch, capsys):
    import torch

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**place, "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    for rank in (2, 0, 1):
        monkeypatch.setenv("RANK", str(rank))
        program()._tell(["the disk is full", "a rule"] if rank else ["another"])
    assert capsys.readouterr().err == "Error (rank 2): the disk is full\nError (rank 2): a rule\n"
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")  # nobody to ask: each rank prints
    program()._tell(["the disk is full"])
    assert capsys.readouterr().err == "Error (rank 1): the disk is full\n"


@needs_bridge
@pytest.mark.parametrize("code", [None, 0, 3])
def test_a_run_that_bridge_ends_without_an_error_is_one(monkeypatch, code):
    """Bridge calls ``sys.exit()`` where it cannot go on; of endings on purpose the code is a number."""
    from support.bridge_cpu import training_run

    from energon_packing.errors import UserError

    def ended(*_arguments):
        print("Unable to load rng state\n")
        raise SystemExit(code)

    monkeypatch.setattr(training_run, "_run", ended)
    with pytest.raises(
        UserError if code is None else SystemExit, match="load rng state" if code is None else str(code)
    ):
        training_run.run(None, forward_step="gpt")
