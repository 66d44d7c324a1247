"""Frameworks as people use them, in programs that know nothing of DADT.

`make .venv-programs/installed` installs them. docs/compatibility.md has what is found here.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import subprocess
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from harness.patience import PATIENCE
from programs.hub import hub

PROGRAMS = Path(__file__).parent
BIN = PROGRAMS.parents[1] / ".venv-programs" / "bin"
OF_HYDRA = BIN.with_name("of-hydra")
"""Its sweeper for Optuna, with the older Optuna that it needs."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(660),
    pytest.mark.skipif(not BIN.is_dir(), reason="needs `make .venv-programs/installed`"),
]
Told = dict[str, Any]
HYDRA = ("-m", "hydra.job.chdir=True", "+rate=0.05,0.1")


@dataclass(frozen=True)
class Program:
    name: str
    arguments: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    trainings: int = 1
    equals_alone: bool = True
    """With `sync` and half the batch on each of two ranks it ends as one process does, but for rounding."""

    def __str__(self) -> str:
        return "-".join((self.name, *(a for a in (*self.arguments, *self.flags) if a.isalnum())))


LIGHTNING = ("automatic", "manual", "several", "accumulating", "unevenly", "clipping")
PROGRAMS_TRIED = [
    Program("accelerate_loop"),
    Program("accelerate_loop", ("bf16",), equals_alone=False),  # rounded to 8 bits
    Program("transformers_trainer"),
    Program("transformers_tokens"),
    Program("transformers_tokens", ("accumulating",)),
    Program("transformers_tokens", ("accumulating",), flags=("--batch", "speed")),
    Program("transformers_lengths", flags=("--batch", "global")),  # its batches of like lengths are of the batch size
    Program("transformers_lengths", equals_alone=False),
    Program("accelerate_sync"),
    *(Program("accelerate_loaders", (how,)) for how in ("dispatch", "split", "uneven")),
    Program("accelerate_tokens"),
    *(Program("peft_lora", (how,)) for how in ("lora", "ia3", "prompt")),
    *(Program("qlora_shape", (bits,)) for bits in ("four", "eight")),
    *(Program("qlora_bitsandbytes", (bits,)) for bits in ("four", "eight")),
    Program("trl_sft"),
    Program("trl_sft", ("packed",)),
    Program("trl_sft", ("bfd",)),
    Program("trl_completions"),
    Program("trl_dpo"),
    Program("trl_grpo", equals_alone=False),  # each rank draws its own completions
    Program("trl_grpo", ("reusing",), equals_alone=False),
    Program("sentence_transformers_fit", flags=("--batch", "global")),  # its schedule comes from the data set's size
    Program("sentence_transformers_losses", ("similarity",)),
    Program("sentence_transformers_losses", ("ranking",), equals_alone=False),  # a pair meets those of its batch
    Program("sentence_transformers_losses", ("cached",), equals_alone=False),
    *(Program("lightning_trainer", (how,)) for how in LIGHTNING),
    Program("lightning_trainer", ("bf16",), equals_alone=False),  # rounded to 8 bits
    Program("lightning_fabric"),
    Program("skorch_classifier"),
    Program("ignite_engine"),
    Program("stable_baselines3_ppo", equals_alone=False),  # each rank plays its own games
    Program("diffusers_unet", equals_alone=False),  # each rank draws its own noise
    Program("geometric_graphs"),
    Program("datasets_stream"),
    Program("datasets_stream", ("bynode",), equals_alone=False),  # ranks read other files at once
    Program("webdataset_shards"),
    Program("webdataset_shards", ("bynode",)),
    Program("webdataset_shards", ("loader",)),
    Program("hydra_multirun", HYDRA, trainings=2),
    Program("shape_nanogpt", equals_alone=False),  # each rank draws its own batches
    Program("shape_gan", equals_alone=False),  # and its own noise
    Program("shape_cleanrl", equals_alone=False),  # and plays its own games
    Program("shape_yolo_loader", equals_alone=False),  # a pass is as long as alone, so all ranks take more samples
]


IN_ISLANDS = {
    Program("island_lightning"): "checkpoints/last.ckpt",
    Program("island_accelerate"): "checkpoints/7/pytorch_model_fsdp_0",
    Program("island_trainer"): "out/checkpoint-96/pytorch_model_fsdp_0",
}
"""Programs, and what they leave for a single process to load."""


def run(program: Program, folder: Path, *command: str, batch: int) -> tuple[list[Told], str]:
    """What each training of each rank has told, and what DADT has said."""
    folder.mkdir()
    words = [*command, str(PROGRAMS / f"{program.name}.py"), *program.arguments]
    data = folder.parent / "data"
    if not data.is_dir():
        write_points(data)
    env = {**os.environ, "BATCH": str(batch), "DATA": str(data), "PYTHONPATH": str(PROGRAMS), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=5 * PATIENCE, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition("{")[2] for line in done.stdout.splitlines() if '"weights": ' in line]
    return [json.loads("{" + line) for line in lines], done.stderr


