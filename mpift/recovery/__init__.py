"""Bringing ranks back to the others' state: arrays from a peer, checked."""
