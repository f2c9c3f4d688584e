"""KV cache on disk, as the daemon and the command line manage it: access to the folder, deletion of blocks.

Engines read and write it (`engine/kv_store`); this side only lists and removes files.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator

from llmbox.engine.kv_store import usage
from llmbox.engine.kv_store.folder import KVFolder, KVFolderUnusable

from ..config.model_settings import CacheSettings
from ..config.paths import Paths

log = logging.getLogger("llmbox.daemon")


def limit_bytes(paths: Paths, settings: CacheSettings) -> int:
    """Return the maximum size of the cache in bytes; 0: the cache is off."""
    if settings.kv_disk_gb is None:
        return usage.default_bytes(paths.kv_cache)
    return int(settings.kv_disk_gb * 1e9)


@contextlib.contextmanager
def claim_kv_cache(paths: Paths, settings: CacheSettings) -> Iterator[dict[str, str]]:
    """Claim the folder for this daemon; yield environment variables for its engines, none if the cache cannot
    be used.
    """
    claim = None
    try:
        most = limit_bytes(paths, settings)
        folder = KVFolder(paths.kv_cache, most, settings.kv_key_share)
        if most:
            folder.open()
            claim = folder.claim()
    except (KVFolderUnusable, OSError) as error:
        log.warning("the KV cache on disk is left out: %s", error)
    if claim is None:
        yield {}
        return
    threading.Thread(target=_tidy, args=(folder, paths), name="kv-tidy", daemon=True).start()
    try:
        yield usage.cache_variables(paths.kv_cache, most, settings.kv_key_share)
    finally:
        os.close(claim)


def _tidy(folder: KVFolder, paths: Paths) -> None:
    """Delete blocks of models and keys that no longer exist."""
    from ..security.key_store import KeyStore  # noqa: PLC0415 - not before the sockets listen

    try:
        folder.keep_owners({"", *KeyStore(paths.keys_file).ids()})
        folder.prune()
    except Exception as error:  # noqa: BLE001 - the cache serves as it is
        log.warning("the KV cache on disk cannot be tidied: %s", error)


def open_kv_cache(paths: Paths, settings: CacheSettings) -> KVFolder | None:
    """Open the folder to list or remove; None if there is none. Raises KVFolderUnusable."""
    if not paths.kv_cache.is_dir():
        return None
    folder = KVFolder(paths.kv_cache, limit_bytes(paths, settings), settings.kv_key_share)
    folder.open()
    return folder


def prune_kv_cache(paths: Paths, settings: CacheSettings, *, everything: bool = False) -> int:
    """Delete blocks of models that were deleted or have changed. Returns the bytes freed."""
    with contextlib.suppress(KVFolderUnusable, OSError):
        folder = open_kv_cache(paths, settings)
        return folder.prune(everything=everything) if folder is not None else 0
    return 0


def purge_key(paths: Paths, settings: CacheSettings, key_id: str) -> int:
    """Remove the blocks of a revoked key. Returns the bytes freed."""
    with contextlib.suppress(KVFolderUnusable, OSError):
        folder = open_kv_cache(paths, settings)
        return folder.purge(key_id) if folder is not None else 0
    return 0
