"""The caches of single layers, behind one interface: `LayerCache` in `mlxrunner.cache.protocol`."""
