"""Finds the folder of a checkpoint: a local folder, or a download of ``hf:ORG/NAME[@REVISION]``.

The configuration, tokenizer and safetensors files are downloaded with huggingface_hub. Code and
pickles are never downloaded. A revision is first resolved to a commit, so that all files are from
the same commit. A path without the prefix ``hf:`` is a local folder, and nothing is downloaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from dlm_export.checkpoints.hub import HubName, Located


@contextlib.contextmanager
def local(source: Path | HubName, *, headers_only: bool = False) -> Iterator[Located]:
    """Yield the folder of a checkpoint or bundle. If necessary, download it from the hub first.

    Downloads are stored in the cache of huggingface_hub. If ``headers_only`` is true, the yielded
    folder is temporary. The weight files in the folder have the right header and the full size, but
    contain zeros instead of weights. Raises HubError.
    """
    if isinstance(source, Path):
        yield Located(source)
        return
    from dlm_export.checkpoints import fetching

    with fetching.fetched(source, headers_only=headers_only) as found:
        yield found
