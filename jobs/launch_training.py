"""Submit N consecutive SLURM jobs of one training: each begins when the one before has ended, however it ended.

python jobs/launch_training.py -n 8 [--profile PROFILE] [--nodes 2] [--ranks-per-node 8]
    [--sbatch=--exclusive] CONFIG [key=value ...]

Every job goes on from the newest checkpoint, with the training's one seed. They read with `shard_seed=randomized`:
data-parallel ranks then differ, tensor-parallel ranks agree. The numbers of the jobs are printed and noted in
`jobs.jsonl` of the training's `out_dir`. Once `max_steps` are done, the jobs that are left end at once.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

from train_config import TrainConfig

from sharmill.config import load_typed
from sharmill.errors import ConfigError
from sharmill.executors.slurm.profile import ClusterProfile, load_profile
from sharmill.executors.slurm.queue import outside_own_job

_ROOT = Path(__file__).resolve().parents[1]
_SCRIPT = _ROOT / "jobs" / "sbatch" / "train.sbatch"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--num-jobs", type=int, required=True, help="how many jobs, one after the other")
    parser.add_argument("--profile", type=Path, help="the cluster profile, whose gpu part says what a rank gets")
    parser.add_argument("--nodes", type=int, default=1, help="nodes per job")
    parser.add_argument("--ranks-per-node", type=int, default=1, metavar="N", help="GPUs per node, with --profile")
    parser.add_argument("--after", help="the number of a job that the first one waits for")
    parser.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="a further option of sbatch")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and submit nothing")
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    return parser.parse_intermixed_args(arguments)


def profile_options(cluster: ClusterProfile, nodes: int, ranks_per_node: int) -> list[str]:
    """Return the options of sbatch for one training job, whose ranks each have what the profile gives to one."""
    ranks = cluster.gpu
    values = {
        "partition": ranks.partition,
        "account": ranks.account or cluster.account,
        "qos": ranks.qos or cluster.qos,
        "gpus-per-node": ranks.gpus * ranks_per_node or None,
        "cpus-per-task": ranks.cores * ranks_per_node,
        "mem": f"{round(ranks.memory_gb * 1024) * ranks_per_node}M",
        "time": ranks.timeout_min,
        "signal": f"B:TERM@{cluster.signal_s}",
        "nodes": nodes,
        **ranks.extra,
    }
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


def submit(command: list[str]) -> str:
    """Submit a job, and return its number.

    Raises:
        ConfigError: sbatch is not here, or refuses it.
    """
    try:
        with outside_own_job():
            said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    except FileNotFoundError as error:
        raise ConfigError("there is no sbatch here; are you on a SLURM cluster?", code="unsupported_system") from error
    except subprocess.SubprocessError as error:
        reason = " ".join(str(getattr(error, "stderr", None) or error).split())
        raise ConfigError(f"sbatch refuses the job: {reason}", code="jobs_refused") from error
    return said.strip().split(";")[0]


def launch(options: argparse.Namespace) -> None:
    """Submit the jobs, each behind the one before.

    Raises:
        ConfigError: the configuration or the profile is wrong, or SLURM refuses a job; those before it stay submitted.
    """
    if min(options.num_jobs, options.nodes, options.ranks_per_node) < 1:
        raise ConfigError("-n, --nodes and --ranks-per-node must be at least 1", code="bad_config_value")
    if Path.cwd() != _ROOT:
        raise ConfigError(f"the jobs begin in the folder of this command: give it in {_ROOT}", code="bad_config_value")
    if any(override.partition("=")[0] == "shard_seed" for override in options.overrides):
        raise ConfigError("the jobs read with shard_seed=randomized: leave out shard_seed=", code="bad_config_value")
    config = load_typed(TrainConfig, options.config, options.overrides)
    chosen = [f"--nodes={options.nodes}"]
    if options.profile:
        chosen = profile_options(load_profile(options.profile), options.nodes, options.ranks_per_node)
    elif options.ranks_per_node > 1:
        raise ConfigError("--ranks-per-node multiplies what a profile gives: add --profile", code="bad_usage")
    before = options.after
    for _ in range(options.num_jobs):
        behind = [f"--dependency=afterany:{before}"] if before else []
        command = ["sbatch", "--parsable", *chosen, *options.sbatch, *behind, str(_SCRIPT), options.config]
        command += [*options.overrides, "shard_seed=randomized"]
        if options.dry_run:
            print(shlex.join(command))
            before = "JOB_BEFORE"
            continue
        note = {"job": submit(command), "after": before}
        before = note["job"]
        print(f"job {note['job']}" + (f", after {note['after']}" if note["after"] else ""))
        out_dir = Path(config.out_dir)
        out_dir.mkdir(parents=True, exist_ok=True)
        with (out_dir / "jobs.jsonl").open("a") as notes:
            notes.write(json.dumps(note) + "\n")


def main(arguments: list[str]) -> int:
    """Submit as the arguments say, and return the exit status."""
    try:
        launch(parse(arguments))
    except ConfigError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
