"""The lock: digests of all that may not change while the package is rewritten.

    python tests/lock/lock.py write              # records this checkout's package into tests/lock/lock.json
    python tests/lock/lock.py compare            # compares this checkout's package with what was recorded
    python tests/lock/lock.py compare --tree DIR # the same for the package of another checkout

``compare`` ends with 1 and names each key that differs; what was digested is then in
``/tmp/energon-packing-lock/values.json``, so that two checkouts can be compared text by text. Inputs are made here
(`made`), or are ``../shared/data/llamafactory_demo``, whose keys are left out where it is absent. ``runs.json`` holds
2,000 runs that `tests/conformance/drawn_runs.py` drew. Takes three minutes of one core; the test makes the part that
is `IN_THE_TEST`.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
STORED = HERE / "lock.json"
SHARED = next((path for up in HERE.parents if (path := up / "shared/data/llamafactory_demo").is_dir()), Path("absent"))
WORK = Path("/tmp/energon-packing-lock")
"""The same everywhere, because plans hold the paths of their data sets; one process at a time works there."""
NAMED = ("qianfan_vl", "llava_onevision_1_5", "qwen3_5_vl", "huggingface")
"""Families that are chosen by name alone."""
VERSIONS = ("0.6.2", "0.7.0")
ROW_FIELDS = (
    *("tokens", "labels", "loss_mask", "position_ids", "padding_mask", "cu_seqlens", "cu_seqlens_padded"),
    *("max_seqlen", "visual_inputs", "sample_keys", "sample_lengths", "fillers", "extra"),
)
CLIP_FIELDS = (
    *("video_latents", "context_embeddings", "loss_mask", "seq_len_q", "seq_len_q_padded"),
    *("seq_len_kv", "seq_len_kv_padded", "grid_sizes", "keys"),
)
IN_THE_TEST = {"data": ("text", "qwen2_5_vl", "qwen3_vl"), "lf": ("qwen2_5_vl",)}
"""Families by data set of which the test makes the keys; the command makes those of all."""
MOMENT = 1_700_000_000
UNSTEADY = re.compile(r"second|time|rate|memory|version|cpu|elapsed|python|platform|^bytes$", re.IGNORECASE)
"""Names of values of ``--json`` that depend on the clock or the machine, or on the form of packed files."""


class Lock(dict[str, str]):
    """What is digested, as text, by key."""

    def __setitem__(self, key: str, value: Any) -> None:
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
        super().__setitem__(key, text)


def digest(value: Any) -> Any:
    """A text that says type, shape and bytes of tensors, and everything of other values."""
    if isinstance(value, Mapping):
        return {str(name): digest(value[name]) for name in sorted(value)}
    if hasattr(value, "numpy"):
        import torch

        data = value.detach().cpu().contiguous()
        return f"{data.dtype} {[*data.shape]} {hashlib.sha256(data.view(-1).view(torch.uint8).numpy()).hexdigest()}"
    return list(value) if isinstance(value, tuple) else value


def steady(value: Any, name: str = "") -> Any:
    """A value of ``--json`` without what the clock, the machine or the place of the work folder decides."""
    if UNSTEADY.search(name) and isinstance(value, int | float | str):
        return None
    if isinstance(value, dict):
        return {key: steady(value[key], key) for key in value}
    if isinstance(value, list):
        return [steady(one, name) for one in value]
    return value.replace(str(WORK), "WORK").replace(str(TESTS.parent), "TREE") if isinstance(value, str) else value


def files(folder: Path) -> dict[str, str]:
    """SHA-256 of each file below a folder, by its path there."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def stopped(folder: Path) -> None:
    """Gives all files of a folder one time, which indexes hold."""
    for path in folder.rglob("*"):
        os.utime(path, (MOMENT, MOMENT))


