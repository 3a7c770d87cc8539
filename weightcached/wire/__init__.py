"""The Unix socket protocol: messages, packets, descriptors. docs/protocol.md is its reference."""