@pytest.mark.parametrize("program", PROGRAMS_TRIED, ids=str)
def test_program(program: Program, tmp_path: Path) -> None:
    python, dadt = str(BIN / "python"), [str(BIN / "dadt"), "run", "-np", "2"]
    alone, _ = run(program, tmp_path / "alone", python, batch=16)
    batch = 16 if "global" in program.flags else 8
    sync, _ = run(program, tmp_path / "sync", *dadt, *program.flags, "--algorithm", "sync", batch=batch)
    pipe, said = run(program, tmp_path / "pipe", *dadt, *program.flags, batch=batch)
    assert len(alone) == program.trainings
    assert_alike(program, alone, sync, pipe, said)


@pytest.mark.parametrize("program", IN_ISLANDS, ids=str)
def test_program_in_islands(program: Program, tmp_path: Path) -> None:
    """Two islands of two ranks, which train as two ranks do without DADT, on twice the batch."""
    dadt = str(BIN / "dadt"), "run", "-np"
    alone, _ = run(program, tmp_path / "alone", *dadt, "2", "--inject", "none", batch=16)
    sync, _ = run(program, tmp_path / "sync", *dadt, "4", "--island", "2", "--algorithm", "sync", batch=8)
    pipe, said = run(program, tmp_path / "pipe", *dadt, "4", "--island", "2", batch=8)
    assert_alike(program, alone, sync, pipe, said)
    left = replace(program, arguments=("load", str(tmp_path / "pipe" / IN_ISLANDS[program])))
    loaded, _ = run(left, tmp_path / "loaded", str(BIN / "python"), batch=8)
    assert [one["weights"] for one in loaded] == [pipe[0]["weights"]]


def assert_alike(program: Program, alone: list[Told], sync: list[Told], pipe: list[Told], said: str) -> None:
    assert " of them delayed by one" in said
    for found in (sync, pipe):
        assert len(found) == 2 * len(alone)
        assert len({one["weights"] for one in found}) == program.trainings  # equal on all ranks
        assert read_by(found) == read_by(alone)
    if program.equals_alone:
        assert min(distance(sync[0], other) for other in alone) < 1e-3
    before, synchronous, late = alone[-1]["before"], sync[-1]["after"], pipe[-1]["after"]
    assert late <= synchronous + 0.3 * (before - synchronous) + 1e-6
    losses = f"{alone[-1]['after']:.4f} alone, {synchronous:.4f} sync, {late:.4f} pipe"
    print(f"{program}: {losses}; {said.splitlines()[-1]}")


def test_fastai_is_averaged_and_shared_out(tmp_path: Path) -> None:
    """Neither its optimizers nor its loaders are torch's."""
    alone, _ = run(Program("fastai_learner"), tmp_path / "alone", str(BIN / "python"), batch=16)
    found, said = run(Program("fastai_learner"), tmp_path / "run", str(BIN / "dadt"), "run", "-np", "2", batch=8)
    assert len({one["weights"] for one in found}) == 1 and len(found) == 2
    assert "Optimizer is none of torch's optimizers: averaged at its step" in said and " of them delayed by one" in said
    assert "(fastai, 256 samples, shuffled): trains, 128 per worker" in said and "equal inputs" not in said
    assert read_by(found) == sorted([0, *read_by(alone)])  # each process looks at the first once, to see what it is
    assert found[0]["after"] <= alone[0]["after"] + 0.3 * (alone[0]["before"] - alone[0]["after"])


@pytest.mark.parametrize("library", ["optuna", "hyperopt", "skopt", "hydra"])
def test_searches_without_a_seed_try_the_same_on_all_ranks(library: str, tmp_path: Path) -> None:
    jobs = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        words = [str(BIN / "dadt"), "run", "-np", "2", "--algorithm", "sync", str(PROGRAMS / "sweep.py"), library]
        paths = [str(PROGRAMS), *([str(OF_HYDRA)] if library == "hydra" else [])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=5 * PATIENCE, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        found = [json.loads(line[line.index("[[") :]) for line in done.stdout.splitlines() if "[[" in line]
        assert len(found) == 2 and found[0] == found[1] and len(found[0]) == (36 if library == "optuna" else 24)
        jobs.append(found[0])
    assert jobs[0] != jobs[1]
    if library == "optuna":
        assert any("pruned" in str(each[-1]) for job in jobs for each in job)


def test_readers_of_tensorboard_and_hdf5_find_what_the_rank_itself_has_written(tmp_path: Path) -> None:
    words = [str(BIN / "dadt"), "run", "-np", "2", str(PROGRAMS / "reads_back.py")]
    env = {**os.environ, "PYTHONPATH": str(PROGRAMS)}
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=5 * PATIENCE, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith(("[0] [", "[1] ["))]
    assert found == 2 * [[True, 2, True, ["epoch 0", "epoch 1", "epoch 2"]]]
    assert len(list((tmp_path / "board").iterdir())) == 2  # the first rank's
    assert {path.name for path in (tmp_path / "weights").iterdir()} == {"0.h5", "1.h5", "all.h5", "last.h5"}


