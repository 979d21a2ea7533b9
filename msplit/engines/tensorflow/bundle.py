"""Writes tensors as a checkpoint, by TensorFlow's own op."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from msplit.engines.tensorflow import runtime

_FULL = {"No space left on device": errno.ENOSPC, "File too large": errno.EFBIG, "quota exceeded": errno.EDQUOT}


def save(prefix: Path, tensors: Mapping[tuple[str, str], Any]) -> None:
    """TensorFlow's SaveV2, in a session that leaves the GPU alone.

    Args:
        prefix: The beginning of the files' names.
        tensors: Values by key and slice, "" for a whole tensor.

    Raises:
        OSError: They can not be written.
    """
    tf = runtime.tensorflow()
    v1 = tf.compat.v1
    keys, parts = zip(*tensors, strict=True)
    values = [np.asarray(value) for value in tensors.values()]
    with v1.Graph().as_default() as graph:
        fed = [v1.placeholder(tf.string if value.dtype.kind in "OSU" else value.dtype) for value in values]
        op = tf.raw_ops.SaveV2(prefix=str(prefix), tensor_names=keys, shape_and_slices=parts, tensors=fed)
        with v1.Session(graph=graph, config=runtime.session_config(1, cpu_only=True)) as session:
            try:
                session.run(op, dict(zip(fed, values, strict=True)))
            except tf.errors.OpError as error:
                said = runtime.first_line(error)
                code = next((code for text, code in _FULL.items() if text.lower() in str(error).lower()), errno.EIO)
                raise OSError(code, said, str(prefix)) from None
