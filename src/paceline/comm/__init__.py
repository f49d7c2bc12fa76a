"""The only door to torch.distributed: a protocol of few verbs, the real thing, and a double with scripted faults."""

from paceline.comm.loopback import Fault, LoopbackComm, LoopbackWorld
from paceline.comm.protocol import Comm, Pending, PendingGather, Team
from paceline.comm.torch_comm import EXCHANGING, TorchComm, pick_device

__all__ = [
    "EXCHANGING",
    "Comm",
    "Fault",
    "LoopbackComm",
    "LoopbackWorld",
    "Pending",
    "PendingGather",
    "Team",
    "TorchComm",
    "pick_device",
]
