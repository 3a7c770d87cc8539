"""The Unix socket protocol: messages, packets and who closes which descriptor. docs/protocol.md is
its reference.
"""