class Digests:
    """Makes everything in the work folder and digests it; run in a process with the package under test."""

    def __init__(self) -> None:
        import inside

        self.inside, self.lock = inside, Lock()

    def run(self, key: str, *words: str) -> Any:
        """Runs a command with ``--json``, records what it said and its exit code; returns what it said."""
        end = words.index("--") if "--" in words else len(words)
        code, printed = self.inside.command(*words[:end], "--json", *words[end:])
        try:
            said = json.loads(printed)
        except ValueError:
            said = printed
        self.lock[f"json/{key}"] = [code, steady(said)]
        return said

    def rows(self, key: str, config: Any, fields: tuple[str, ...] = ROW_FIELDS) -> None:
        """Records each row of one epoch and what was dropped on the way."""
        loader = self.inside.open_loader(config)
        dropped = []
        for number, pack in enumerate(loader):
            batch = pack.batch.finished() if hasattr(pack.batch, "finished") else pack.batch
            self.lock[f"rows/{key}/{number}"] = {name: digest(getattr(batch, name)) for name in fields}
            dropped += [[entry.key, entry.reason] for entry in pack.dropped]
        dropped += [[entry.key, entry.reason] for entry in loader.epoch_report.dropped_at_end]
        self.lock[f"drops/{key}"] = dropped

    def converted(self) -> None:
        """Conversion: bytes of data sets, ledgers of rejects, reports; both layouts, clips, and foreign records."""
        import made

        made.conversations(Path("made"))
        made.clips(Path("clips"))
        both = ("made/sharegpt.json", "made/openai.jsonl", "--workers", "0", "--split", "train=0.9,val=0.1")
        self.run("convert/polylithic", "convert", *both, "--out", "data", "--samples-per-shard", "12")
        self.run("convert/monolithic", "convert", *both, "--out", "one", "--layout", "monolithic")
        self.run("convert/dry", "convert", *both, "--dry-run")
        self.run("convert/two", "convert", *both[:2], "--workers", "2", "--out", "two", "--check-media", "header")
        video = ("--format", "text-to-video", "--workers", "0", "--split", "train=1")
        self.run("convert/clips", "convert", "clips/clips.jsonl", *video, "--out", "clips-data")
        made_here = ["data", "one", "two", "clips-data"]
        if SHARED.is_dir():
            shutil.copytree(SHARED / "mllm_demo_data", "llamafactory/mllm_demo_data")
            for name, count in (("glaive_toolcall_en_demo", 12), ("mllm_demo", 6), ("mllm_video_demo", 3)):
                records = json.loads((SHARED / f"{name}.json").read_text())[:count]
                Path(f"llamafactory/{name}.json").write_text(json.dumps(records))
            self.run("convert/lf", "convert", "llamafactory", "--split", "train=1", "--workers", "0", "--out", "lf")
            made_here.append("lf")
        for name in made_here:
            for path, sha in files(Path(name)).items():
                if "index.uuid" not in path:
                    self.lock[f"converted/{name}/{path}"] = sha
            stopped(Path(name))

    def processor(self, name: str) -> None:
        """Writes the processor of a family into its folder."""
        folder = f"processors/{name}"
        if name == "text":
            shutil.copytree(self.inside.processor_path(name), folder)
        else:
            self.inside.PROCESSORS[name]().save_pretrained(folder)

    def family(self, name: str, data: str) -> None:
        """Rows of one family online, from a plan, and from stored packs; the plan's bytes; the ledger."""
        run = f"{name}-{data}"
        config = Path(f"{run}.yaml")
        encoder = {"processor": f"processors/{name}", "family": name if name in NAMED else "auto"}
        packing = {"seq_length": 6144, "window": 8, "oversize": "drop", "drop_budget": 1.0, "padding": "between"}
        parallel = {"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True}
        reads = {"path": data, "workers": 0, "repeat": False, "shuffle_buffer": 3}
        sections = {"encoder": encoder, "packing": packing, "parallel": parallel, "data": reads}
        config.write_text(json.dumps(sections))
        load = self.inside.load_config
        self.rows(f"{run}/online", load(config, [f"packing.ledger=ledger/{run}"]))
        self.run(f"ledger/{run}", "ledger", f"ledger/{run}")
        at, plan, index = ("--config", str(config)), f"{run}.parquet", f"index/{run}"
        self.run(f"measure/{run}", "measure", data, *at, "--workers", "0", "--out", index)
        self.run(f"plan/{run}", "plan", index, *at, "--out", plan)
        self.lock[f"plan/{run}"] = hashlib.sha256(Path(plan).read_bytes()).hexdigest()
        self.lock[f"plan/{run}/drops"] = [file.read_text() for file in Path().glob(f"{run}*.drops.jsonl")]
        self.rows(f"{run}/plan", load(config, [f"data.path={plan}"]))
        for store in ("tokens", "pixels"):
            out = f"packed/{run}-{store}"
            self.run(f"pack/{run}/{store}", "pack", plan, "--workers", "0", "--store", store, "--out", out)
            self.rows(f"{run}/{store}", load(config, [f"data.path={out}"]))
        self.run(f"verify/{run}", "verify", f"packed/{run}-pixels", "--workers", "0", "--share", "0.3")

    def commands(self) -> None:
        """``--json`` of the commands that do not depend on the family."""
        import torch

        run = "qwen2_5_vl-data"
        at, plan = ("--config", f"{run}.yaml"), f"{run}.parquet"
        processor = ("--processor", "processors/qwen2_5_vl")
        self.run("init", "init", "data", *processor, "--out", "run.yaml", "--seq-length", "4096")
        self.lock["init/run.yaml"] = Path("run.yaml").read_text()
        self.run("validate/yaml", "validate", "run.yaml", "--world-size", "8", "--measure", "20")
        self.run("validate/bad", "validate", f"{run}.yaml", "--no-bridge", "--set", "training.micro_batch_size=3")
        megatron = "--tensor-model-parallel-size 2 --seq-length 4096 --global-batch-size 8 --micro-batch-size 2"
        self.run("validate/megatron", "validate", "--no-bridge", "--world-size", "8", "--", *megatron.split())
        self.run("stats/index", "stats", f"index/{run}", *at, "--window", "4", "--seq-length", "2048")
        readers = ("--data-parallel", "2", "--samples", "12")
        self.run("stats/data", "stats", "data", *at, *readers, "--multiple", "8", "--seq-length", "4096")
        self.run("stats/plan", "stats", plan, *at)
        self.run("preview/data", "preview", "data", *at, "--packs", "2")
        self.run("preview/packed", "preview", f"packed/{run}-tokens", *at, "--packs", "1")
        self.run("preview/clips", "preview", "clips-data", "--format", "text-to-video", "--config", "wan.yaml")
        for key in ("s-1", "o-2", "s-long", "o-broken"):
            self.run(f"explain/{key}", "explain", key, "data", *at, "--ledger", f"ledger/{run}")
        self.run("explain/plan", "explain", "s-1", plan)
        self.run("plan/diff", "plan", "--diff", plan, "qwen3_vl-data.parquet")
        self.run("verify/all", "verify", f"packed/{run}-tokens", "--workers", "0", "--share", "1")
        loader = self.inside.open_loader(self.inside.load_config(f"{run}.yaml"))
        for number, _ in enumerate(loader):
            if number == 1:
                break
        torch.save({"dataloader_state_dict": {"packs": 2, "source": loader.save_state()}}, "state.pt")
        self.run("state", "state", "convert", "state.pt", "--index", f"index/{run}", *at, "--out", "rest.parquet")
        self.lock["state/rest"] = hashlib.sha256(Path("rest.parquet").read_bytes()).hexdigest()

    def clips(self) -> None:
        """Clips for Wan: rows online and from stored packs, the plan's bytes."""
        encoder = {"text_width": 32}
        packing = {"seq_length": 64, "window": 4, "drop_budget": 1.0}
        config = {"encoder": encoder, "packing": packing, "data": {"path": "clips-data", "workers": 0}}
        Path("wan.yaml").write_text(json.dumps(config))
        load = self.inside.load_text_to_video_config
        once = ["data.repeat=false", "data.shuffle_buffer=1"]
        self.rows("wan/online", load("wan.yaml", once), CLIP_FIELDS)
        at = ("--config", "wan.yaml")
        self.run("measure/wan", "measure", "clips-data", *at, "--workers", "0", "--out", "index/wan")
        self.run("plan/wan", "plan", "index/wan", *at, "--out", "wan.parquet")
        self.lock["plan/wan"] = hashlib.sha256(Path("wan.parquet").read_bytes()).hexdigest()
        self.run("pack/wan", "pack", "wan.parquet", "--workers", "0", "--store", "pixels", "--out", "packed/wan")
        self.rows("wan/pixels", load("wan.yaml", [*once, "data.path=packed/wan"]), CLIP_FIELDS)

    def verdicts(self, whole: bool) -> None:
        """Rules that speak about each of the stored runs, by version of Bridge: a hundred runs to a key."""
        runs = json.loads((HERE / "runs.json").read_text())
        names, values = runs["names"], runs["values"]
        views = [{names[i]: values[v] for i, v in zip(run[::2], run[1::2], strict=True)} for run in runs["runs"]]
        views = [{n: tuple(v) if isinstance(v, list) else v for n, v in view.items()} for view in views]
        for version in VERSIONS:
            for start in range(0, len(views), 100 if whole else 400):
                judged = [self.inside.outcomes(view, version) for view in views[start : start + 100]]
                self.lock[f"verdicts/{version}/{start}"] = judged

    def all(self, whole: bool) -> dict[str, str]:
        """Everything, by key, or what the test makes."""
        self.verdicts(whole)
        self.converted()
        for name in ("text", *self.inside.PROCESSORS):
            self.processor(name)
            for data, families in IN_THE_TEST.items():
                if (whole or name in families) and (data == "data" or SHARED.is_dir()):
                    self.family(name, data)
        self.clips()
        self.commands()
        return self.lock


def main(words: list[str]) -> int:
    """See the module; ``make`` is what the others start with the package under test first on the path."""
    task = words[0] if words else "compare"
    if task == "make":
        values = Digests().all(whole=words[-1] == "all")
        (WORK / "values.json").write_text(json.dumps(values, ensure_ascii=False, indent=1))
        return 0
    tree = Path(words[words.index("--tree") + 1]).resolve() if "--tree" in words else TESTS.parent
    found = made_by(tree)
    if task == "write":
        STORED.write_text(json.dumps(found, indent=0) + "\n")
        return 0
    wrong = differences(json.loads(STORED.read_text()), found)
    print("\n".join([f"differs: {key}" for key in wrong] + [f"{len(found)} keys, {len(wrong)} differ"]))
    return bool(wrong)


def made_by(tree: Path, part: str = "all", python: str = sys.executable) -> dict[str, str]:
    """Digests of everything, by key, as the package of a checkout makes it in a process of its own.

    Args:
        tree: the checkout.
        part: ``all``, or ``tested`` for what is `IN_THE_TEST`, and a quarter of the verdicts.
        python: the interpreter.

    Raises:
        RuntimeError: the process failed; its last lines are in the message.
    """
    path = os.pathsep.join(str(folder) for folder in (tree, HERE, TESTS, TESTS / "support", TESTS.parent / "scripts"))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120", "TZ": "UTC"}
    WORK.parent.mkdir(parents=True, exist_ok=True)
    with WORK.with_suffix(".lock").open("w") as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)
        shutil.rmtree(WORK, ignore_errors=True)
        WORK.mkdir()
        words = [python, "-W", "ignore", str(HERE / "lock.py"), "make", part]
        done = subprocess.run(words, cwd=WORK, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the digests of {tree} ended with {done.returncode}: {done.stderr[-3000:]}")
        values = json.loads((WORK / "values.json").read_text())
    return {key: hashlib.sha256(value.encode()).hexdigest()[:20] for key, value in values.items()}


def differences(stored: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Keys that differ, are new, or are gone; those of LLaMA-Factory's demo may be gone where it is not there."""
    keys = {key for key in stored if SHARED.is_dir() or not re.search(r"[-/]lf\b", key)}
    return sorted(key for key in keys | set(found) if stored.get(key) != found.get(key))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
