"""``torchstore doctor``: the examination, the check of plug-ins, and the report as text."""
