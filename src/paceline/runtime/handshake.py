"""Before anything is computed, all workers compare what must be equal."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

import torch.utils.data

from paceline.comm import Comm
from paceline.errors import DisagreementError


def agree(comm: Comm, what: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare `fields` over all workers; names starting with `_` may differ.

    Args:
        comm: the door to the other workers.
        what: for the message: what the fields describe.
        fields: JSON values by name.

    Returns:
        Everybody's fields, by rank.

    Raises:
        DisagreementError: on every worker alike, naming the workers in the minority, the field and both values.
    """
    everybody = [
        json.loads(text)
        for text in comm.gather_text(json.dumps(fields), f"comparing the {what}, which every worker must take part in")
    ]
    for name in dict.fromkeys(name for one in everybody for name in one if not name.startswith("_")):
        values = [json.dumps(one.get(name)) for one in everybody]
        common = Counter(values).most_common(1)[0][0]
        if values.count(common) * 2 <= len(values):
            common = values[0]  # no majority: worker 0 is the measure
        odd = [rank for rank, value in enumerate(values) if value != common]
        if odd:
            others = ", ".join(f"worker {rank} has {name}={values[rank]}" for rank in odd[:4])
            more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
            raise DisagreementError(
                f"all workers must have the same {what}: {others}{more}, the others have {name}={common}. "
                f"Start every worker with the same script, arguments, data and versions"
            )
    return everybody


def fingerprint(dataset: Any) -> str:
    """A cheap mark of a dataset's identity, equal on all workers and in later runs.

    Taken from, in this order: the dataset's own `fingerprint` (attribute or method); a sample of a TensorDataset's
    tensors; its `targets` or `labels`; else from its type alone. Items are not fetched: they may be large, or augmented
    at random. The length is compared separately.
    """
    own = getattr(dataset, "fingerprint", None)
    if own is not None:
        return str(own() if callable(own) else own)
    digest = hashlib.sha256(type(dataset).__qualname__.encode())
    if isinstance(dataset, torch.utils.data.TensorDataset):
        for tensor in dataset.tensors:
            digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
            stride = max(1, tensor.numel() // 4096)
            sample = tensor.detach().reshape(-1)[::stride].to("cpu", torch.float64)
            digest.update(sample.numpy().tobytes())
    else:
        for name in ("targets", "labels"):
            values = getattr(dataset, name, None)
            if values is not None:
                digest.update(json.dumps([str(value) for value in list(values)[:4096]]).encode())
                break
    return digest.hexdigest()[:16]