@pytest.mark.parametrize(
    ("script", "said"), [("test_script", "Training yielded the same results on one CPU"), ("test_sync", "**Test")]
)
def test_accelerate_s_own_test_scripts(script: str, said: str, tmp_path: Path) -> None:
    """As they are installed; they compare training by Accelerate with a loop of their own, in mixed precision, too."""
    run = [str(BIN / "dadt"), "run", "-np", "2", "--algorithm", "sync", "-m", f"accelerate.test_utils.scripts.{script}"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=5 * PATIENCE)
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr
    assert "warning: DataLoader" not in done.stderr and "none delayed" in done.stderr


def test_one_rank_pushes_and_logs(tmp_path: Path) -> None:
    """As one process does: the same commits, one run of Weights & Biases and one of TensorBoard. Evaluation and
    generation in mid-training are the same on all ranks."""
    found = {}
    for name, command in (("alone", (str(BIN / "python"),)), ("two", (str(BIN / "dadt"), "run", "-np", "2"))):
        folder = tmp_path / name
        folder.mkdir()
        with hub() as server:
            away = {"HF_ENDPOINT": server.address, "HF_TOKEN": "hf_of_nobody", "HF_HOME": str(folder / "home")}
            batch = {"BATCH": "16" if name == "alone" else "8", "WANDB_MODE": "offline", "PYTHONPATH": str(PROGRAMS)}
            words = [*command, str(PROGRAMS / "uploads.py")]
            env = {**os.environ, **away, **batch}
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=5 * PATIENCE, env=env)
            assert done.returncode == 0, done.stdout + done.stderr
            changes = [[word for word in each if not word.startswith("runs/")] for each in server.changes]
        lines = [json.loads("{" + line.partition("{")[2]) for line in done.stdout.splitlines() if '"weights": ' in line]
        runs = [len(list(folder.glob(each))) for each in ("wandb/offline-run-*", "**/events.out.tfevents.*")]
        found[name] = changes, runs, lines
    assert found["two"][0] == found["alone"][0] and len(found["alone"][0]) > 8
    assert found["two"][1] == found["alone"][1] and found["two"][1][0] == 1
    one, other = found["two"][2]
    assert all(one[key] == other[key] for key in ("weights", "losses", "texts", "best"))
    assert len(one["texts"]) == 8 and one["losses"][-1] < one["losses"][0]


@pytest.mark.parametrize("flags", [(), ("--compression", "int8")], ids=["pipe", "int8"])
def test_the_script_of_the_page_about_lora(flags: tuple[str, ...], tmp_path: Path) -> None:
    """As it stands there, but on CPUs and with more checkpoints: with a small base and conversations at the paths that
    it names. Going on from a checkpoint, it ends with the same bits."""
    page = (PROGRAMS.parents[1] / "docs" / "lora.md").read_text()
    script = page.partition("```python\n")[2].partition("```")[0]
    names = [re.search(pattern, script)[1] for pattern in (r'SFTTrainer\("(.+?)"', r'load_dataset\("(.+?)"')]
    path = tmp_path / "train_lora.py"
    script = script.replace('"out",', '"out",\n    use_cpu=True,').replace("save_steps=200", "save_steps=10")
    env = {**os.environ, "PYTHONPATH": str(PROGRAMS), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    make = [str(BIN / "python"), str(PROGRAMS / "tiny_llama.py"), *names]
    subprocess.run(make, cwd=tmp_path, check=True, capture_output=True, timeout=PATIENCE, env=env)
    ends = []
    for resumed in [""] if flags else ["", 'resume_from_checkpoint="out/checkpoint-10"']:
        path.write_text(script.replace(").train()", f").train({resumed})"))
        words = [str(BIN / "dadt"), "run", "-np", "2", "--warmup-steps", "5", *flags, path.name]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=5 * PATIENCE, env=env)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert re.search(r"[0-9.]+ MB that are not trained are equal on all ranks, so they are not sent", said), said
        assert " of them delayed by one" in said
        ends.append((tmp_path / "out" / "checkpoint-24" / "adapter_model.safetensors").read_bytes())
        assert not list((tmp_path / "out").glob("*/model*.safetensors"))  # of the base
    assert len(set(ends)) == 1 and len(ends[0]) > 1e4


def write_points(folder: Path) -> None:
    """256 points of two classes as they lie in the files of a data set: four of lines, and four of samples in tar."""
    folder.mkdir()
    drawn = random.Random(1)
    for part in range(4):
        with (folder / f"{part}.jsonl").open("w") as lines, tarfile.open(folder / f"{part}.tar", "w") as shard:
            for index in range(64 * part, 64 * part + 64):
                point = [drawn.gauss(0, 1) for _ in range(8)]
                sample = json.dumps({"index": index, "point": point, "class": int(sum(point) > 0)})
                print(sample, file=lines)
                entry = tarfile.TarInfo(f"{index:03}.json")
                entry.size = len(sample)
                shard.addfile(entry, io.BytesIO(sample.encode()))


def read_by(ranks: list[dict[str, Any]]) -> list[int]:
    return sorted(index for one in ranks for index in one["read"])


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest relative difference of the sums of their weights."""
    return max(abs(a - b) / (1 + abs(a)) for a, b in zip(one["sums"], other["sums"], strict=True))
