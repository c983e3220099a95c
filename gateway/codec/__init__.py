"""Protobuf to values and back, for `servicer` and `clients`; nothing else in the gateway sees a message."""
