"""Declares the C extension; everything else is in pyproject.toml.

The extension is optional: without a compiler the install succeeds and the Python fallback is used.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "torchstore_core._native",
            sources=[
                "src/torchstore_core/_native.c",
                "src/torchstore_core/_native_guarding.c",
                "src/torchstore_core/_native_hashing.c",
                "src/torchstore_core/_native_transfer.c",
            ],
            extra_compile_args=["-O2"],
            optional=True,
        )
    ]
)
