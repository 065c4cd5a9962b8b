"""Methods mixed into the worker: `--worker-extension-cls acme_worker_extension_cls.AcmeExtension`."""


class AcmeExtension:
    """Becomes a base of the worker's class: `self` is the worker. It has no constructor and no name of the worker's."""

    def acme_parameters(self) -> dict[str, int]:
        """How many numbers each part of the model has."""
        counts: dict[str, int] = {}
        for name, tensor in self.get_model().named_parameters():
            part = name.split(".")[-2]
            counts[part] = counts.get(part, 0) + tensor.numel()
        return counts
