"""The patch: a step before the check that every configuration goes through."""

import functools

from vllm.config import VllmConfig
from vllm.logger import init_logger

from afd_like import settings

logger = init_logger("vllm.afd_like")
WORKER = "afd_like.worker.AfdLikeWorker"


def patch_config_check() -> None:
    """Wrap `VllmConfig.__post_init__`; a second call finds its own mark and leaves it alone."""
    original = VllmConfig.__post_init__
    if getattr(original, "afd_like", False):
        return

    @functools.wraps(original)
    def checked(self, *args, **kwargs):
        choose_worker(self)
        original(self, *args, **kwargs)

    checked.afd_like = True
    VllmConfig.__post_init__ = checked


def choose_worker(config: VllmConfig) -> None:
    """Take the worker class unless the user, or the first run of this check, has chosen one."""
    wanted = settings.read(config)
    if wanted is not None and config.parallel_config.worker_cls == "auto":
        config.parallel_config.worker_cls = WORKER
        logger.info("afd_like: this server takes the role %s", wanted.role)
