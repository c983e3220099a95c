"""The engine: models, KV memory and attention, shared by drafter and verifier.

loading      a checkpoint folder -> LoadedModel        positions  3-D RoPE positions by the release rule
families     what differs between model families       runner     one forward of the text model over a KvView
attention    kernels: plan once a step, run per layer  decoder    the layers, without the cost of modules
probe        is this machine bit-stable?               sampling   shared-noise choice of tokens
layout       shape and bytes of keys and values        selection  the visual entries a sparse drafter reads
kv_pool      the owner's side of KV memory             kv_share   the reader's side
handle_proto PoolHandle <-> KvHandle                   device_thread  the one thread that touches a device
"""

import os

# Models are local folders: nothing in the process may reach for a model hub, so this precedes every import of
# transformers.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
