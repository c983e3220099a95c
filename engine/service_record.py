"""What the list of services in Redis says of a service's model and of this machine."""

from __future__ import annotations

import foveate
from engine.handle_proto import layout_to_proto
from engine.loading import LoadedModel
from engine.shm import shm_namespace_id
from foveate.v1 import records_pb2


def service_record(model: LoadedModel) -> records_pb2.ServiceRecord:
    """Returns a record that lacks only where the service is."""
    return records_pb2.ServiceRecord(
        version=foveate.__version__,
        model=model.name,
        model_fingerprint=model.fingerprint,
        tokenizer_sha256=model.tokenizer_sha256,
        layout=layout_to_proto(model.layout),
        shm_namespace_id=shm_namespace_id(),
    )
