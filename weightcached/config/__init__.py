"""The manifest, and what follows from it: ranks, rendezvous, drafts."""
