"""Declares the C extension; everything else is in pyproject.toml.

The extension is optional: without a compiler the install succeeds and the Python fallback is used.
"""

from setuptools import Extension, setup

_NAMES = ("module", "guarding", "hashing", "strided", "transfer", "turns")

setup(
    ext_modules=[
        Extension(
            "torchstore_core._native",
            sources=[f"native/{name}.c" for name in _NAMES],
            depends=["native/prefetching.h", "native/turns.h"],
            extra_compile_args=["-O2"],
            optional=True,
        )
    ]
)
