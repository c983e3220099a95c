"""The drafter: proposes tokens from a sparse view of the verifier's KV.

main         flags, server, drain              sparse       one sequence: gather, take committed rows, propose
config       settings                          attachments  mapped pools, each mapped once
servicer     the RPCs                          drafts       which rounds follow, and how long a draft may be
messages     protobuf <-> values               drafter      the model, the device thread and the open sequences
"""
