"""CANN without a device, for the genuine torch_npu: see ``ascendcl.c``."""
