"""Checkpoints on disk: one safetensors file, written atomically, read without executing anything.

Tensors are stored as safetensors; everything else (numbers, text, lists, tuples, dicts) as JSON in the file's metadata, with
a mark where a tensor belongs. A sha256 over both tells a damaged file from a good one.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from paceline.errors import CheckpointError

SCHEMA = 1


def write(path: Path, state: dict[str, Any]) -> None:
    """Write `state` to `path`: a temporary file beside it, flushed to disk, then renamed over it.

    Raises:
        CheckpointError: the state holds something that is neither tensor nor plain value, or the disk refused.
    """
    data = _encoded(state)
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {error.strerror}. The file there is untouched"
        ) from error


def read(path: Path) -> dict[str, Any]:
    """What `write` wrote.

    Raises:
        CheckpointError: no such file, truncated, damaged, not a paceline checkpoint, or of a newer schema.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path} on this machine")
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            meta = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or not a checkpoint: {error}. Use an older one") from error
    if meta.get("format") != "paceline":
        raise CheckpointError(f"{path} is a safetensors file, but not a paceline checkpoint")
    schema = meta.get("schema", "")
    if schema.isdecimal() and int(schema) > SCHEMA:
        raise CheckpointError(
            f"{path} has checkpoint schema {schema}, this paceline reads up to {SCHEMA}: update paceline"
        )
    if "tree" not in meta or _digest(schema, meta["tree"], tensors) != meta.get("sha256"):
        raise CheckpointError(f"{path} is damaged: its contents do not match their checksum. Use an older one")
    state: dict[str, Any] = _unpack(json.loads(meta["tree"]), tensors)
    return state


def _encoded(state: dict[str, Any]) -> bytes:
    tensors: dict[str, torch.Tensor] = {}
    tree = json.dumps(_pack(state, tensors, "state"))
    meta = {"format": "paceline", "schema": str(SCHEMA), "tree": tree, "sha256": _digest(str(SCHEMA), tree, tensors)}
    return safetensors.torch.save(tensors, metadata=meta)


def to_bytes(state: dict[str, Any]) -> torch.Tensor:
    """A state as a tensor of bytes, to be sent or stored within another."""
    return torch.frombuffer(bytearray(_encoded(state)), dtype=torch.uint8)


def from_bytes(data: torch.Tensor) -> dict[str, Any]:
    """What `to_bytes` made."""
    raw = data.numpy().tobytes()
    length = int.from_bytes(raw[:8], "little")
    tree = json.loads(raw[8 : 8 + length])["__metadata__"]["tree"]
    state: dict[str, Any] = _unpack(json.loads(tree), safetensors.torch.load(raw))
    return state


def _pack(value: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
    if isinstance(value, torch.Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, (str, int)):
                raise CheckpointError(
                    f"{where} has a key of type {type(key).__name__}; only text and whole numbers are stored"
                )
        return {"dict": [[key, _pack(item, tensors, f"{where}[{key!r}]")] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_pack(item, tensors, f"{where}[{i}]") for i, item in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(
        f"{where} is of type {type(value).__name__}: a checkpoint holds tensors, numbers, text, lists, tuples and dicts"
    )


def _unpack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        return {key: _unpack(item, tensors) for key, item in inner}
    items = [_unpack(item, tensors) for item in inner]
    return items if kind == "list" else tuple(items)


def _digest(schema: str, tree: str, tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(f"{schema} {tree}".encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
