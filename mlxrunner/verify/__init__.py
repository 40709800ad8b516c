"""Compare warm with cold requests on the user's own device and model.

The differences due to reuse are measured against those that the device makes by itself.
"""
