"""The drafter: proposes tokens from the verifier's KV, or with a smaller model of its own.

main         flags, server, drain              sparse, streaming, layerskip, small   one kind of drafts each
config       settings                          base          what a kind is          kinds   which are offered
servicer     the RPCs                          shared_kv     what the first three share: the verifier's KV, read only
messages     protobuf <-> values               chain         one token after the other
drafter      device thread, open sequences     drafts        values, and which rounds follow
attachments  mapped pools, each mapped once    video_features  a small model's own look at a video
"""
