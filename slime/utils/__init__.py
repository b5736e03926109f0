"""Shared, backend-free parts: data types, arguments, HTTP, data sets and pure mathematics."""
