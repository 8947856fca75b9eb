"""The commands of ``python -m cupy_sdpa``: NAME is ``NAME_command.py``, and is listed in ``COMMANDS`` of ``main.py``."""
