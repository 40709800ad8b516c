"""The caches of single layers: one file for each kind, behind one protocol."""
