"""Events as scalars, for whoever keeps those: TensorBoard, Weights & Biases, MLflow. Worker 0 tells them, from the log's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from paceline.errors import ConfigError

Sink = Callable[[dict[str, Any]], None]


def scalars(event: dict[str, Any]) -> Iterator[tuple[str, float, int]]:
    """The numbers in an event worth a curve: (name, value, step).

    >>> list(scalars({"type": "batch", "step": 7, "total": 64, "noise": None}))
    [('batch/samples', 64.0, 7)]
    """
    for name, value in _found(event):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value), int(event["step"])


def _found(event: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    kind = event["type"]
    if kind == "window":
        yield "speed/samples_per_s", event["samples_per_s"]
        yield "speed/share_of_limit", event["efficiency"]
        for rank, step_s in enumerate(event["step_s"]):
            yield f"worker-{rank}/samples", event["observation"]["samples"][rank]
            yield f"worker-{rank}/step_s", step_s
        comm = [value for value in event["comm_s"] if value is not None]
        waiting = event.get("waiting_s") or [value - min(comm) for value in comm]  # older files
        for rank, waiting_s in enumerate(waiting):
            yield f"worker-{rank}/waiting_s", waiting_s
        yield "speed/exchange_s", event.get("exchange_s")
    elif kind == "batch":
        yield "batch/samples", event["total"]
        yield "batch/noise_scale", event["noise"]
    elif kind == "lr":
        yield "batch/lr_factor", event["factor"]
    elif kind == "loss":
        yield "worker-0/epoch_loss", event["loss"]  # its own mean: it is the one who tells
    elif kind == "round":
        for name in ("transfer_s", "waited_s", "num_bytes", "drift"):
            yield f"sync/{name}", event.get(name)
    elif kind == "dissimilarity":
        yield "partition/dissimilarity", event["ratio"]


def sinks(tensorboard: str | None, track: str | None, config: dict[str, Any]) -> list[Sink]:
    """What a run was asked to tell.

    Args:
        tensorboard: a folder for TensorBoard.
        track: names of trackers with commas between; they must be set up by the script, or by their environment.
        config: the run's settings.

    Raises:
        ConfigError: a library that is not installed, or does not start.
    """
    names = [name.strip() for name in (track or "").split(",") if name.strip()]
    made: list[tuple[str, Callable[[], Sink]]] = (
        [("tensorboard", lambda: to_tensorboard(tensorboard))] if tensorboard else []
    )
    made += [(name, {"wandb": lambda: _to_wandb(config), "mlflow": _to_mlflow}[name]) for name in names]
    found = []
    for name, make in made:
        if find_spec(name) is None:
            raise ConfigError(f"{name} is not installed here: pip install {name}, or leave it out")
        try:
            found.append(make())
        except Exception as error:
            raise ConfigError(
                f"{name} does not start ({type(error).__name__}: {error}): set it up, or leave it out"
            ) from error
    return found


def to_tensorboard(folder: str | None) -> Sink:
    """Scalars into a TensorBoard folder."""
    if find_spec("tensorboard") is None:
        raise ConfigError("tensorboard is not installed here: pip install tensorboard")
    writer = import_module("torch.utils.tensorboard").SummaryWriter(folder)

    def tensorboard(event: dict[str, Any]) -> None:
        for name, value, step in scalars(event):
            writer.add_scalar(name, value, step, walltime=event["t"])
        if event["type"] in ("window", "end"):
            writer.flush()
        if event["type"] == "end":
            writer.close()

    return tensorboard


def _to_wandb(config: dict[str, Any]) -> Sink:
    library = import_module("wandb")
    ours = library.run is None
    run = library.init(config=config) if ours else library.run
    run.define_metric("paceline/*", step_metric="paceline/step")

    def wandb(event: dict[str, Any]) -> None:
        found = {f"paceline/{name}": value for name, value, _ in scalars(event)}
        # A run of the script's: goes out with what the script logs next, or at the end. A row of our own would move its steps on, and
        # what the script logs for an earlier step would be refused.
        if found or event["type"] == "end":
            run.log({**found, "paceline/step": event["step"]}, commit=ours or event["type"] == "end")

    return wandb


def _to_mlflow() -> Sink:
    library = import_module("mlflow")
    run = (library.active_run() or library.start_run()).info.run_id

    def mlflow(event: dict[str, Any]) -> None:
        found = {f"paceline/{name}": value for name, value, _ in scalars(event)}
        if found:
            library.log_metrics(found, step=int(event["step"]), run_id=run)

    return mlflow
