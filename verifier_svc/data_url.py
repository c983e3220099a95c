"""A file inside a request: `data:video/mp4;base64,...`. The label must be what the bytes are; nothing is fetched."""

from __future__ import annotations

import base64
import binascii

from foveate.rpc.errors import invalid
from verifier_svc.media import Media, UploadSpool, container_format

PREFIX = "data:"
FIELD = "spec.url"
_FORMATS = {
    "video/mp4": "mov",
    "video/quicktime": "mov",
    "video/webm": "matroska",
    "video/x-matroska": "matroska",
    "image/gif": "gif",
    "image/jpeg": "mjpeg",
    "video/x-motion-jpeg": "mjpeg",
}


def media_of_data_url(url: str, *, max_bytes: int) -> Media:
    """Returns the file in a data URL; the caller closes it.

    INVALID_ARGUMENT for a label that is none of ours or not that of the bytes, and for what is not base64.
    RESOURCE_EXHAUSTED when the file is larger than uploads may be.
    """
    head, comma, text = url[len(PREFIX) :].partition(",")
    label, *parameters = [part.strip().lower() for part in head.split(";")]
    if not comma or parameters[-1:] != ["base64"]:
        raise invalid(FIELD, "must be data:TYPE;base64,DATA")
    if label not in _FORMATS:
        raise invalid(FIELD, f"is labelled {label or 'nothing'!r}; known are {', '.join(sorted(_FORMATS))}")
    spool = UploadSpool(max_bytes=max_bytes, announced_bytes=len(text) * 3 // 4 - text[-2:].count("="))
    try:
        spool.append(base64.b64decode(text, validate=True), 0)
        media = spool.finish()
    except binascii.Error as error:
        spool.discard()
        raise invalid(FIELD, "is not base64") from error
    except BaseException:
        spool.discard()
        raise
    media.field_path = FIELD
    try:
        found = container_format(media)
        if found != _FORMATS[label]:
            raise invalid(FIELD, f"is labelled {label}, but its bytes are {_NAMES[found]}")
    except BaseException:
        media.close()
        raise
    return media


_NAMES = {"mov": "mp4 or mov", "matroska": "webm or mkv", "gif": "gif", "mjpeg": "JPEG"}
