"""The compiled extension, or one sentence on how to get it."""

try:
    import adaptive_spec_ext as ext
except ModuleNotFoundError as error:
    if error.name != "adaptive_spec_ext":
        raise
    raise ImportError(
        "adaptive_spec_ext is not installed; build it with `pip install -e .` (or `make build`) in "
        "the repository's root"
    ) from None

_C = ext._C

__all__ = ["_C", "ext"]
