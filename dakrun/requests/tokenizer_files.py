"""A tokenizer's files as their libraries read them: without byte order marks.

Knows files, not tokenizers.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MARK = b"\xef\xbb\xbf"
_TEXTS = (".json", ".jinja")  # files that are read as UTF-8


@contextmanager
def without_marks(directory: Path) -> Iterator[Path]:
    """`directory`, or, if texts in it begin with a byte order mark, a folder like it without these.

    The folder is temporary, and links to all other files. Raises OSError.
    """
    marked = [path for path in directory.iterdir() if _is_marked(path)]
    if not marked:
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="dakrun-") as name:
        folder = Path(name)
        for path in directory.iterdir():
            if path not in marked:
                (folder / path.name).symlink_to(path.resolve())
        for path in marked:
            (folder / path.name).write_bytes(path.read_bytes().removeprefix(_MARK))
        yield folder


def _is_marked(path: Path) -> bool:
    if path.suffix not in _TEXTS or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MARK)) == _MARK
