"""The caches of single layers, with one interface: `LayerCache` in `mlxrunner.cache.protocol`."""
