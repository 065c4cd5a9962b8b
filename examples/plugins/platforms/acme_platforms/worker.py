"""The worker: drives the device. It derives from ours; from scratch it derives from `WorkerBase`."""

from typing import Any

from acme_platforms.ops import AcmeDeviceRotary
from hardpoint.worker.device_worker import Worker
from hardpoint.worker.distributed.parallel_state import get_tp_group


class AcmeDeviceWorker(Worker):
    """One more method, to be called by name."""

    def acme_device(self) -> dict[str, Any]:
        """What this worker computes with."""
        layers = self.model_runner.attention_layers().values()
        communicator = get_tp_group().device_communicator
        return {
            "attention": sorted({type(layer.impl).__name__ for layer in layers}),
            "communicator": type(communicator).__name__,
            "summed": getattr(communicator, "summed", 0),
            "turned": AcmeDeviceRotary.turned,
        }
