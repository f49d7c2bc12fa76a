"""`paceline run`: start a training script on all workers of this machine."""

from __future__ import annotations

import json
from typing import Any

import click

from paceline.cli.screen import ProgressScreen, checked_script, new_run_dir, run_status, say
from paceline.comm.launch import Job, launch
from paceline.config import check_names


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--nproc", type=int, help="Workers on this machine. [default: one per GPU, or one]")
@click.option("--balance", help="Balance policy: affine (default), equal, fixed:1,2,..., dbs, dp, edp.")
@click.option(
    "--sync",
    help="Sync policy: allreduce (default), local, post-local, hierarchical, daso, overlap, diloco, gossip; settings follow a colon: overlap:h=8,compress=int8.",
)
@click.option(
    "--batch",
    help="Batch policy: constant (default), schedule:0=256,50000=512, norm-test, inner-product, augmented, noise-scale, goodput; settings follow a colon: goodput:most=4096.",
)
@click.option("--lr-rule", help="The learning rate when the batch changes: none (default), linear, sqrt, adascale.")
@click.option("--recipe", help="A published method of several policies: adaptive-local, rcd-sgd.")
@click.option("--nodes", help="Workers on each node, in order: 2,2. [default: by host]")
@click.option("--run-dir", help="Folder for events and logs. [default: runs/DATE-SCRIPT]")
@click.option("--seed", type=int, help="Decides the order of samples.")
@click.option("--replan-every", type=int, help="Steps between two decisions. [default: 4]")
@click.option("--max-local-batch", help="Most samples a worker can hold: one number, or one per worker: 64,64,32.")
@click.option("--granularity", type=int, help="Plan in multiples of this many samples.")
@click.option("--timeout-s", type=float, help="Longest wait for another worker. [default: 300]")
@click.option("--nnodes", type=int, default=1, help="Machines in the run; start this command on each.")
@click.option("--node-rank", type=int, help="Which of them this is.")
@click.option("--master-addr", help="Address of machine 0.")
@click.option("--master-port", type=int, help="A free port there.")
@click.option("--rdzv-backend", help="torchrun's rendezvous: static (default) or c10d.")
@click.option("--rdzv-endpoint", help="HOST:PORT of the rendezvous.")
@click.option("--rdzv-id", help="Name of the job at the rendezvous.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    script: str, arguments: tuple[str, ...], nproc: int | None, nnodes: int, run_dir: str | None, **options: Any
) -> None:
    """Train with SCRIPT on all workers of this machine.

    The script calls paceline.init(); what it is not told there, it takes from these options. The same script runs under plain
    torchrun as well.
    """
    path = checked_script(script)
    check_names(options)
    if nproc is None:
        import torch

        nproc = max(1, torch.cuda.device_count())
    names = (
        "balance",
        "sync",
        "batch",
        "lr_rule",
        "recipe",
        "nodes",
        "seed",
        "replan_every",
        "granularity",
        "timeout_s",
    )
    settings = {name: options[name] for name in names if options[name] is not None}
    if options["max_local_batch"] is not None:
        settings["max_local_batch"] = _caps(options["max_local_batch"])
    rendezvous = {
        name: options[name]
        for name in ("node_rank", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id")
    }
    folder = new_run_dir(run_dir, path.stem)
    settings["run_dir"] = str(folder)
    env = {"PACELINE_CLI": json.dumps(settings)}
    screen = ProgressScreen(run_status(folder))
    job = Job([str(path), *arguments], nproc, folder / "logs", env, nnodes=nnodes, rendezvous=rendezvous)
    try:
        launch(job, screen)
    finally:
        screen.done()
    say(f"done; events and logs are in {folder}")


def _caps(text: str) -> int | list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"one whole number, or one per worker with commas between; got {text!r}") from None
    return numbers[0] if len(numbers) == 1 else numbers
