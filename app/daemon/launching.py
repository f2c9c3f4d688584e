"""How this daemon starts engines. Light: the first one is started before the daemon's large imports."""

import os
from dataclasses import replace

from llmbox.engine.repacked import environment
from llmbox.engine.spawn import Launch
from llmbox.kernels.cpu.cache_folder import KERNEL_CACHE

from ..paths import Paths
from ..settings import CacheSettings


def with_caches(launch: Launch, paths: Paths, settings: CacheSettings) -> Launch:
    """Kernels and packed weights are kept where everything else is: under --data-dir, if there is one."""
    kernels = {} if KERNEL_CACHE in os.environ else {KERNEL_CACHE: str(paths.kernel_cache)}
    repacked = environment.variables(paths.repacked, settings.repacked_gb)
    return replace(launch, env={**kernels, **repacked, **launch.env})
