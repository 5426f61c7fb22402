"""Submit N consecutive SLURM jobs of one training: each starts when the previous job has ended for any reason.

python jobs/launch_training.py -n 8 [--profile PROFILE] [--nodes 2] [--ranks-per-node 8]
    [--sbatch=--exclusive] [--script NeMo/examples/speechlm2/salm_train.py] CONFIG [key=value ...]

Every job resumes from the newest checkpoint, with the training's seed. Jobs read the data with `shard_seed=randomized`,
so that data-parallel ranks read different data, and tensor-parallel ranks read the same data. The job numbers are
printed, and stored in `jobs.jsonl` in the training's `out_dir`. Once `max_steps` are done, the remaining jobs end
immediately.

With `--script`, the jobs run this NeMo script with the configuration CONFIG (`jobs/sbatch/nemo.sbatch`), each with its
own random seed. With `resumable: true` in `data.train_ds`, each job also continues in the data where the previous one
ended; `shard_seed` must then be a number, which determines the order. Otherwise each job reads the data from the start.

python jobs/launch_training.py -n 8 my.sub [key=value ...]

CONFIG may also be an sbatch script that requests its own resources, such as the one in NeMo's documentation. The
script's arguments are a random seed, which differs between jobs, and the overrides.
"""

import json
import secrets
import shlex
import subprocess
import sys
from pathlib import Path

import click
from omegaconf import OmegaConf
from train_config import TrainConfig

from sharmill.config import load_typed
from sharmill.errors import ConfigError, refuse
from sharmill.executors.slurm.profile import ClusterProfile
from sharmill.executors.slurm.queue import outside_own_job
from sharmill.training.nemo.settings import read_yaml

_ROOT = Path(__file__).resolve().parents[1]
_SBATCH = _ROOT / "jobs" / "sbatch"


def submit(command: list[str]) -> str:
    """Submit a job, and return its number.

    Raises:
        ConfigError: sbatch is missing, or refuses the job.
    """
    try:
        with outside_own_job():
            said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    except FileNotFoundError as error:
        raise ConfigError("sbatch is missing; run this on a SLURM cluster", code="unsupported_system") from error
    except subprocess.SubprocessError as error:
        reason = " ".join(str(getattr(error, "stderr", None) or error).split())
        raise ConfigError(
            f"sbatch refused the job: {reason}; the command was: {shlex.join(command)}", code="jobs_refused"
        ) from error
    return said.strip().split(";")[0]


def check_order(config_path: str, overrides: tuple[str, ...]) -> None:
    """Raise ConfigError if resumable jobs with different seeds would read the data in different orders."""
    given = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    config = read_yaml(config_path)
    keys = ("data.train_ds.resumable", "data.train_ds.shard_seed")
    resumable, shard_seed = (str(given.get(key, OmegaConf.select(config, key))) for key in keys)
    unordered = resumable.lower() == "true" and not shard_seed.isdecimal()
    refuse((unordered, f"shard_seed: {shard_seed} with resumable: true, but each job has another seed; use a number"))


@click.command()
@click.option("-n", "--num-jobs", type=int, required=True, help="Number of consecutive jobs.")
@click.option("--profile", help="Cluster profile, whose section gpu has the resources of a rank.")
@click.option("--nodes", type=int, help="Nodes per job.  [default: 1]")
@click.option("--ranks-per-node", default=1, show_default=True, metavar="N", help="GPUs per node, with --profile.")
@click.option("--after", help="Number of a job that the first job waits for.")
@click.option("--sbatch", "sbatch_options", multiple=True, metavar="OPTION", help="Further sbatch option.")
@click.option("--script", metavar="FILE", help="NeMo training script, with CONFIG as its configuration.")
@click.option("--dry-run", is_flag=True, help="Print the commands and submit nothing.")
@click.argument("config_path", metavar="CONFIG")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def launch(
    num_jobs: int, profile: str | None, nodes: int | None, ranks_per_node: int, after: str | None,
    sbatch_options: tuple[str, ...], script: str | None, dry_run: bool, config_path: str, overrides: tuple[str, ...],
) -> None:  # fmt: skip
    """Submit N consecutive SLURM jobs of one training, each after the previous one.

    CONFIG may be an sbatch script, which gets a random seed and KEY=VALUE as its arguments.
    """
    is_own = Path(config_path).is_file() and Path(config_path).read_bytes().startswith(b"#!")
    missing = [path for path in (script, config_path) if script and not Path(path).is_file()]
    refuse(
        (
            min(num_jobs, ranks_per_node, 1 if nodes is None else nodes) < 1,
            "-n, --nodes and --ranks-per-node must be at least 1",
        ),
        (
            is_own and (profile or nodes or script or ranks_per_node > 1),
            f"{config_path} requests its own resources; use only the options -n, --after and --sbatch",
        ),
        (not is_own and Path.cwd() != _ROOT, f"the jobs start in the current folder; run this command in {_ROOT}"),
        (
            any(override.startswith("shard_seed=") for override in overrides),
            "the jobs read with shard_seed=randomized; omit shard_seed=",
        ),
        (missing, f"there is no {', '.join(missing)}; name a NeMo training script and its configuration"),
        (ranks_per_node > 1 and not profile, "--ranks-per-node multiplies the resources of a profile; add --profile"),
    )
    config = None if script or is_own else load_typed(TrainConfig, config_path, overrides)
    if script:
        check_order(config_path, overrides)
    chosen = [] if is_own else [f"--nodes={nodes or 1}"]
    if not is_own and not any(option.startswith("--mem") for option in sbatch_options):
        # The memory is requested here, because sbatch would refuse --mem-per-cpu if the script requested --mem.
        chosen.append("--mem=64G")
    if profile:
        cluster = load_typed(ClusterProfile, profile)
        chosen = [
            *cluster.arguments(cluster.gpu, ranks_per_node),
            f"--nodes={nodes or 1}",
            f"--signal=B:TERM@{cluster.signal_s}",
        ]
    for _ in range(num_jobs):
        behind = [f"--dependency=afterany:{after}"] if after else []
        command = ["sbatch", "--parsable", *chosen, *sbatch_options, *behind]
        if is_own:
            command += [config_path, str(secrets.randbits(31)), *overrides]
        elif script:
            command += [str(_SBATCH / "nemo.sbatch"), str(secrets.randbits(31)), script, config_path, *overrides]
        else:
            command += [str(_SBATCH / "train.sbatch"), config_path, *overrides, "shard_seed=randomized"]
        if dry_run:
            print(shlex.join(command))
            after = "JOB_BEFORE"
            continue
        previous, after = after, submit(command)
        print(f"job {after}" + (f", after {previous}" if previous else ""))
        if config is not None:
            out_dir = Path(config.out_dir)
            out_dir.mkdir(parents=True, exist_ok=True)
            with (out_dir / "jobs.jsonl").open("a") as notes:
                notes.write(json.dumps({"job": after, "after": previous}) + "\n")


def main(arguments: list[str]) -> int:
    """Submit the jobs that the arguments describe, and return the exit status."""
    try:
        launch.main(arguments, standalone_mode=False)
    except (ConfigError, click.ClickException) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
