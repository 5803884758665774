"""Specs of the caches that layers keep, one module per family.

Import the classes from `kvyard.kv_cache_interface`, vLLM's name for this place.
"""
