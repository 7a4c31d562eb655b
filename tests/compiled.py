"""What compilers made of kernels, kept from one run of the tests to the next, as ccache does.

Entries lie in the user's cache folder, by a digest of all that decides them.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dakrun-tests"
KEPT_SECONDS = 30 * 24 * 3600  # after the last use


def kept(given: Iterable[str | bytes], make: Callable[[], bytes]) -> bytes:
    """What `make` makes of `given`, which must be all that it depends on; made once."""
    digest = hashlib.sha256()
    for part in given:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8) + data)
    path = FOLDER / digest.hexdigest()
    with contextlib.suppress(OSError):
        found = path.read_bytes()
        path.touch()
        return found
    found = make()
    with contextlib.suppress(OSError):  # a folder that cannot be written, or is full
        FOLDER.mkdir(parents=True, exist_ok=True)
        whole = FOLDER / f"{path.name}.{os.getpid()}"
        whole.write_bytes(found)
        whole.replace(path)
        for other in FOLDER.iterdir():
            if time.time() - other.stat().st_mtime > KEPT_SECONDS:
                other.unlink()
    return found
